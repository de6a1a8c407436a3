"""Recurrent policies of whole agents: they resume to the bit, and learn what only a memory can solve."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest

from laws.problems import same
from murmurate.agents.a2c import A2C
from murmurate.agents.ppo import PPO
from murmurate.evaluation.games import evaluate
from murmurate.recipes import recipe
from murmurate.replica.vector import Replica
from murmurate.training.members import build_learner, open_only_source
from murmurate.training.run import Run
from murmurate.worlds.gym import GymWorld
from short_runs import altered

_LENGTH = 4


class Recall(gymnasium.Env):  # type: ignore[type-arg]
    """The first observation shows one of two signs, the others nothing. The last of 4 actions repeats it."""

    observation_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.sign, self.step_number = int(self.np_random.integers(2)), 0
        return np.array([2 * self.sign - 1], np.float32), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.step_number += 1
        over = self.step_number == _LENGTH
        return np.zeros(1, np.float32), float(over and action == self.sign), over, False, {}


@pytest.fixture
def world() -> Iterator[GymWorld]:
    gymnasium.register("Recall-v0", Recall)
    yield GymWorld("Recall-v0")
    del gymnasium.registry["Recall-v0"]


def learned(run: Run, batches: int) -> Any:
    learner = build_learner(run, 0, Replica)
    source = open_only_source(run, learner)
    for _, batch in zip(range(batches), source, strict=False):
        learner.learn(batch)
    source.close()
    return learner


AGENTS = {
    "a2c": A2C(steps=10, learning_rate=1e-2, optimizer="adam", hidden=16, entropy_coefficient=0.02),
    "ppo": PPO(
        steps=10, learning_rate=1e-2, learning_rate_end=1.0, hidden=16, ratio_clip=0.2, value_clip=0.2
    ),
}


@pytest.mark.parametrize("algorithm", AGENTS)
def test_a_memory_recalls_what_was_seen_at_the_beginning(algorithm: str, world: GymWorld) -> None:
    """Rollouts of 10 steps begin anywhere in episodes of 4. Without a memory it is a guess."""
    returns = []
    for recurrent in (16, 0):
        agent = dataclasses.replace(AGENTS[algorithm], recurrent=recurrent)
        run = altered(recipe(f"cartpole-{algorithm}"), world=world, learner=agent, simulators=16)
        learner = learned(run, 10 if not recurrent else 120 if algorithm == "a2c" else 25)
        returns.append(evaluate(world, learner, 40, seed=1).mean)
    assert returns[0] == 1.0
    assert 0.2 < returns[1] < 0.8


@pytest.mark.parametrize("algorithm", AGENTS)
def test_saved_and_loaded_equals_uninterrupted(algorithm: str) -> None:
    """Rollouts of 7 steps begin inside episodes, which end in both ways."""
    run = recipe(f"cartpole-{algorithm}")
    agent = dataclasses.replace(run.learner, steps=7, recurrent=8)
    run = altered(
        run, learner=agent, world=dataclasses.replace(run.world, max_episode_steps=15), simulators=4
    )
    one = build_learner(run, 0, Replica)
    source = open_only_source(run, one)
    for _, batch in zip(range(5), source, strict=False):
        one.learn(batch)
    saved = copy.deepcopy((source.state(), one.state(), one.replica.state()))
    other = build_learner(run, 0, Replica)
    again = open_only_source(run, other)
    again.load(saved[0])
    other.load(saved[1])
    other.replica.load(saved[2])
    for _, mine, theirs in zip(range(5), source, again, strict=False):
        assert mine.data.memory.any()
        assert same(mine.data.memory, theirs.data.memory)
        one.learn(mine)
        other.learn(theirs)
    assert same(one.replica.state(), other.replica.state())
    source.close()
    again.close()
