"""The command line: what it refuses before a run, and how."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from murmurate.errors import Refusal
from murmurate.fabric.interface import Capability
from murmurate.fabric.processes import memory_limits
from murmurate.launch.local import Local
from murmurate.recipes import recipe
from murmurate.strategies import strategies
from murmurate.training import memory
from murmurate.training import preflight as checks
from short_runs import SHORT, content, preflight, refused

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
    "last part of an option": (["eval", "DIR", "--skip-bad"], "Did you mean --world.skip-bad? See"),
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
