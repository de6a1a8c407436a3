"""IMPALA: its gradient against the loss written out, what it records, and its recurrent state at the borders
of episodes and trajectories; it learns a bandit from actions of an old policy."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from murmurate.agents.a2c import A2C
from murmurate.agents.impala import IMPALA, IMPALAAgent
from murmurate.replica.vector import Replica
from murmurate.replicator.learner import Context
from murmurate.sources.rollouts import RolloutSource
from murmurate.sources.simulator_groups import open_groups
from murmurate.spec import Batch, EnvSpec, Trajectory
from murmurate.worlds.gym import GymWorld
from oracles.impala import impala_loss

SPEC = EnvSpec("toy", (3,), torch.float32, actions=4)
CONTINUOUS = EnvSpec("toy", (3,), torch.float32, actions=0, action_shape=(2,))
CARTPOLE = EnvSpec("CartPole-v1", (4,), torch.float32, actions=2)


def agent(spec: EnvSpec = SPEC, seed: int = 0, **changes: object) -> IMPALAAgent:
    config = dataclasses.replace(IMPALA(hidden=8), **changes)
    return config.build(Context(spec, Replica, seed))


def trajectory(spec: EnvSpec, memory_size: int = 0, seed: int = 0, steps: int = 5) -> Trajectory:
    """Of three simulators, by a policy of its own; a third of the steps end somehow."""
    g = torch.Generator().manual_seed(seed)
    terminated = torch.rand(steps, 3, generator=g) < 0.2
    truncated = (torch.rand(steps, 3, generator=g) < 0.2) & ~terminated
    first = torch.zeros(steps, 3, dtype=torch.bool)
    first[1:] = (terminated | truncated)[:-1]
    if spec.actions:
        action = torch.randint(spec.actions, (steps, 3), generator=g)
    else:
        action = torch.randn(steps, 3, *spec.action_shape, generator=g)
    count = int(truncated.sum())
    return Trajectory(
        observation=torch.randn(steps, 3, 3, generator=g),
        action=action,
        reward=torch.randn(steps, 3, generator=g),
        terminated=terminated,
        truncated=truncated,
        first=first,
        last_observation=torch.randn(3, 3, generator=g),
        truncated_observation=torch.randn(count, 3, generator=g) if count else None,
        memory=torch.randn(3, memory_size, generator=g) if memory_size else None,
        behaviour={"log_probability": -1.4 + torch.randn(steps, 3, generator=g)},
    )


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("recurrent", [0, 6], ids=["feed-forward", "lstm"])
@pytest.mark.parametrize(
    "changes",
    [{}, {"rho_bar": 1.5, "c_bar": 0.7, "policy_rho_bar": 3.0, "trace_lambda": 0.9, "discount": 0.8}],
    ids=["the paper's", "others"],
)
def test_gradient_is_that_of_the_written_out_loss(
    seed: int, recurrent: int, changes: dict[str, float]
) -> None:
    learner = agent(seed=seed, recurrent=recurrent, clip=1e9, **changes)
    data = trajectory(SPEC, 2 * recurrent, seed=seed)
    parameters = list(learner.net.parameters())
    slow = torch.autograd.grad(impala_loss(learner.net, data, learner.config), parameters)
    policy, _, _ = learner.net.unroll(data.observation, data.memory, data.first)
    log_pi = policy.detach().log_softmax(-1).gather(-1, data.action[..., None])[..., 0]
    rho = (log_pi - data.behaviour["log_probability"]).exp()
    outcome = learner.learn(Batch(data))
    for parameter, gradient in zip(parameters, slow, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-5)
    norm = torch.cat([g.flatten() for g in slow]).norm()
    torch.testing.assert_close(float(outcome.metrics["gradient_norm"]), float(norm), rtol=1e-4, atol=1e-5)
    figures = outcome.read_metrics()
    assert 0 < float(figures["rho_clipped"]) < 1
    assert float(figures["rho_mean"]) == pytest.approx(float(rho.mean()), rel=1e-4)


@pytest.mark.parametrize("spec", [SPEC, CONTINUOUS], ids=["discrete", "continuous"])
def test_it_records_the_log_probability_of_what_it_did(spec: EnvSpec) -> None:
    learner = agent(spec)
    observation = torch.randn(2_000, 3, generator=torch.Generator().manual_seed(1))
    first = torch.zeros(2_000, dtype=torch.bool)
    chosen = learner.act(observation, None, first, torch.Generator().manual_seed(2))
    policy, _ = learner.net(observation)
    if spec.actions:
        expected = policy.log_softmax(-1).gather(-1, chosen.action[:, None])[:, 0]
    else:
        mean, log_std = policy.chunk(2, -1)
        expected = torch.distributions.Normal(mean, log_std.exp()).log_prob(chosen.action).sum(-1)
    torch.testing.assert_close(chosen.behaviour["log_probability"], expected.detach())
    assert learner.config.requires.behaviour == {"log_probability": ()}


@pytest.mark.parametrize("recurrent", [0, 16], ids=["feed-forward", "lstm"])
def test_on_what_it_has_just_played_every_weight_is_one(recurrent: int) -> None:
    """So the memory with which the learner unrolls, across episodes and from one trajectory to the next, is
    the one that acted. And the gradient is that of A2C, but for the sum and the paper's half."""
    learner = agent(CARTPOLE, recurrent=recurrent, learning_rate=0.0, clip=1e9)
    groups = open_groups(GymWorld("CartPole-v1", 9), 4, training=True)
    source = RolloutSource(groups, learner, 20, seed=0, behaviour=learner.config.requires.behaviour)
    other = A2C(
        hidden=8, recurrent=recurrent, learning_rate=0.0, value_coefficient=0.25, clip=1e9, steps=20
    ).build(Context(CARTPOLE, Replica, 0))
    ended = 0
    for _, batch in zip(range(4), source, strict=False):
        ended += int(batch.data.truncated.sum())
        figures = learner.learn(batch).read_metrics()
        assert float(figures["rho_mean"]) == pytest.approx(1.0, abs=1e-5)
        other.learn(batch)
        torch.testing.assert_close(learner.replica.grad, other.replica.grad * 80, rtol=1e-3, atol=1e-3)
    assert ended > 20, "the time limit of 9 steps"
    source.close()


