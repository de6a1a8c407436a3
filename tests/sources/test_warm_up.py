"""Random actions before the policy acts."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from murmurate.agents.interface import Action
from murmurate.recipes import recipe
from murmurate.replica.vector import Replica
from murmurate.sources.steps import random_actions
from murmurate.spec import EnvSpec
from murmurate.training.members import build_learner, open_only_source
from short_runs import altered


def test_the_policy_acts_after_so_many_env_steps() -> None:
    run = altered(recipe("cartpole-dqn"), simulators=2, random_env_steps=40)
    replay = dataclasses.replace(run.source.replay, learning_starts=60)
    # of one step, so that the replay has the transitions in the order of the env steps
    run = altered(run, replay=replay, learner=dataclasses.replace(run.learner, n_step=1))
    learner = build_learner(run, 0, Replica)
    learner.act = lambda seen, *_, **__: Action(torch.ones(len(seen), dtype=torch.int64), None)
    source: Any = open_only_source(run, learner)
    next(source)
    rows = source.replay.rows
    actions = rows.column("action")[: len(source.replay)]
    random, own = actions[20:40], actions[40:]
    assert 0 < int(random.sum()) < len(random), "both actions are drawn, to the last of these steps"
    assert len(own) >= 20
    assert bool((own == 1).all())
    source.close()


def test_random_actions_fill_the_space() -> None:
    generator = torch.Generator().manual_seed(0)
    spec = EnvSpec("two", (1,), torch.float32, 0, (2,), action_low=(-1.0, 5.0), action_high=(1.0, 9.0))
    drawn = random_actions(spec, torch.zeros(2_000, 1), generator)
    assert drawn.shape == (2_000, 2)
    for column, low, high in ((0, -1.0, 1.0), (1, 5.0, 9.0)):
        values = drawn[:, column]
        assert low <= values.min() < low + 0.02 * (high - low)
        assert high - 0.02 * (high - low) < values.max() <= high
    matrix = EnvSpec("matrix", (1,), torch.float32, 0, (1, 2), action_low=(-1.0, 5.0), action_high=(1.0, 9.0))
    shaped = random_actions(matrix, torch.zeros(10, 1), generator)
    assert shaped.shape == (10, 1, 2)
    assert bool((shaped[:, 0, 1] >= 5).all())
    three = EnvSpec("three", (1,), torch.float32, 3)
    discrete = random_actions(three, torch.zeros(300, 1), generator)
    assert set(discrete.tolist()) == {0, 1, 2}
