"""Benches of continuous control: the limit has the learner's products, and figures by hand."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from murmurate import recipes
from murmurate.agents.sac import SAC
from murmurate.agents.td3 import TD3
from murmurate.bench import _sb3_learning, control_learning, control_throughput, spo_learning
from murmurate.bench._control_limit import ACTIONS, BATCH, OBSERVED, UpdateProducts
from murmurate.bench._racer import RaceWindow
from murmurate.cli.options import change
from murmurate.errors import MissingExtra, Refusal
from murmurate.replay.interface import Sample
from murmurate.replica.vector import Replica
from murmurate.replicator.learner import Context
from murmurate.spec import Batch, EnvSpec


@pytest.mark.parametrize("algorithm", ["td3", "sac"])
def test_the_limit_multiplies_what_the_learner_multiplies(algorithm: str) -> None:
    spec = EnvSpec("halfcheetah", (OBSERVED,), torch.float32, actions=0, action_shape=(ACTIONS,))
    learner = {"td3": TD3, "sac": SAC}[algorithm]().build(Context(spec, Replica, 0))
    data = Sample(
        torch.arange(BATCH),
        torch.ones(BATCH),
        torch.randn(BATCH, OBSERVED),
        torch.rand(BATCH, ACTIONS),
        torch.randn(BATCH),
        torch.ones(BATCH),
        torch.randn(BATCH, OBSERVED),
    )
    limit = UpdateProducts(algorithm, torch.float32)
    with FlopCounterMode(display=False) as ours:
        for _ in range(2):
            learner.learn(Batch(data))
    with FlopCounterMode(display=False) as products:
        for _ in range(2):
            limit()
    # the learner's sums over the batch for the biases' gradients are products with a row of ones
    assert products.get_total_flops() <= ours.get_total_flops() <= 1.01 * products.get_total_flops()


def test_ratios_are_those_of_the_same_rounds() -> None:
    def windows(*rates: float) -> list[RaceWindow]:
        return [RaceWindow(int(rate * 10), 10.0, 10.0) for rate in rates]

    of = {}
    for algorithm, ours in (("td3", (200.0, 100.0)), ("sac", (100.0, 50.0))):
        of |= {
            f"ours {algorithm} float32": windows(*ours),
            f"ours {algorithm} bfloat16": windows(*(2 * rate for rate in ours)),
            f"limit {algorithm} float32": windows(*(1.25 * rate for rate in ours)),
            f"limit {algorithm} bfloat16": windows(*(5 * rate for rate in ours)),
            f"sb3 {algorithm}": windows(*(0.5 * rate for rate in ours)),
        }
    of["sbx sac"] = windows(80.0, 40.0)
    found = control_throughput.figures(of)
    assert found["td3_ratio_sb3"] == pytest.approx(2.0)
    assert found["sac_ratio_limit"] == pytest.approx(0.8)
    assert found["td3_bfloat16_ratio_sb3"] == pytest.approx(4.0)
    assert (found["fastest_peer"], found["ratio_fastest_peer"]) == ("sbx sac", pytest.approx(1.25))


def test_a_peer_without_a_script_for_control_did_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MURMURATE_PEERS", str(tmp_path))
    interpreter = tmp_path / "sbx" / ".venv" / "bin" / "python"
    interpreter.parent.mkdir(parents=True)
    interpreter.touch()
    assert control_throughput._absent("sbx") == f"not run: there is no {tmp_path / 'sbx' / 'control.py'}"
    assert "sbx td3" not in control_throughput._racers(tmp_path)
    (tmp_path / "sbx" / "control.py").touch()
    assert control_throughput._absent("sbx") is None
    assert "sbx td3" in control_throughput._racers(tmp_path)


def test_a_row_of_the_learning_bench() -> None:
    plan = control_learning.ControlLearningPlan()
    summaries = [
        {
            "eval_return_mean": value,
            "train_return_mean": value - 900,
            "exit": "finished",
            "wall_seconds": 3600.0,
        }
        for value in (7000.0, 8000.0)
    ]
    row = control_learning._row(plan, "halfcheetah", "td3", summaries, [9000.0, 11000.0])
    assert row["mean"] == 7500.0
    assert row["published"] == {"mean": 7697.0, "deviation": 727.0}
    assert row["reached"] is True
    # t is the root of 5, with 1.47 degrees of freedom: 0.155 with 2, as Student's test has it, 0.268 with 1
    assert 0.165 < row["welch_p"] < 0.25
    assert control_learning._row(plan, "hopper", "td3", summaries, [])["welch_p"] is None


def test_what_is_published_of_training_episodes_is_compared_with_these() -> None:
    plan = control_learning.ControlLearningPlan(env_steps=1_000_000)
    for trained, reached in ((9000.0, True), (8000.0, False)):
        run = {
            "eval_return_mean": 9600.0,
            "train_return_mean": trained,
            "exit": "finished",
            "wall_seconds": 1.0,
        }
        row = control_learning._row(plan, "halfcheetah", "sac", [run], [])
        assert (row["reached"], row["mean"], row["train_returns"]) == (reached, 9600.0, [trained])
        assert control_learning._row(plan, "halfcheetah", "td3", [run], [])["reached"] is True


def test_the_papers_settings_are_td3s_and_have_runs_of_their_own() -> None:
    standard, paper = (control_learning.ControlLearningPlan(settings=name) for name in ("recipe", "paper"))
    runs = [control_learning._planned(plan, "hopper", "td3", 0) for plan in (standard, paper)]
    assert runs[0].folder != runs[1].folder
    for run, values in zip(runs, [(256, 3e-4, 256, 25_000), (100, 1e-3, 400, 1_000)], strict=True):
        trained: Any = change(recipes.recipe("hopper-td3"), run.settings, "murmurate train")
        learner, source = trained.learner, trained.source
        assert (learner.batch, learner.critic_rate, learner.hidden, source.random_env_steps) == values
        assert learner.policy_rate == learner.critic_rate
        assert source.replay.samples_per_insert == learner.batch
        plan = standard if run is runs[0] else paper
        assert dataclasses.astuple(control_learning._hyperparameters(plan, "hopper", "td3")) == values
    assert control_learning._hyperparameters(paper, "halfcheetah", "td3").random_env_steps == 10_000
    with pytest.raises(Refusal, match="The paper's settings are TD3's: add --agents td3"):
        control_learning.measure(dataclasses.replace(paper, agents=("td3", "sac")), print)


def test_an_agent_that_has_no_peer_is_refused_before_anything_is_trained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("murmurate.bench._commands.missing", lambda *_: None)
    monkeypatch.setattr("murmurate.bench._resumable.expected", lambda *_: pytest.fail("it began"))
    plan = control_learning.ControlLearningPlan(agents=("td3", "ddpg"))
    with pytest.raises(Refusal, match=r"Only td3 and sac .* use --sb3-seeds 0"):
        control_learning.measure(plan, print)


def test_games_of_stable_baselines3_are_drawn_by_the_runs_seed() -> None:
    pytest.importorskip("stable_baselines3")
    run = functools.partial(
        _sb3_learning.train, algorithm="sac", env_id="Pendulum-v1", env_steps=3, random_env_steps=3,
        batch=2, rate=1e-3, hidden=4, games=1,
    )  # fmt: skip
    first, again, other = (run(seed=seed) for seed in (0, 0, 1))
    assert first == again != other


def test_learners_of_spo_share_batch_and_steps() -> None:
    plan = spo_learning.FULL
    assert spo_learning._cases(plan) == [(1, 10), (2, 10), (4, 10), (4, 5), (4, 25)]
    run = spo_learning._planned(plan, "hopper", 4, 25, 0)
    options = dict(zip(run.settings[::2], run.settings[1::2], strict=True))
    assert (options["--agent.batch"], options["--replay.learning-starts"]) == ("64", "6000")
    assert (options["--strategy.period"], options["--agent.target-every"]) == ("25", "200")


def test_a_row_does_not_judge_survivors() -> None:
    plan = control_learning.ControlLearningPlan()
    summaries = [
        {"eval_return_mean": 8000.0, "train_return_mean": 0.0, "exit": exit_, "wall_seconds": 1.0}
        for exit_ in ("finished", "finished", "failed: the loss of replica 0 is nan")
    ]
    row = control_learning._row(plan, "halfcheetah", "td3", summaries, [7000.0, 8000.0])
    assert (row["diverged"], row["mean"], row["reached"], row["welch_p"]) == (1, 8000.0, False, None)
    assert control_learning._welch([1.0, 1.0], [2.0, 2.0]) is None, "NaN is no JSON"


@pytest.mark.parametrize("package", ["stable-baselines3", "scipy"])
def test_a_missing_package_is_named_before_anything_is_trained(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("murmurate.bench._commands.missing", lambda name, *_: name == package)
    monkeypatch.setattr("murmurate.bench._resumable.expected", lambda *_: pytest.fail("it began"))
    with pytest.raises(MissingExtra, match=package):
        control_learning.measure(control_learning.FULL, print)
    if package == "scipy":
        with pytest.raises(MissingExtra, match=package):
            spo_learning.measure(spo_learning.FULL, print)


def test_learners_that_cannot_share_a_batch_are_refused() -> None:
    plan = dataclasses.replace(spo_learning.FULL, learners=(1, 3))
    with pytest.raises(Refusal, match=r"3 learners cannot share a batch of 256 equally. Use --batch 258"):
        spo_learning.measure(plan, print)
