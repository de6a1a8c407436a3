"""What a resume may change and what it refuses, its end, and the commands that are advised."""

from __future__ import annotations

import dataclasses
import json
import shlex
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

import murmurate
from murmurate.cli.main import main
from murmurate.cli.run_verbs import report_end
from murmurate.launch.inline import Inline
from murmurate.launch.torchrun import Torchrun
from murmurate.recipes import recipe
from murmurate.record.reader import read_metrics
from murmurate.record.runs import open_run
from murmurate.record.stored import write_json
from murmurate.sources.rollouts import RolloutSource
from murmurate.training import checkpoint
from murmurate.training.resumed_settings import reached_end
from short_runs import SHORT, altered, content, refused, train


def test_advised_commands_name_a_folder_with_a_space_as_a_shell_takes_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "a run"
    begin = ["train", "cartpole-a2c", *SHORT, "--out", str(folder)]
    assert main(begin) == 0
    capsys.readouterr()
    command = f"murmurate resume '{folder}'"
    assert f"Go on with it: {command};" in refused(capsys, *begin)
    assert checkpoint.kept_sentence(folder).endswith(f"is kept: {command}")
    assert f"--initial '{folder}' begins with" in refused(capsys, "resume", folder, "--seed", "5")
    assert f"See: {command} --help" in refused(capsys, "resume", folder, "--nonsense", "5")
    env = f"env:{tmp_path}/an env.py:make-a2c"
    (tmp_path / "an env.py").write_text("import gymnasium\nmake = lambda: gymnasium.make('CartPole-v1')\n")
    said = refused(capsys, "train", env, "--nonsense", "5")
    assert f"See: murmurate train '{env}' --help" in said
    (folder / "run.json").write_text((folder / "run.json").read_text().replace("cartpole", "acrobot"))
    assert f"as in {command} --env-steps" in refused(capsys, "resume", folder)


def test_a_launcher_says_what_the_command_to_resume_with_begins_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert Torchrun.command_prefix == "torchrun ... -m "
    monkeypatch.setattr(Inline, "command_prefix", "srun ")
    folder = tmp_path / "run"
    finish = train(altered(recipe("cartpole-a2c"), launcher="inline", updates=1, eval_episodes=1), folder)
    capsys.readouterr()
    assert report_end(finish) == 0
    assert "next: murmurate report" in capsys.readouterr().out
    for code, how, before in ((130, "interrupted", "next"), (1, "failed: no room", "is kept")):
        report_end(dataclasses.replace(finish, code=code, summary={**(finish.summary or {}), "exit": how}))
        said = capsys.readouterr()
        assert f"{before}: srun murmurate resume {folder}\n" in said.out + said.err


def test_a_resume_with_other_settings_keeps_the_commands_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "a run"
    begin = ["train", "cartpole-a2c", *SHORT, "--out", str(folder)]
    longer = ["resume", str(folder), "--updates", "3"]
    for words in (begin, longer, longer):
        monkeypatch.setattr("sys.argv", ["murmurate", *words])
        assert main(words) == 0
    repeats = open_run(folder).command
    assert repeats == (f"{shlex.join(['murmurate', *begin])}\n{shlex.join(['murmurate', *longer])}", True)


