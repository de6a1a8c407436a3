"""Normalised observations and scaled rewards: against sums written out, across replicas, saved and frozen."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from laws.problems import same
from murmurate.agents._running import RewardScaler, include, statistics_group
from murmurate.agents.a2c import A2C
from murmurate.agents.arm import ARM
from murmurate.agents.dqn import DQN
from murmurate.agents.impala import IMPALA
from murmurate.agents.ppo import PPO
from murmurate.agents.trpo import TRPO
from murmurate.errors import Refusal
from murmurate.fabric.simulated.fabric import SimulatedFabric
from murmurate.nets.moments import RunningMoments
from murmurate.recipes import recipe
from murmurate.replay.interface import Sample
from murmurate.replica.vector import Replica
from murmurate.replicator.collectives import Group
from murmurate.replicator.gather import TensorExchange
from murmurate.replicator.learner import Context
from murmurate.spec import Batch, EnvSpec, SequenceSample, Trajectory
from murmurate.strategies import strategies
from murmurate.training import checkpoint
from murmurate.training.members import build_learner, open_only_source
from murmurate.training.restore import load_agent
from murmurate.training.run import Run
from played import played
from short_runs import altered, train

CPU = torch.device("cpu")
SPEC = EnvSpec("toy", (2,), torch.float32, actions=2)


def rollout(reward: Tensor, first: Tensor) -> Trajectory:
    none, seen = torch.zeros_like(first), torch.zeros(*reward.shape, 2)
    return Trajectory(seen, none.long(), reward, none, none, first, seen[0])


def small(algorithm: str, **learner: Any) -> Run:
    """On a pendulum, whose episodes are truncated after 9 steps: both kinds of statistics, small rollouts."""
    run = recipe(f"pendulum-{algorithm}")
    few = {"steps": 12, "hidden": 8, "normalize_observations": True, "scale_rewards": True}
    ppo, trpo = {"epochs": 2, "minibatches": 3}, {"value_epochs": 2, "value_minibatches": 3}
    few |= ppo if algorithm == "ppo" else trpo
    made = dataclasses.replace(run.learner, **(few | learner))
    world = dataclasses.replace(run.world, max_episode_steps=9)
    return altered(run, learner=made, world=world, simulators=2)


@pytest.mark.parametrize("seed", range(3))
def test_rewards_are_divided_by_the_deviation_of_all_returns_so_far(seed: int) -> None:
    """Two rollouts, one after the other, against G_t = r_t + gamma G_{t-1} written out."""
    g = torch.Generator().manual_seed(seed)
    scaler = RewardScaler(0.9, Group.of_one(), CPU)
    returns, running = [], [0.0] * 3
    for _ in range(2):
        reward, first = torch.randn(5, 3, generator=g), torch.rand(5, 3, generator=g) < 0.3
        found = scaler.scaled(rollout(reward, first))
        for t in range(5):
            for b in range(3):
                running[b] = float(reward[t, b]) + 0.9 * (0.0 if first[t, b] else running[b])
                returns.append(running[b])
        mean = sum(returns) / len(returns)
        deviation = math.sqrt(sum((x - mean) ** 2 for x in returns) / len(returns))
        torch.testing.assert_close(found, reward / deviation, rtol=1e-5, atol=1e-6)


def test_scaled_rewards_are_limited_and_keep_their_sign() -> None:
    scaler, first = RewardScaler(0.0, Group.of_one(), CPU), torch.ones(200, 1, dtype=torch.bool)
    reward = torch.zeros(200, 1)
    reward[0], reward[1] = 1.0, -1e-3
    found = scaler.scaled(rollout(reward, first))
    assert found[0] == 10.0
    assert found[1] == pytest.approx(-1e-3 / math.sqrt(0.005), rel=0.01)
    assert not scaler.scaled(rollout(torch.zeros(3, 1), first[:3])).any(), "a reward of 0 stays 0"


def test_a_saved_scaler_goes_on_as_if_nothing_had_been() -> None:
    g = torch.Generator().manual_seed(0)
    data = [rollout(torch.randn(4, 2, generator=g), torch.zeros(4, 2, dtype=torch.bool)) for _ in range(3)]
    one, other = (RewardScaler(0.9, Group.of_one(), CPU) for _ in range(2))
    assert other.state().keys() == {"mean", "variance", "count"}
    one.scaled(data[0])
    one.scaled(data[1])
    other.load(copy.deepcopy(one.state()))
    assert torch.equal(one.scaled(data[2]), other.scaled(data[2]))


def test_synchronous_replicas_have_the_moments_of_all_samples() -> None:
    samples = torch.randn(3, 40, 2, generator=torch.Generator().manual_seed(0)) * 3 + 1

    def role(member: Any) -> list[Tensor]:
        group = functools.partial(Group, TensorExchange(member, range(3)))
        moments = RunningMoments((2,))
        pooled = statistics_group(Context(SPEC, Replica, 0, open_group=group))
        for part in samples[member.rank].split(20):
            include(moments, part, pooled)
        return [x.clone() for x in moments.buffers()]

    found = SimulatedFabric(3, seed=0).run([role] * 3)
    for mean, variance, count in found:
        assert count == 120
        assert torch.equal(mean, found[0][0])
        torch.testing.assert_close(mean, samples.double().mean((0, 1)))
        torch.testing.assert_close(variance, samples.double().var((0, 1), correction=0))


def test_replicas_that_do_not_meet_have_their_own() -> None:
    def refuse() -> Group:
        raise Refusal("they do not wait for one another")

    assert statistics_group(Context(SPEC, Replica, 0, open_group=refuse)).size == 1


@pytest.mark.parametrize("algorithm", ["ppo", "trpo"])
def test_acting_and_learning_see_the_same_function_and_only_learning_changes_it(algorithm: str) -> None:
    rates = {"learning_rate": 0.0} if algorithm == "ppo" else {"max_kl": 1e-12}
    run = small(algorithm, **rates)
    learner = build_learner(run, 0, Replica)
    source = open_only_source(run, learner)
    normalizer = next(iter(learner.replicas.values())).module.normalizer
    seen = []
    for _, batch in zip(range(4), source, strict=False):
        assert normalizer.moments.count == sum(map(len, seen)), "acting has not changed it"
        figures = learner.learn(batch).read_metrics()
        assert float(figures["kl"]) == pytest.approx(0.0, abs=1e-9), "the policy that acted is found again"
        seen.append(batch.data.observation.flatten(0, 1).double())
        whole = torch.cat(seen)
        torch.testing.assert_close(normalizer.moments.mean, whole.mean(0))
        torch.testing.assert_close(normalizer.moments.variance, whole.var(0, correction=0))
    source.close()


@pytest.mark.parametrize("algorithm", ["ppo", "trpo"])
def test_saved_and_loaded_equals_uninterrupted(algorithm: str) -> None:
    run = small(algorithm)
    one = build_learner(run, 0, Replica)
    source = open_only_source(run, one)
    for _, batch in zip(range(3), source, strict=False):
        one.learn(batch)
    replicas = {name: replica.state() for name, replica in one.replicas.items()}
    saved = copy.deepcopy({"source": source.state(), "learner": one.state(), "replicas": replicas})
    other = build_learner(run, 0, Replica)
    again = open_only_source(run, other)
    for name, replica in other.replicas.items():
        replica.load(saved["replicas"][name])
    other.load(saved["learner"])
    again.load(saved["source"])
    for _, mine, theirs in zip(range(3), source, again, strict=False):
        one.learn(mine)
        other.learn(theirs)
    assert same(one.state(), other.state())
    for name, replica in one.replicas.items():
        assert same(replica.state(), other.replicas[name].state())
    assert "normalizer.moments.mean" in replica.state()["buffers"]
    source.close()
    again.close()


@pytest.mark.parametrize(("strategy", "equal"), [("all-reduce", True), ("gala", False)])
def test_an_evaluation_uses_the_mean_of_the_replicas_statistics(
    strategy: str, equal: bool, tmp_path: Path
) -> None:
    run = altered(
        small("ppo"), strategy=strategies()[strategy](), replicas=2, launcher="inline", env_steps=300,
        eval_episodes=1,
    )  # fmt: skip
    assert train(run, tmp_path / "run").code == 0
    folder = tmp_path / "run" / "checkpoints" / "last"
    states = [checkpoint.read_part(folder, rank)["replicas"]["ppo"]["replica"] for rank in range(2)]
    means = [state["buffers"]["normalizer.moments.mean"] for state in states]
    assert torch.equal(*means) == equal
    agent = load_agent(run, folder)
    torch.testing.assert_close(agent.net.normalizer.moments.mean, (means[0] + means[1]) / 2)


def a_batch(config: Any, seed: int) -> Batch:
    """Of what ``config`` requires, around 5 and -3, far from what a net expects."""
    g = torch.Generator().manual_seed(seed)
    seen = torch.randn(6, 8, 2, generator=g) * torch.tensor([4.0, 0.1]) + torch.tensor([5.0, -3.0])
    action, reward = torch.randint(2, (6, 8), generator=g), torch.randn(6, 8, generator=g)
    no = torch.zeros(6, 8, dtype=torch.bool)
    behaviour = {name: torch.full((6, 8), 0.5) for name in config.requires.behaviour}
    data: Any
    if config.requires.kind == "rollouts":
        data = Trajectory(seen, action, reward, no, no, no, seen[0], behaviour=behaviour)
    elif config.requires.kind == "sequences":
        length = torch.full((8,), 6)
        data = SequenceSample(seen, action, reward, length, no[0], seen[1], behaviour)
    else:
        data = Sample(torch.arange(8), torch.ones(8), seen[0], action[0], reward[0], torch.ones(8), seen[1])
    return Batch(data, env_steps=48)


def included(data: Any) -> Tensor:
    """The observations [n, 2] of a batch that a learner includes."""
    if isinstance(data, Trajectory):
        return data.observation.flatten(0, 1)
    return data.observation[0] if isinstance(data, SequenceSample) else data.observation


NORMALIZING = [
    A2C(normalize_observations=True, scale_rewards=True),
    IMPALA(normalize_observations=True),
    DQN(normalize_observations=True, target_every=1),
    ARM(normalize_observations=True),
    ARM(normalize_observations=True, importance_clip=1.0),
]


@pytest.mark.parametrize("config", NORMALIZING)
def test_every_agent_reads_by_the_moments_of_what_it_learned_from(config: Any) -> None:
    one, other = (config.build(Context(SPEC, Replica, 0)) for _ in range(2))
    seen: list[Tensor] = []
    for seed in range(3):
        batch = a_batch(config, seed)
        one.learn(batch)
        seen.append(included(batch.data).double())
    whole, moments = torch.cat(seen), one.net.normalizer.moments
    torch.testing.assert_close(moments.mean, whole.mean(0))
    torch.testing.assert_close(moments.variance, whole.var(0, correction=0))
    read = one.net.normalizer(whole)
    assert read.mean(0).abs().max() < 1e-4
    assert hasattr(one, "target") is (config.requires.kind != "rollouts")
    if hasattr(one, "target"):
        assert torch.equal(one.target.net.normalizer.moments.mean, moments.mean)
    for name, replica in other.replicas.items():
        replica.load(copy.deepcopy(one.replicas[name].state()))
    other.load(copy.deepcopy(one.state()))
    for seed in range(3, 6):
        one.learn(a_batch(config, seed))
        other.learn(a_batch(config, seed))
    assert same(one.state(), other.state())
    for name, replica in one.replicas.items():
        assert same(replica.state(), other.replicas[name].state())


@pytest.mark.parametrize("config", NORMALIZING)
def test_images_are_refused_by_all_of_them(config: Any) -> None:
    images = EnvSpec("screen", (1, 40, 40), torch.uint8, actions=2)
    with pytest.raises(ValueError, match="images are not normalised"):
        config.build(Context(images, Replica, 0))


_NORMED = """
from torch import nn

class Normed(nn.Sequential):
    out_features = 8

    def __init__(self, spec, hidden):
        super().__init__(nn.Linear(2, 8), nn.BatchNorm1d(8))
"""


@pytest.mark.parametrize(
    "config",
    [
        A2C(),
        A2C(recurrent=4),
        PPO(),
        PPO(recurrent=4),
        IMPALA(),
        IMPALA(recurrent=4),
        TRPO(value_minibatches=2),
    ],
)
def test_a_single_truncated_episode_is_bootstrapped_by_running_statistics(
    config: Any, tmp_path: Path
) -> None:
    """In training mode a batch normalisation has no statistics of one observation."""
    (tmp_path / "mine.py").write_text(_NORMED)
    config = dataclasses.replace(config, steps=6, torso=f"{tmp_path}/mine.py:Normed")
    made = config.build(Context(SPEC, Replica, 0))
    data = played(made, ends=0.0)
    truncated = torch.zeros_like(data.truncated)
    truncated[2, 1] = True
    data = dataclasses.replace(data, truncated=truncated, truncated_observation=torch.ones(1, 2))
    made.learn(Batch(data))
    assert all(part.training for replica in made.replicas.values() for part in replica.module.modules())
