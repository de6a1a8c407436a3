"""The command line: what it prints for people and machines, and how options are read."""

from __future__ import annotations

import dataclasses
import json
import signal
import sys
import types
import warnings
from pathlib import Path

import pytest

from murmurate.__main__ import main as command
from murmurate.cli import main as cli
from murmurate.cli.help import verbs_of
from murmurate.cli.main import _parser, main
from murmurate.cli.options import change, options
from murmurate.cli.run_verbs import report_end
from murmurate.recipes import recipe
from murmurate.strategies import strategies
from murmurate.training.run_folder import new_folder
from murmurate.training.session import Finish
from short_runs import SHORT, altered, refused


def test_that_there_is_no_display_is_no_warning_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "fabrics"]) == 0
    with warnings.catch_warnings(record=True) as shown:
        for module in ("glfw", "other"):
            warnings.warn_explicit(f"of {module}", UserWarning, f"{module}.py", 1, module)
    assert [str(warning.message) for warning in shown] == ["of other"]


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (OSError(13, "Permission denied", "x"), "x: Permission denied. Check that the file is there"),
        (OSError(111, "Connection refused"), "The system: Connection refused.\n"),
        (OSError(24, "Too many files"), "The system: Too many files; raise their limit: ulimit -n 4096.\n"),
        (OSError(24, "Too many files", "x"), "x: Too many files; raise their limit: ulimit -n 4096.\n"),
    ],
)
def test_an_error_of_the_system_names_a_file_where_there_is_one(
    error: OSError, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(what: str) -> None:
        raise error

    monkeypatch.setattr("murmurate.cli.listing.listing", fail)
    assert main(["list"]) == 1
    assert f"murmurate: {line}" in capsys.readouterr().err


def test_a_dry_run_prints_the_settings_that_the_run_would_have_and_leaves_nothing(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", "cartpole-gala", *SHORT, "--dry-run"]) == 0
    said = capsys.readouterr()
    settings, stored = json.loads(said.out), json.loads((finished / "run.json").read_text())
    assert settings == {name: stored[name] for name in settings}
    assert {"strategy", "agent", "replicas", "updates"} <= settings.keys()
    assert "GiB. Nothing was started." in said.err
    assert "replicas is 0" in refused(capsys, "train", "--dry-run", "cartpole-gala", "--replicas", "0")
    line = refused(capsys, "train", "cartpole-gala", *SHORT, "--dry-run", "--out", finished)
    assert "already holds a run" in line
    assert not list(tmp_path.iterdir())


def test_an_empty_folder_may_be_given(tmp_path: Path) -> None:
    assert main(["train", "cartpole-gala", *SHORT, "--out", str(tmp_path)]) == 0


def test_a_run_of_any_world_lies_right_below_runs() -> None:
    folder = new_folder("gym:houses:House/Corridor-v0-a2c")
    assert folder.parent == Path("runs")
    assert folder.name.startswith("gym-houses-House-Corridor-v0-a2c-")


def test_ctrl_c_while_the_command_is_imported_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupted(types.ModuleType):
        def __getattr__(self, name: str) -> object:
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "murmurate.cli.main", Interrupted("murmurate.cli.main"))
    assert command() == 130
    assert capsys.readouterr().err == "murmurate: interrupted\n"


def test_after_an_interrupt_the_next_command_is_resume(
    run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = json.loads((run_folder / "summary.json").read_text())
    run = recipe("cartpole-gala")
    for code, simulated, following in ((0, False, "report"), (130, False, "resume"), (130, True, "report")):
        ended = dataclasses.replace(run, launcher="simulated" if simulated else "local")
        assert report_end(Finish(code, summary, run_folder, ended)) == code
        assert f"next: murmurate {following} {run_folder}" in capsys.readouterr().out


def test_a_death_that_ended_the_run_is_not_said_to_have_left_others(
    run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = json.loads((run_folder / "summary.json").read_text()) | {"replicas": 2, "dead_replicas": [1]}
    run = recipe("cartpole-gala")
    for code, ended in ((0, "finished"), (1, "failed: replica 1 died, and that ends all ranks.")):
        report_end(Finish(code, {**summary, "exit": ended}, run_folder, run))
        said = capsys.readouterr().out
        assert ("replica 1 died during the run; the others continued" in said) == (code == 0)


def test_a_failed_run_without_a_checkpoint_is_followed_by_no_command(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``report`` and ``topics show`` would refuse it."""
    summary = json.loads((run_folder / "summary.json").read_text()) | {"exit": "failed: no room."}
    report_end(Finish(1, summary, tmp_path, recipe("cartpole-gala")))
    said = capsys.readouterr()
    assert "No checkpoint had been saved" in said.err
    assert said.out.splitlines()[-1] == f"The run is in {tmp_path}"


# -- for machines ----------------------------------------------------------------------------------------


def test_eval_prints_one_object_as_its_last_line(
    run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert main(["eval", str(run_folder), "--episodes", "3", "--json"]) == 0
    said = capsys.readouterr()
    assert said.err == "evaluating 3 games\n"
    found = json.loads(said.out)
    assert found["episodes"] == len(found["returns"]) == 3
    assert found["eval_return_mean"] == pytest.approx(sum(found["returns"]) / 3)
    assert found["recipe"] == "cartpole-gala"
    # another seed, other games; the same seed, the same games
    seeds = []
    for seed in (1, 2, 1):
        assert main(["eval", str(run_folder), "--episodes", "5", "--json", "--seed", str(seed)]) == 0
        seeds.append(json.loads(capsys.readouterr().out.splitlines()[-1])["returns"])
    assert seeds[0] == seeds[2] != seeds[1]


def test_the_summary_has_every_key_of_the_design(finished: Path) -> None:
    summary = json.loads((finished / "summary.json").read_text())
    named = """recipe agent strategy replicas launcher seed env_steps frames updates wall_seconds
        env_steps_per_second train_return_mean eval_return_mean eval_return_stderr episodes staleness_max
        disagreement_final bytes_exchanged dead_replicas events best_eval_return_mean resume_exact exit"""
    assert set(named.split()) <= set(summary)
    assert summary["exit"] == "finished"
    assert (summary["updates"], summary["replicas"], summary["env_steps"]) == (2, 4, 2 * 4 * 2 * 8)
    assert summary["frames"] == summary["env_steps"]  # a CartPole step is one frame
    assert summary["episodes"] == 1
    assert summary["resume_exact"] is False  # GALA is asynchronous
    assert summary["bytes_exchanged"] > 0


def test_the_run_folder_has_what_the_design_says(finished: Path) -> None:
    names = {str(p.relative_to(finished)) for p in finished.rglob("*")}
    wanted = {"run.json", "metrics.jsonl", "summary.json", "roles.jsonl", "checkpoints/last/state.json"}
    assert wanted | {f"checkpoints/last/replica-{i}.safetensors" for i in range(4)} <= names
    for line in (finished / "metrics.jsonl").read_text().splitlines():
        assert {"time_seconds", "env_steps", "updates", "replica"} <= json.loads(line).keys()


# -- fields ----------------------------------------------------------------------------------------------


def test_fields_are_changed_wherever_they_lie() -> None:
    run = recipe("cartpole-gala")
    arguments = """--replicas 3 --env-steps 1e6 --updates=7 --minutes none --double-buffer --seed 5
        --agent.learning-rate 1e-3 --agent.optimizer adam --agent.normalize_advantages true
        --stop-at-return -3.5 --strategy.staleness-bound 9 --placement.devices cpu cpu --placement.threads 2
        --world.max-episode-steps 50"""
    changed = change(run, arguments.split(), "murmurate train cartpole-gala")
    assert changed == altered(
        run,
        replicas=3,
        env_steps=1_000_000,
        updates=7,
        minutes=None,
        double_buffer=True,
        seed=5,
        stop_at_return=-3.5,
        learner=dataclasses.replace(
            run.learner, learning_rate=1e-3, optimizer="adam", normalize_advantages=True
        ),
        strategy=dataclasses.replace(run.strategy, staleness_bound=9),
        placement=dataclasses.replace(run.placement, devices=("cpu", "cpu"), threads=2),
        world=dataclasses.replace(run.world, max_episode_steps=50),
    )
    assert run == recipe("cartpole-gala")
    assert change(run, ["--placement.devices", "cpu,cuda:0"], "").placement.devices == ("cpu", "cuda:0")
    assert change(run, ["--double-buffer", "false"], "") == run
    bare = change(run, ["--learning-rate", "1e-3", "--staleness-bound=9", "--devices", "cpu", "cpu"], "")
    assert (bare.learner.learning_rate, bare.strategy.staleness_bound) == (1e-3, 9)
    assert bare.placement.devices == ("cpu", "cpu")


def test_options_may_stand_before_the_recipe_and_strategies_bring_their_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    before = ["--seed", "3", "--strategy=local-sgd", "--strategy.period", "2"]
    assert main(["train", *before, "cartpole-a2c", *SHORT, "--replicas", "2", "--out", str(folder)]) == 0
    stored = json.loads((folder / "run.json").read_text())
    assert (stored["recipe"], stored["seed"], stored["replicas"]) == ("cartpole-a2c", 3, 2)
    assert (stored["strategy"]["name"], stored["strategy"]["period"]) == ("local-sgd", 2)


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("plan --seed 1 --check pong-gala", "pong-gala"),
        ("topics fit --topics 50 docword.txt --skip-bad", "docword.txt"),
        ("simulate --json --updates 10 cartpole-a2c", "cartpole-a2c"),
        ("resume --minutes=3 runs/a", "runs/a"),
        ("train --double-buffer --seed 1 --replicas 2 cartpole-gala", "cartpole-gala"),
        ("train --agent.hidden 64 32 cartpole-ppo --seed 1", "cartpole-ppo"),
        ("train cartpole-ppo --agent.hidden 64 32", "cartpole-ppo"),
    ],
)
def test_an_option_s_value_is_not_taken_for_the_name(words: str, name: str) -> None:
    ordered = cli._name_first(words.split())
    assert ordered[2 if ordered[0] == "topics" else 1] == name
    assert sorted(ordered) == sorted(words.split())


@pytest.mark.parametrize("verb", ["train", "tune", "resume", "simulate", "plan"])
def test_the_name_may_follow_an_option_that_takes_no_value(verb: str) -> None:
    flags = [
        action.option_strings[-1]
        for action in verbs_of(_parser())[verb]._actions
        if action.nargs == 0 and action.dest != "help"
    ]
    for flag in flags:
        assert cli._name_first([verb, "--seed", "1", flag, "NAME"])[1] == "NAME", flag


def test_help_tells_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "cartpole-gala", "--strategy", "local-sgd", "--help"]) == 0
    text = capsys.readouterr().out
    run = dataclasses.replace(recipe("cartpole-gala"), strategy=strategies()["local-sgd"]())
    for option in options(run):
        assert f"--{option.name} {option.type_name()}" in text
    assert "--replicas integer" in text
    assert "learners that train together (default 4; from 1 to 1000000)" in " ".join(text.split())
    assert "--strategy.period integer" in text


def test_a_bench_gives_back_the_handler_of_sigterm() -> None:
    """To a program that calls ``main``."""
    before = signal.getsignal(signal.SIGTERM)
    assert main(["bench", "fuzz", "--no-such-field", "1"]) == 2
    assert signal.getsignal(signal.SIGTERM) is before
