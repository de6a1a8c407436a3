"""The laws on PPO: several updates a batch, under strategies."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch

from laws.problems import same
from murmurate.agents.ppo import PPO
from murmurate.fabric.simulated.fabric import SimulatedFabric
from murmurate.replica.vector import Replica
from murmurate.replicator.learner import Context
from murmurate.replicator.replicator import Replicator
from murmurate.spec import Batch, EnvSpec, Trajectory
from murmurate.strategies.all_reduce import AllReduce
from murmurate.strategies.gala import GALA
from murmurate.strategies.hogwild import Hogwild
from murmurate.strategies.local_sgd import LocalSGD
from murmurate.strategies.solo import Solo
from played import played

SPEC = EnvSpec("vector", (5,), torch.float32, actions=3)
CONFIG = PPO(hidden=8, steps=6, epochs=3, minibatches=2, ratio_clip=0.2, value_clip=0.2)
# one minibatch of all steps, with advantages as they are: means over it that all-reduce can average
WHOLE = dataclasses.replace(CONFIG, minibatches=1, normalize_advantages=False, learning_rate=1e-2)
BATCHES = 3


def learn(config, strategy, rollouts, fabric):
    agent = config.build(Context(SPEC, Replicator(strategy, fabric).replicate, 3, updates=100))
    for data in rollouts[fabric.rank]:
        agent.learn(Batch(data))
    agent.replica.check()
    return agent.replica.state()


def recorded(config, rank):
    """Rollouts of one policy; after the first update they are off it, which the ratios take into account."""
    policy = config.build(Context(SPEC, Replica, 3))
    return [
        dataclasses.replace(played(policy, 10 * rank + i, simulators=2, ends=0.0), memory=None)
        for i in range(BATCHES)
    ]


def joined(parts):
    """Rollouts of all members side by side; none of them is truncated."""
    names = ("observation", "action", "reward", "terminated", "truncated", "first")
    whole = {name: torch.cat([getattr(p, name) for p in parts], 1) for name in names}
    behaviour = {name: torch.cat([p.behaviour[name] for p in parts], 1) for name in parts[0].behaviour}
    last = torch.cat([p.last_observation for p in parts])
    return Trajectory(**whole, last_observation=last, behaviour=behaviour)


def test_with_one_replica_each_strategy_learns_the_same_bits():
    rollouts = [recorded(CONFIG, 0)]
    (expected,) = SimulatedFabric(1, seed=0).run([functools.partial(learn, CONFIG, Solo(), rollouts)])
    for strategy in (AllReduce(), LocalSGD(period=2), Hogwild(), GALA()):
        (found,) = SimulatedFabric(1, seed=0).run([functools.partial(learn, CONFIG, strategy, rollouts)])
        assert same(found, expected)


@pytest.mark.parametrize("size", [2, 3])
def test_all_reduce_learns_as_one_on_all_rollouts(size):
    rollouts = [recorded(WHOLE, rank) for rank in range(size)]
    found = SimulatedFabric(size, seed=1).run([functools.partial(learn, WHOLE, AllReduce(), rollouts)] * size)
    alone = [[joined([own[i] for own in rollouts]) for i in range(BATCHES)]]
    (expected,) = SimulatedFabric(1, seed=0).run([functools.partial(learn, WHOLE, Solo(), alone)])
    for state in found:
        assert state["clock"] == expected["clock"] == BATCHES * 3
        for name, values in expected["params"].items():
            torch.testing.assert_close(state["params"][name], values, rtol=1e-3, atol=2e-5)
