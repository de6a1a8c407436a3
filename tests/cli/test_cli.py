"""The command line: what it refuses and how, what it prints for machines, and its frozen surface."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from murmurate.__main__ import main as command
from murmurate.cli import main as cli
from murmurate.cli.help import verbs_of
from murmurate.cli.main import _parser, main
from murmurate.cli.options import change, options
from murmurate.cli.run_verbs import report_end
from murmurate.errors import Refusal
from murmurate.fabric.interface import Capability
from murmurate.fabric.processes import memory_limits
from murmurate.launch.local import Local
from murmurate.recipes import recipe
from murmurate.strategies import strategies
from murmurate.training import memory
from murmurate.training import preflight as checks
from murmurate.training.run_folder import new_folder
from murmurate.training.session import Finish
from short_runs import SHORT, altered, content, preflight, refused

GOLDEN = Path(__file__).parents[1] / "golden" / "cli_surface.json"


# -- refusals before a run -------------------------------------------------------------------------------

_G = "cartpole-gala"
_REFUSALS: dict[str, tuple[list[str], str]] = {
    "nothing to train": ([], "Say what to train, as in: murmurate train pong-gala"),
    "recipe": (["cartpole-gal"], "no recipe called 'cartpole-gal'. Did you mean 'cartpole-gala'?"),
    "game": (["pnog-gala"], "no world called 'pnog'. Did you mean 'pong'? Run: murmurate list worlds"),
    "an environment": (["CartPole-v1"], "an environment of Gymnasium. Use --env CartPole-v1 --algorithm ppo"),
    "nothing near": (["zzzzzz"], "no recipe called 'zzzzzz'. Run: murmurate list recipes"),
    "strategy": (
        [_G, "--strategy", "local-sdg"],
        "no strategy called 'local-sdg'. Did you mean 'local-sgd'? Run: murmurate list strategies",
    ),
    "launcher": ([_G, "--launcher", "loacl"], "no launcher called 'loacl'. Did you mean 'local'?"),
    "field": ([_G, "--replicass", "3"], "no field called 'replicass'. Did you mean --replicas?"),
    "nested field": (
        [_G, "--agent.learningrate", "3"],
        "no field called 'agent.learningrate'. Did you mean --agent.learning-rate?",
    ),
    "field of another package": (["cartpole-ppo", "--gamma", "1"], "Did you mean --agent.discount?"),
    "field of another package, in a group": (["cartpole-ppo", "--agent.lr", "1"], "--agent.learning-rate?"),
    "one that is two": (["pendulum-td3", "--lr", "1"], "mean --agent.policy-rate and --agent.critic-rate?"),
    "one that is elsewhere": (["cartpole-dqn", "--buffer-size", "1"], "Did you mean --replay.capacity?"),
    "another package's number of updates": (
        ["pendulum-sac", "--gradient-steps", "1"],
        "mean --replay.samples-per-insert? It is the number of updates per env step, times agent.batch.",
    ),
    "another package's size of a part": (
        ["cartpole-ppo", "--batch-size", "64"],
        "mean --agent.minibatches? It is the number of parts of a rollout: agent.steps x simulators /",
    ),
    "another package's env steps": (
        ["cartpole-dqn", "--target-update-interval", "500"],
        "mean --agent.target-every? It counts a learner's updates, not env steps.",
    ),
    "another package's share of the run": (
        ["cartpole-dqn", "--exploration-fraction", "0.1"],
        "mean --agent.explore-updates? It counts a learner's updates: env steps x replay.samples_per_insert",
    ),
    "another package's constant": (
        ["pendulum-sac", "--ent-coef", "0.2"],
        "mean --agent.temperature? It is the initial value, which stays only if temperature_rate is 0.",
    ),
    "another package's name, like one of ours": (["cartpole-ppo", "--grad-clip", "1"], "mean --agent.clip?"),
    "another package's field that nothing stands for": (
        ["cartpole-ppo", "--target-kl", "0.01"],
        "no field called 'target-kl'. No agent ends its epochs at a KL divergence",
    ),
    "torso of an agent without": (
        ["pendulum-sac", "--agent.torso", "mlp"],
        "This agent's nets are MLPs, whose layers have --agent.hidden units.",
    ),
    "field without its group": ([_G, "--learning-rate", "-3"], "--agent.learning-rate is -3.0"),
    "bare name of two": (
        ["cartpole-dqn", "--epsilon", "1"],
        "--epsilon may be --agent.epsilon or --replay.epsilon. Say which",
    ),
    "another package's name of one field, and of another": (
        ["pendulum-sac", "--alpha", "0.2"],
        "--alpha may be --replay.alpha or --agent.temperature. Say which",
    ),
    "field of another strategy": ([_G, "--strategy.period", "3"], "no field called 'strategy.period'"),
    "private field": ([_G, "--strategy._round", "3"], "no field called"),
    "the recipe's name": ([_G, "--recipe", "x"], "no field called 'recipe'"),
    "stray word": ([_G, "stray"], "'stray' belongs to no option"),
    "no value": ([_G, "--replicas"], "--replicas needs a value (integer), as in --replicas 4"),
    "no name": (["cartpole-dqn", "--replay.folder"], "(name or none), as in --replay.folder NAME"),
    "word for a number": ([_G, "--replicas", "four"], "takes integer, not 'four'"),
    "word for a share": (
        ["cartpole-dqn", "--replay.alpha-end", "all"],
        "number or none, not 'all'; for example --replay.alpha-end 1.",
    ),
    "part of a step": ([_G, "--env-steps", "1.5"], "takes integer or none, not '1.5'"),
    "choice": (
        [_G, "--agent.optimizer", "sgd"],
        "--agent.optimizer takes rmsprop|adam, not 'sgd'; for example --agent.optimizer rmsprop",
    ),
    "choices of a list": ([_G, "--loggers", "mlflow,foo"], "not 'foo'; for example --loggers wandb"),
    "flag": ([_G, "--double-buffer", "maybe"], "takes true|false, not 'maybe'"),
    "solo with two": (
        [_G, "--strategy", "solo", "--replicas", "2"],
        "the run has 2. Use --replicas 1, or let them agree: --strategy all-reduce",
    ),
    "no replica": ([_G, "--replicas", "0"], "replicas is 0; it must be from 1 to 1000000. Use --replicas 4"),
    "fewer than no replica": ([_G, "--replicas", "-2"], "replicas is -2"),
    "no simulator": ([_G, "--simulators", "0"], "simulators is 0"),
    "half a simulator": ([_G, "--simulators", "1", "--double-buffer"], "each half of a double buffer"),
    "steps backwards": ([_G, "--env-steps", "-5"], "env-steps is -5; it must be at least 1"),
    "no time": ([_G, "--minutes", "0"], "--minutes is 0.0; it must be above 0"),
    "no end": ([_G, "--env-steps", "none"], "no end: give --env-steps, --updates or --minutes"),
    "no game to play": ([_G, "--eval-episodes", "0"], "--eval-episodes is 0; it must be at least 1"),
    "no rollout": ([_G, "--agent.steps", "0"], "agent.steps is 0"),
    "more than all": ([_G, "--agent.discount", "2"], "--agent.discount is 2.0; it must be from 0 to 1"),
    "beyond": ([_G, "--agent.rmsprop-alpha", "2147483648"], "from 0 to 1. Use --agent.rmsprop-alpha 0.99"),
    "infinite": ([_G, "--agent.value-coefficient", "inf"], "--agent.value-coefficient is inf"),
    "no number": ([_G, "--agent.gae-lambda", "nan"], "--agent.gae-lambda is nan; it must be from 0 to 1"),
    "threads": ([_G, "--placement.threads", "1e308"], "(309 digits); it must be from 1 to 4096"),
    "too large for a float": ([_G, "--replicas", "1e999"], "takes integer, not '1e999'"),
    "digits of another script": ([_G, "--replicas", "\u0663"], "takes integer, not '\u0663'"),
    "no thread": ([_G, "--placement.threads", "0"], "--placement.threads is 0; it must be from 1 to 4096"),
    "never recorded": ([_G, "--record-every-seconds", "0"], "must be above 0"),
    "no device": ([_G, "--placement.devices", "gpu"], "'gpu' is no device. Use --placement.devices cpu"),
    "topology": ([_G, "--strategy.topology", "rign"], "no topology called 'rign'"),
    "rate backwards": ([_G, "--agent.learning-rate", "-1"], "learning-rate is -1.0; it must be at least 0"),
    "no width": ([_G, "--agent.hidden", "0"], "--agent.hidden is 0; it must be at least 1"),
    "one width of two": ([_G, "--agent.hidden", "64,0"], "--agent.hidden is 0; it must be at least 1"),
    "no layer": ([_G, "--agent.hidden", ""], "not ''; for example --agent.hidden 64"),
    "no layers": ([_G, "--agent.hidden", ","], "names no layer; a net has at least one. Give its width"),
    "half a unit": ([_G, "--agent.hidden", "64.5"], "takes integer or integer,..., not '64.5'"),
    "period": (
        [_G, "--strategy", "local-sgd", "--strategy.period", "0"],
        "--strategy.period is 0; it must be at least 1. Use --strategy.period 10",
    ),
}  # fmt: skip


def test_a_world_for_another_agent_names_no_field(capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, "train", "pendulum-dqn").endswith("needs discrete ones: use a2c.")


def test_that_there_is_no_display_is_no_warning_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "fabrics"]) == 0
    with warnings.catch_warnings(record=True) as shown:
        for module in ("glfw", "other"):
            warnings.warn_explicit(f"of {module}", UserWarning, f"{module}.py", 1, module)
    assert [str(warning.message) for warning in shown] == ["of other"]


@pytest.mark.parametrize("case", _REFUSALS)
def test_what_cannot_be_trained_is_refused_in_a_sentence(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, words = _REFUSALS[case]
    assert words in refused(capsys, "train", *arguments, "--out", tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("verb", ["train", "train --seeds 0,1", "tune"])
def test_a_rank_of_torchrun_starts_no_run_of_its_own(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without --launcher torchrun each rank trained a whole run, all of them alike."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "2")
    line = refused(capsys, *verb.split(), "cartpole-a2c", *SHORT, "--out", tmp_path / "run")
    assert "torchrun started this program 2 times" in line
    assert "Add --launcher torchrun" in line
    assert list(tmp_path.iterdir()) == []


def test_a_task_of_several_starts_no_run_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    line = refused(capsys, "train", "cartpole-a2c", *SHORT, "--out", tmp_path / "run")
    assert "srun started 4 tasks of this command" in line
    assert "torchrun" in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_gpu_that_is_not_there_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(
        capsys, "train", "cartpole-gala", "--placement.devices", "cuda:0", "--out", tmp_path / "run"
    )
    assert "names a GPU and torch sees none. Use --placement.devices cpu" in line
    assert list(tmp_path.iterdir()) == []


_USAGE = {
    "verb": (["trian"], "'fpga'). Did you mean 'train'? See: murmurate --help"),
    "verb like no other": (["x"], "'fpga'). See: murmurate --help"),
    "shell": (["completion", "zhs"], "'zsh'). Did you mean 'zsh'? See: murmurate completion --help"),
    "option of another verb": (
        ["eval", "DIR", "--foo"],
        "eval has no option --foo. See: murmurate eval --help",
    ),
    "abbreviated option": (["eval", "DIR", "--vid"], "eval has no option --vid. See"),
    "no folder": (["resume"], "required: folder. See: murmurate resume --help"),
    "word for a number": (["eval", "DIR", "--episodes", "x"], "'x' is no integer at least 1"),
    "integer beyond": (
        ["fpga", "simulate", "--seed", "9" * 20],
        f"'{'9' * 20}' is no integer at most 9223372036854775807",
    ),
    "not finite": (["plan", "cartpole-a2c", "--target", "nan"], "'nan' is no finite number. See"),
    "list": (
        ["list", "recipies"],
        "no list called 'recipies'. Did you mean 'recipes'? Use one of: recipes, worlds",
    ),
    "name that no list has": (["bench", "memr", "--tasks", "x"], "no task called 'x'. Use one of: "),
}


@pytest.mark.parametrize("case", _USAGE)
def test_what_is_no_command_is_refused_in_a_sentence(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, words = _USAGE[case]
    assert words in refused(capsys, *arguments)


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


def test_a_folder_that_holds_a_run_or_anything_else_is_left_alone(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    before = content(run_folder)
    line = refused(capsys, "train", "cartpole-gala", *SHORT, "--out", run_folder)
    assert f"already holds a run. Go on with it: murmurate resume {run_folder}" in line
    assert content(run_folder) == before

    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.tex").write_text("precious")
    assert "is not empty and holds no run" in refused(capsys, "train", "cartpole-gala", *SHORT, "--out", mine)
    line = refused(capsys, "train", "cartpole-gala", *SHORT, "--out", mine / "thesis.tex")
    assert "Choose another folder with --out" in line
    assert content(mine) == {"thesis.tex": b"precious"}


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


def test_too_little_memory_is_refused_with_both_sizes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_limits, "available_bytes", lambda: 2**27)
    line = refused(capsys, "train", "cartpole-gala", "--out", tmp_path / "run")
    assert "cartpole-gala with 4 replica(s) needs" in line
    assert "128 MiB are free. Use fewer replicas" in line
    assert list(tmp_path.iterdir()) == []


def test_more_replicas_and_larger_networks_need_more_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    needed: list[int] = []
    monkeypatch.setattr(memory, "refuse_if_small", lambda size, *_: needed.append(size))
    small = recipe("cartpole-gala")
    wide = dataclasses.replace(small, learner=dataclasses.replace(small.learner, hidden=512))
    for run in (small, dataclasses.replace(small, replicas=8), wide):
        preflight(run)
    assert needed[1] == 2 * needed[0]
    # two hidden layers a head at least: the widest is 512 x 512 numbers of 4 bytes
    assert needed[2] - needed[0] > 4 * 512 * 512 * 4


@pytest.mark.parametrize("name", sorted(strategies()))
def test_a_launcher_that_cannot_carry_a_strategy_is_named_with_one_that_it_can(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = strategies()[name]
    run = dataclasses.replace(recipe("cartpole-gala"), strategy=kind(), replicas=1)
    for offered in (
        frozenset(Capability),
        frozenset({Capability.REGISTER}),
        frozenset({Capability.COLLECTIVE}),
    ):
        far = Local()
        monkeypatch.setattr(Local, "offers", offered)
        missing = sorted(c.value for c in kind().needs - offered)
        if not missing:
            checks.preflight(run, far)
            continue
        with pytest.raises(Refusal) as refusal:
            checks.preflight(run, far)
        assert f"{name} needs {' and '.join(missing)}, which the local launcher does not offer" in str(
            refusal.value
        )
        other = "gala" if Capability.REGISTER in offered else "all-reduce"
        assert f"Use --strategy {other}" in str(refusal.value)
        assert strategies()[other]().needs <= offered, "the remedy must be one"


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


# -- the frozen surface ----------------------------------------------------------------------------------


def _surface() -> dict[str, Any]:
    verbs = dict(next(a for a in _parser()._actions if a.dest == "verb").choices or {})
    inner = next(a for a in verbs["topics"]._actions if a.dest == "inner").choices or {}
    verbs |= {f"topics {name}": parser for name, parser in dict(inner).items()}
    frozen = ("cartpole-gala", "pong-gala", "cartpole-a2c", "pong-a2c", "corpus-lda", "table-gmm")
    runs = {name: recipe(name) for name in frozen}
    cartpole = recipe("cartpole-gala")
    return {
        "verbs": {
            name: sorted(word for a in parser._actions for word in (a.option_strings or [a.dest]))
            for name, parser in verbs.items()
        },
        "recipes": {name: _fields(run) for name, run in runs.items()},
        "strategies": {
            name: {
                k: v
                for k, v in _fields(dataclasses.replace(cartpole, strategy=kind())).items()
                if k.startswith("strategy.")
            }
            for name, kind in strategies().items()
        },
    }


def _fields(run: Any) -> dict[str, Any]:
    return {
        option.name: {
            "type": option.type_name(),
            "default": list(option.value) if isinstance(option.value, tuple) else option.value,
        }
        for option in options(run)
    }


_PROMISE = (
    "The command line is a promise: scripts use its names and defaults. What is new needs nothing. If a name "
    "is to go, say so in CHANGELOG.md and run MURMURATE_GOLDEN=write python -m pytest tests/cli/test_cli.py"
)


def test_what_was_promised_of_the_command_line_is_there() -> None:
    if os.environ.get("MURMURATE_GOLDEN") == "write":
        GOLDEN.write_text(json.dumps(_surface(), indent=1) + "\n")
    frozen, now = json.loads(GOLDEN.read_text()), _surface()
    for verb, words in frozen["verbs"].items():
        assert set(words) <= set(now["verbs"][verb]), f"{verb}: {_PROMISE}"
    for part in ("recipes", "strategies"):
        for name, fields in frozen[part].items():
            gone = {key: value for key, value in fields.items() if now[part][name].get(key) != value}
            assert not gone, f"{name}: {_PROMISE}"


def test_names_frozen_by_the_design_are_there() -> None:
    frozen = json.loads(GOLDEN.read_text())
    assert {"simulators", "checkpoint-every-env-steps", "stop-at-return"} <= frozen["recipes"][
        "pong-gala"
    ].keys()
    verbs = {"train", "resume", "eval", "report", "list", "bench", "doctor"}
    assert verbs <= frozen["verbs"].keys()
    assert frozen["recipes"]["pong-gala"]["replicas"]["default"] == 4
    assert frozen["recipes"]["pong-a2c"]["replicas"]["default"] == 1
    assert {"--episodes", "--video", "--json"} <= set(frozen["verbs"]["eval"])
