"""What a plan would choose is trained first, and the rule corrected by what it needed."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import pytest

from murmurate.mapping import choice
from murmurate.mapping.learning import (
    Learning,
    Training,
    differences,
    env_steps_to_target,
    learned_by,
    trainings_of,
)
from murmurate.recipes import recipe
from murmurate.training.run import Run

RUN = recipe("cartpole-dqn")


def with_batch(batch: int, replicas: int = 1) -> Run:
    return dataclasses.replace(
        RUN,
        replicas=replicas,
        learner=dataclasses.replace(RUN.learner, batch=batch),  # type: ignore[call-arg, type-var]
    )


def tried_choices(
    monkeypatch: pytest.MonkeyPatch, configurations: list[Run], needs: dict[int, float]
) -> tuple[Learning, list[Run], list[str]]:
    """The learning and the order of configurations in the end, and what was said. needs: by batch, the env
    steps that a run of it needs; a run has 100,000. Every configuration is equally fast."""
    learning = Learning(300.0, 4e4, {"batch": -0.5, "replicas": 0.0}, 2, of=learned_by(RUN))
    learning.tried[learned_by(RUN)] = 4e4

    def search(*_: Any, **__: Any) -> list[Any]:
        found = [SimpleNamespace(run=each, name=f"batch {each.learner.batch}") for each in configurations]  # type: ignore[attr-defined]
        return sorted(found, key=lambda each: env_steps_to_target(each.run, RUN, learning))

    def train(run: Run, target: float, seed: int) -> Training:
        steps = needs[run.learner.batch]  # type: ignore[attr-defined]
        return Training(min(steps, 1e5), 20.0, steps <= 1e5)

    said = list[str]()
    monkeypatch.setattr(choice, "search", search)
    monkeypatch.setattr(choice, "key", lambda run: "it")
    profile: Any = SimpleNamespace(recipes={"it": SimpleNamespace(learning=learning)})
    choice.try_choices(RUN, profile, said.append, train=train)
    return learning, [each.run for each in search()], said


def test_a_choice_that_misses_the_target_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    configurations = [RUN, with_batch(128), with_batch(256)]
    learning, order, said = tried_choices(monkeypatch, configurations, {128: 3e4, 256: math.inf})
    assert order == [RUN, with_batch(128), with_batch(256)]  # the rule is corrected for other batches, too
    assert said == ["the best predicted, batch 256: target missed, predicted 20,000"]
    assert learning.tried[learned_by(with_batch(256))] is None


def test_a_choice_that_was_trained_is_not_trained_again(monkeypatch: pytest.MonkeyPatch) -> None:
    learning, order, said = tried_choices(monkeypatch, [RUN, with_batch(128)], {128: 2e4})
    assert order[0] == with_batch(128)
    assert (len(said), learning.runs) == (1, 4)
    assert learning.tried[learned_by(with_batch(128))] == 2e4


def test_what_was_trained_is_kept_if_the_next_training_is_interrupted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    costs: Any = SimpleNamespace(learning=None)
    profile: Any = SimpleNamespace(recipes={"it": costs}, renew=lambda: None)
    kept = list[int]()

    def train(run: Run, target: float, seed: int) -> Training:
        if kept:
            raise KeyboardInterrupt
        return Training(4e4, 20.0, True)

    monkeypatch.setattr(choice, "search", lambda *_, **__: [SimpleNamespace(run=with_batch(256), name="it")])
    monkeypatch.setattr(choice, "key", lambda run: "it")
    monkeypatch.setattr(choice.learning, "factor_pairs", lambda *_: [])
    with pytest.raises(KeyboardInterrupt):
        choice.learn(RUN, profile, 300.0, print, train=train, keep=lambda: kept.append(costs.learning.runs))
    assert kept == [2]
    assert costs.learning.tried == {learned_by(RUN): 4e4}


def test_the_rule_is_corrected_to_what_a_configuration_needed() -> None:
    learning = Learning(300.0, 4e4, {"batch": 0.3, "replicas": 0.4}, 2, of=learned_by(RUN))
    candidate = with_batch(256, replicas=2)
    assert {*differences(candidate, RUN)} >= {"batch", "replicas"}
    before = env_steps_to_target(candidate, RUN, learning)
    choice.correct(learning, candidate, RUN, 1.7)
    assert env_steps_to_target(candidate, RUN, learning) == pytest.approx(1.7 * before)
    assert learning.exponents["batch"] > 0.3  # both share the correction
    assert learning.exponents["replicas"] > 0.4


def test_a_configuration_that_misses_with_two_seeds_gets_no_third() -> None:
    seeds = list[int]()

    def train(run: Run, target: float, seed: int) -> Training:
        seeds.append(seed)
        return Training(1e5, 1.0, False)

    assert not any(each.reached for each in trainings_of(RUN, 300.0, train, lambda line: None))
    assert seeds == [0, 1]
