"""Exponents of the env steps to a target, from training runs whose lengths are written down."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from murmurate.errors import Refusal, RunFailed
from murmurate.launch.local import Local
from murmurate.mapping import learning, variants
from murmurate.mapping.learning import (
    Learning,
    Training,
    answers,
    differences,
    env_steps_to_target,
    factor_pairs,
    factors,
    learned_by,
    to_target,
    unknown_factors,
)
from murmurate.mapping.variants import in_precision
from murmurate.recipes import recipe
from murmurate.strategies import strategy
from murmurate.training.run import Run

RULE = {"replicas": 0.5, "simulators": -0.25, "batch": 0.3, "period": 0.1, "asynchrony": 0.7}
RULE |= {"precision": -0.2, "strategy (elastic)": 0.4, "strategy (dpsgd)": -0.6}
RECIPES = ("cartpole-a2c", "cartpole-gala", "cartpole-dqn", "cartpole-spo-dqn", "cartpole-hsa2c")


def silent(line: str) -> None:
    pass


def rule_of(run: Run) -> float:
    steps = 1e4
    for name, value in factors(run).items():
        steps *= value ** RULE[name]
    return steps


@pytest.mark.parametrize("name", RECIPES)
def test_each_pair_differs_in_its_factor_alone(name: str) -> None:
    pairs = list(factor_pairs(recipe(name)))
    assert {"replicas", "simulators", "period", "asynchrony"} <= {factor for factor, _, _ in pairs}
    for factor, before, after in pairs:
        assert [*differences(after, before)] == [factor]


def test_the_effect_of_a_precision_is_tried_where_the_device_is_faster_in_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = recipe("hopper-td3")
    names = ["float32", "bfloat16"]
    tried = []
    for name in names:
        monkeypatch.setattr(variants, "faster_precision", lambda device, name=name: name)
        tried.append(
            [(before, after) for factor, before, after in factor_pairs(run) if factor == "precision"]
        )
    assert tried == [[], [(run, in_precision(run, "bfloat16"))]]


@pytest.mark.parametrize("name", RECIPES)
def test_a_power_law_is_found_again(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learning, "to_target", lambda run, target, seed: Training(rule_of(run), 1.0, True))
    run = recipe(name)
    found = learning.measure(run, 100.0, silent)
    assert found.exponents == pytest.approx({factor: RULE[factor] for factor in found.exponents})
    assert (found.unfinished, found.missed, found.of) == (0, [], learned_by(run))
    for chosen in (*("all-reduce", "local-sgd", "gala"), run.strategy.name):
        other = dataclasses.replace(run, replicas=4, strategy=strategy(chosen)())
        assert env_steps_to_target(other, run, found) == pytest.approx(rule_of(other))


def test_fewer_simulators_than_were_tried_are_credited_with_no_gain() -> None:
    run = recipe("cartpole-ppo")
    source: Any = run.source

    def steps(simulators: int, exponent: float) -> float:
        other = dataclasses.replace(run, source=dataclasses.replace(source, simulators=simulators))
        found = Learning(100.0, 1e4, {"simulators": exponent}, 4, of=learned_by(run))
        return env_steps_to_target(other, run, found) / 1e4

    half, double = source.simulators // 2, 2 * source.simulators
    assert [steps(n, 1.0) for n in (half, source.simulators, double)] == [1.0, 1.0, 2.0]
    assert [steps(n, -1.0) for n in (half, source.simulators, double)] == [2.0, 1.0, 0.5]


def test_actors_that_change_the_batch_count_by_the_simulators_in_it() -> None:
    """A batch of pong-impala is one trajectory of an actor, with half the simulators of its two."""
    run = recipe("pong-impala")

    def ratios(actors: int, **fields: int) -> dict[str, float]:
        source: Any = dataclasses.replace(run.source, actors=actors, **fields)
        return differences(dataclasses.replace(run, source=source), run)

    assert [ratios(n) for n in (0, 1, 2, 4)] == [{"simulators": 2.0}] * 2 + [{}, {"simulators": 0.5}]
    assert ratios(2, simulators=64) == ratios(1)
    assert ratios(4, trajectories=2) == {}


def test_what_hosts_would_compress_is_learned_on_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(run: Run, folder: Path) -> Any:
        Local().check(run)
        record = {"time_seconds": 1.0, "env_steps_per_second": 10.0}
        (folder / "metrics.jsonl").write_text(json.dumps(record) + "\n")
        state = SimpleNamespace(total_env_steps=lambda: 100)
        return SimpleNamespace(run_state=state, stopped_because="the mean return reached it")

    monkeypatch.setattr(learning, "started", started)
    run = dataclasses.replace(recipe("cartpole-gala"), launcher="torchrun", compression="int8")
    assert to_target(run, 100.0, 0) == Training(100.0, pytest.approx(0.1), True)


@pytest.mark.parametrize("name", ["cartpole-a2c", "cartpole-hsa2c"])
def test_a_strategy_of_another_kind_is_trained_itself(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = set[str]()

    def ruled(run: Run, target: float, seed: int) -> Training:
        trained.add(run.strategy.name)
        return Training(rule_of(run), 1.0, True)

    monkeypatch.setattr(learning, "to_target", ruled)
    run, said = recipe(name), list[str]()
    elastic, dpsgd = strategy("elastic")(period=40), strategy("dpsgd")(local_updates=5)
    found = learning.measure(run, 100.0, said.append, strategies=[elastic, dpsgd])
    assert trained == {"all-reduce", "local-sgd", "gala", "elastic", "dpsgd"}
    assert "strategy (elastic): 1.32 times as many env steps" in said
    for each in (elastic, dpsgd, strategy("local-sgd")()):
        other = dataclasses.replace(run, replicas=8, strategy=each)
        assert env_steps_to_target(other, run, found) == pytest.approx(rule_of(other))


def test_a_strategy_that_was_not_trained_is_unknown() -> None:
    run = recipe("cartpole-a2c")
    known = Learning(100.0, 1e5, {"period": 0.1}, 4, missed=["strategy (dpsgd)"], of=learned_by(run))
    elastic, dpsgd = strategy("elastic")(), strategy("dpsgd")()
    assert not answers(None, run, 100.0, [])
    assert not answers(known, run, 200.0, [])
    assert answers(known, run, 100.0, [run.strategy, strategy("local-sgd")(period=50), dpsgd])
    assert not answers(known, run, 100.0, [elastic])
    two = [dataclasses.replace(run, replicas=2, strategy=each) for each in (elastic, dpsgd)]
    unknown = [set(unknown_factors(each, run, known)) for each in two]
    assert unknown == [{"strategy (elastic)"}, {"strategy (dpsgd)"}]


def test_a_run_that_misses_the_target_gives_no_exponent(monkeypatch: pytest.MonkeyPatch) -> None:
    def trained(run: Run, target: float, seed: int) -> Training:
        """With twice the simulators, one of two seeds fails early."""
        missed = factors(run)["simulators"] == 16 and seed == 1
        return Training(1.0 if missed else rule_of(run), 20.0, not missed)

    monkeypatch.setattr(learning, "to_target", trained)
    run, said = recipe("cartpole-a2c"), list[str]()
    found = learning.measure(run, 100.0, said.append)
    assert (found.missed, found.unfinished) == (["simulators"], 1)
    assert "simulators" not in found.exponents
    assert said[-1] == f"unfinished: 1 of {found.runs} runs missed the target"
    monkeypatch.setattr(learning, "to_target", lambda run, target, seed: Training(1.0, 1.0, seed == 0))
    with pytest.raises(Refusal, match="lower --target"):
        learning.measure(run, 100.0, silent)


@pytest.mark.parametrize(("seconds", "seeds"), [(20.0, 2), (7.0, 5), (1.0, 8)])
def test_short_runs_have_more_seeds(seconds: float, seeds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[tuple[str, int]] = []

    def train(run: Run, target: float, seed: int) -> Training:
        trained.append((learned_by(run), seed))
        return Training(1e4, seconds, True)

    monkeypatch.setattr(learning, "to_target", train)
    run = recipe("cartpole-a2c")
    assert learning.measure(run, 100.0, silent).runs == len(trained) == len(set(trained))
    of_run = learned_by(run)
    assert [seed for trained_run, seed in trained if trained_run == of_run] == list(range(seeds))


def test_env_steps_of_runs_that_miss_the_target_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """With twice the simulators, two of eight seeds miss it, after three times as many env steps."""

    def train(run: Run, target: float, seed: int) -> Training:
        missed = factors(run)["simulators"] == 16 and seed in (3, 5)
        return Training(3e4 if missed else 1e4, 1.0, not missed)

    monkeypatch.setattr(learning, "to_target", train)
    found = learning.measure(recipe("cartpole-a2c"), 100.0, silent)
    assert found.unfinished == 2
    assert 2 ** found.exponents["simulators"] == pytest.approx((6 * 1.0 + 2 * 3.0) / 6)


def test_a_run_that_fails_counts_as_one_that_misses_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    def trained(run: Run, target: float, seed: int) -> Training:
        if factors(run)["simulators"] == 16:
            raise RunFailed("replica 0 died")
        return Training(rule_of(run), 1.0, True)

    monkeypatch.setattr(learning, "to_target", trained)
    run, said = recipe("cartpole-a2c"), list[str]()
    found = learning.measure(run, 100.0, said.append)
    assert (found.missed, found.unfinished) == (["simulators"], 2)
    assert said.count("a run to the target failed: replica 0 died") == 2
    doubled = dataclasses.replace(run.source, simulators=16)  # type: ignore[call-arg]
    with pytest.raises(RunFailed, match="replica 0 died"):
        learning.measure(dataclasses.replace(run, source=doubled), 100.0, silent)


def test_what_is_learned_depends_on_replicas_strategy_and_learning_rate() -> None:
    run = recipe("cartpole-a2c")
    changed = [
        run,
        dataclasses.replace(run, replicas=2),
        dataclasses.replace(run, strategy=strategy("gala")()),
        dataclasses.replace(run, learner=dataclasses.replace(run.learner, learning_rate=1e-5)),  # type: ignore[type-var, call-arg]
        dataclasses.replace(run, source=dataclasses.replace(run.source, simulators=4)),  # type: ignore[type-var, call-arg]
    ]
    assert len({learned_by(each) for each in changed}) == len(changed)
    assert learned_by(dataclasses.replace(run, initial="runs/other")) != learned_by(run)
    assert learned_by(dataclasses.replace(run, seed=7, record_every_seconds=9.0)) == learned_by(run)
