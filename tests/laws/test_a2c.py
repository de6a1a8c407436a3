"""The laws on a whole agent: A2C on recorded trajectories, feed-forward and recurrent, vectors and images."""

from __future__ import annotations

import functools

import pytest
import torch

from laws.problems import same
from murmurate.agents.a2c import A2C
from murmurate.fabric.simulated.fabric import SimulatedFabric
from murmurate.replicator.learner import Context
from murmurate.replicator.replicator import Replicator
from murmurate.spec import Batch, EnvSpec, Trajectory
from murmurate.strategies.all_reduce import AllReduce
from murmurate.strategies.gala import GALA
from murmurate.strategies.hogwild import Hogwild
from murmurate.strategies.local_sgd import LocalSGD
from murmurate.strategies.solo import Solo

STEPS, SHARE, UPDATES = 4, 2, 5
VECTOR = EnvSpec("vector", (5,), torch.float32, actions=3)
IMAGE = EnvSpec("image", (4, 84, 84), torch.uint8, actions=3)
WORLDS = {
    "feed-forward": (VECTOR, A2C(hidden=8)),
    "recurrent": (VECTOR, A2C(hidden=8, recurrent=6, optimizer="adam")),
}
PIXELS = {
    "images": (IMAGE, A2C()),
    "images in bfloat16": (IMAGE, A2C(precision="bfloat16", learning_rate_end=0.1)),
}


def trajectory(spec, config, rank, step):
    """[T, B] of noise, with ends of both kinds."""
    g = torch.Generator().manual_seed(10_000 * rank + step)
    shape = (STEPS, SHARE)
    whole = (STEPS + 2, SHARE, *spec.observation_shape)
    if spec.observation_dtype == torch.uint8:
        seen = torch.randint(0, 256, whole, generator=g, dtype=torch.uint8)
    else:
        seen = torch.randn(whole, generator=g)
    terminated = torch.rand(shape, generator=g) < 0.2
    truncated = torch.zeros(shape, dtype=torch.bool)
    truncated[1, 0] = not terminated[1, 0]
    ended = terminated | truncated
    first = torch.cat([torch.zeros(1, SHARE, dtype=torch.bool), ended[:-1]])
    return Trajectory(
        observation=seen[:STEPS],
        action=torch.randint(0, spec.actions, shape, generator=g),
        reward=torch.randn(shape, generator=g),
        terminated=terminated,
        truncated=truncated,
        first=first,
        last_observation=seen[STEPS],
        truncated_observation=seen[STEPS + 1][: int(truncated.sum())] if bool(truncated.any()) else None,
        memory=None if not config.recurrent else torch.zeros(SHARE, 2 * config.recurrent),
    )


def learn(world, strategy, fabric):
    spec, config = world
    replicator = Replicator(strategy, fabric)
    agent = config.build(Context(spec, replicator.replicate, 3, updates=UPDATES))
    path = []
    for step in range(UPDATES):
        agent.learn(Batch(trajectory(spec, config, fabric.rank, step)))
        path.append(agent.replica.params.detach().clone())
    agent.replica.check()
    return path, agent.replica.state()


def alone(world, strategy):
    return SimulatedFabric(1, seed=0).run([functools.partial(learn, world, strategy)])[0]


def joined(parts):
    """The trajectories of all members side by side: [T, n B]."""
    whole = {}
    for name in ("observation", "action", "reward", "terminated", "truncated", "first"):
        whole[name] = torch.cat([getattr(p, name) for p in parts], 1)
    for name in ("last_observation", "memory"):
        values = [getattr(p, name) for p in parts]
        whole[name] = None if values[0] is None else torch.cat(values)
    # rows of truncated observations follow the whole's order of steps, then simulators
    rows = []
    for t in range(STEPS):
        for part in parts:
            before = int(part.truncated[:t].sum())
            count = int(part.truncated[t].sum())
            if count:
                rows.append(part.truncated_observation[before : before + count])
    whole["truncated_observation"] = torch.cat(rows) if rows else None
    return Trajectory(**whole)


@pytest.mark.parametrize("name", [*WORLDS, *PIXELS])
def test_with_one_replica_each_strategy_learns_the_same_bits(name):
    world = (WORLDS | PIXELS)[name]
    expected = alone(world, Solo())
    for strategy in (AllReduce(), LocalSGD(period=2), Hogwild(), GALA()):
        assert same(alone(world, strategy), expected)


@pytest.mark.parametrize("name", WORLDS)
@pytest.mark.parametrize("size", [2, 3])
def test_all_reduce_learns_as_one_on_all_trajectories(name, size):
    """A2C's losses are means over steps and simulators, and equal shares have equal weight."""
    spec, config = WORLDS[name]
    found = SimulatedFabric(size, seed=1).run([functools.partial(learn, (spec, config), AllReduce())] * size)

    def whole(fabric):
        agent = config.build(Context(spec, Replicator(Solo(), fabric).replicate, 3, updates=UPDATES))
        for step in range(UPDATES):
            parts = [trajectory(spec, config, rank, step) for rank in range(size)]
            agent.learn(Batch(joined(parts)))
        return agent.replica.params.detach().clone()

    (expected,) = SimulatedFabric(1, seed=0).run([whole])
    for path, _ in found:
        torch.testing.assert_close(path[-1], expected, rtol=1e-4, atol=2e-6)  # float32 nets
        assert float((path[-1] - path[0]).norm()) > 1e-2