def test_resume_refuses_an_end_that_is_past(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    assert main(["train", "cartpole-a2c", *SHORT, "--updates", "3", "--out", str(folder)]) == 0
    capsys.readouterr()
    before = content(folder)
    steps = json.loads((folder / "summary.json").read_text())["env_steps"]
    said = refused(capsys, "resume", folder, "--env-steps", steps)
    assert said == f"{folder} is already at {steps} env steps; give more than that."
    assert "is already at 3 updates; give more" in refused(capsys, "resume", folder, "--updates", 2)
    minutes = checkpoint.read_manifest(folder / "checkpoints" / "last")["seconds"] / 60
    said = refused(capsys, "resume", folder, "--minutes", minutes)
    assert said == f"{folder} is already at {round(minutes, 3)} minutes; give more than that."
    assert content(folder) == before
    assert main(["resume", str(folder), "--env-steps", str(steps + 1), "--updates", "none"]) == 0


def test_resume_refuses_to_move_another_end_than_the_one_reached(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    assert main(["train", "cartpole-a2c", *SHORT, "--updates", "3", "--out", str(folder)]) == 0
    capsys.readouterr()
    before = content(folder)
    said = refused(capsys, "resume", folder, "--env-steps", 10**6)
    assert said == (
        f"{folder} would learn nothing more: it has reached its end of 3 updates. To go on, give more with "
        "--updates (in Python: updates), too."
    )
    assert content(folder) == before


def test_a_run_that_has_reached_its_end_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    assert main(["train", "cartpole-a2c", *SHORT, "--updates", "3", "--out", str(folder)]) == 0
    before = content(folder)
    capsys.readouterr()
    assert main(["resume", str(folder)]) == 0
    said = capsys.readouterr().out
    assert f"{folder} holds a run that has finished: it has reached its end of 3 updates. To go on" in said
    assert "give more with --updates (in Python: updates)" in said
    assert content(folder) == before
    summary = json.loads((folder / "summary.json").read_text())
    assert murmurate.resume(folder, quiet=True).summary.items() <= summary.items()
    assert content(folder) == before
    write_json(folder / "summary.json", {"exit": "finished", "eval_return_mean": None})
    assert main(["resume", str(folder)]) == 0
    assert json.loads((folder / "summary.json").read_text())["eval_return_mean"] is not None
    before = content(folder)
    capsys.readouterr()
    assert main(["resume", str(folder), "--placement.threads", "2"]) == 0
    assert "holds a run" not in capsys.readouterr().out, "with other settings it is evaluated anew"
    assert json.loads((folder / "summary.json").read_text())["updates"] == 3
    assert (folder / "run.json").read_bytes() != before["run.json"]


def test_a_run_that_has_reached_its_return_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    words = ["--launcher", "inline", "--stop-at-return", "1", "--eval-episodes", "1"]
    # a fast machine makes many env steps before the return is looked at
    assert main(["train", "cartpole-a2c", *words, "--env-steps", "1000000000", "--out", str(folder)]) == 0
    before = content(folder)
    capsys.readouterr()
    assert main(["resume", str(folder)]) == 0
    said = capsys.readouterr().out
    assert "has finished: the mean return of the last 100 training episodes reached 1. To go on, give" in said
    assert content(folder) == before
    more = json.loads(before["summary.json"])["env_steps"] + 1000
    assert main(["resume", str(folder), "--stop-at-return", "none", "--env-steps", str(more)]) == 0
    assert json.loads((folder / "summary.json").read_text())["env_steps"] >= more


def test_the_end_of_a_run_is_told_in_its_unit(tmp_path: Path) -> None:
    run = altered(recipe("cartpole-a2c"), launcher="inline", updates=4, simulators=2, eval_episodes=1)
    newest = train(run, tmp_path / "run").folder / "checkpoints" / "last"
    for end, goal, words in (("env_steps", 10, "10 env steps"), ("minutes", 0.0001, "0.0001 minutes")):
        said = reached_end(altered(run, updates=None, **{end: goal}), newest)
        option = end.replace("_", "-")
        assert said == (
            f"it has reached its end of {words}. To go on, give more with --{option} (in Python: {end})"
        )
        assert reached_end(altered(run, updates=None, **{end: 10**6}), newest) == ""


def test_env_steps_of_a_replica_that_died_are_part_of_the_end_that_is_past(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    options = ("--strategy", "gala", "--replicas", "2", "--out", str(folder))
    assert main(["train", "cartpole-a2c", *SHORT, *options]) == 0
    last = folder / "checkpoints" / "last"
    manifest = checkpoint.read_manifest(last)
    del manifest["parts"]["replica-1.safetensors"]
    checkpoint.write_json(last / "state.json", {**manifest, "living": [0], "dead": [1]})
    capsys.readouterr()
    steps = manifest["env_steps"]
    said = refused(capsys, "resume", folder, "--env-steps", steps - 1)
    assert said == f"{folder} is already at {steps} env steps; give more than that."


@pytest.mark.parametrize("launcher", ["inline", "local"])
def test_a_resume_that_is_stopped_before_its_replicas_begin_keeps_the_counts(
    launcher: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    folder = tmp_path / "run"
    assert main(["train", "cartpole-a2c", *SHORT, "--updates", "3", "--out", str(folder)]) == 0
    before = json.loads((folder / "summary.json").read_text())
    fabric = SimpleNamespace(run=interrupted)
    monkeypatch.setattr("murmurate.launch.inline.SimulatedFabric", lambda *_, **__: fabric)
    monkeypatch.setattr("murmurate.launch.local.WorkerProcesses.start", interrupted)
    words = ["resume", str(folder), "--updates", "9", "--env-steps", "none", "--launcher", launcher]
    assert main(words) == 130
    after = json.loads((folder / "summary.json").read_text())
    assert [after[name] for name in ("env_steps", "updates")] == [before["env_steps"], 3]
    assert after["env_steps_per_second"] == 0
    (resumed,) = [
        event for event in read_metrics(folder / "metrics.jsonl") if event.get("event") == "resumed"
    ]
    assert [resumed[name] for name in ("env_steps", "updates")] == [before["env_steps"], 3]


def test_a_resume_whose_member_cannot_load_its_part_changes_nothing_that_is_settled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    assert main(["train", "cartpole-a2c", *SHORT, "--out", str(folder)]) == 0
    before = content(folder)

    def misfit(*_: object) -> None:
        raise ValueError("the simulators are of another version")

    with monkeypatch.context() as patch:
        patch.setattr(RolloutSource, "load", misfit)
        assert main(["resume", str(folder), "--updates", "4"]) == 2
    assert "does not fit this run (the simulators are of another version)" in capsys.readouterr().err
    after = content(folder)
    assert all(after[name] == before[name] for name in ("run.json", "summary.json"))


def test_resume_refuses_another_strategy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "strategy cannot change on resume" in refused(capsys, "resume", tmp_path, "--strategy", "gala")


@pytest.mark.parametrize(
    ("field", "value"),
    [("agent.learning-rate", "1e-4"), ("double-buffer", "true"), ("strategy.topology", "complete")],
)
def test_resume_refuses_to_change_what_was_learned_with(
    run_folder: Path, capsys: pytest.CaptureFixture[str], field: str, value: str
) -> None:
    capsys.readouterr()
    before = content(run_folder)
    said = refused(capsys, "resume", run_folder, f"--{field}", value)
    assert f"--{field} cannot change on resume" in said
    assert f"--initial {run_folder} begins with what it has learned" in said
    assert content(run_folder) == before