def test_its_rate_falls_to_nothing_over_the_run() -> None:
    config = IMPALA(learning_rate=1.0, hidden=4)
    learner = config.build(Context(SPEC, Replica, 0, updates=4))
    rates = [learner.learn(Batch(trajectory(SPEC, seed=i))).metrics["learning_rate"] for i in range(5)]
    assert rates == pytest.approx([1.0, 0.75, 0.5, 0.25, 0.0])


@pytest.mark.parametrize(
    ("spec", "optimizer"), [(SPEC, "rmsprop"), (CONTINUOUS, "adam")], ids=["discrete", "continuous"]
)
def test_it_learns_a_bandit_from_a_policy_that_is_ten_updates_old(spec: EnvSpec, optimizer: str) -> None:
    learner = agent(spec, learning_rate=5e-3, entropy_coefficient=0.0, optimizer=optimizer)
    actor = agent(spec)
    generator = torch.Generator().manual_seed(0)
    observation, first = torch.ones(16, 3), torch.ones(16, dtype=torch.bool)

    def reward(action: torch.Tensor) -> torch.Tensor:
        return (action == 2).float() if spec.actions else -(action - 0.5).square().sum(-1)

    ended = torch.ones(1, 16, dtype=torch.bool)
    for update in range(300):
        if update % 10 == 0:
            actor.replica.params.data.copy_(learner.replica.params)
        chosen = actor.act(observation, None, first, generator)
        data = Trajectory(
            observation[None],
            chosen.action[None],
            reward(chosen.action)[None],
            ended,
            ~ended,
            ended,
            observation,
            behaviour={"log_probability": chosen.behaviour["log_probability"][None]},
        )
        learner.learn(Batch(data))
    best = learner.act(observation, None, first, generator, greedy=True).action
    assert reward(best).mean() > (0.99 if spec.actions else -0.04)
