"""A2C: gradient, bootstrapping, recurrent state and sampling against oracles; it learns a bandit."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from murmurate.agents._on_policy import draw, final_values
from murmurate.agents.a2c import A2C, A2CAgent
from murmurate.replica.vector import Replica
from murmurate.replicator.learner import Context
from murmurate.spec import Batch, EnvSpec, Trajectory
from oracles.a2c import a2c_loss

SPEC = EnvSpec("toy", (3,), torch.float32, actions=4)
CONTINUOUS = EnvSpec("toy", (3,), torch.float32, actions=0, action_shape=(2,))


def agent(spec: EnvSpec = SPEC, seed: int = 0, **changes: object) -> A2CAgent:
    config = dataclasses.replace(A2C(hidden=8), **changes)
    return config.build(Context(spec, Replica, seed))


def trajectory(spec: EnvSpec = SPEC, seed: int = 0, steps: int = 5, simulators: int = 3) -> Trajectory:
    g = torch.Generator().manual_seed(seed)
    terminated = torch.rand(steps, simulators, generator=g) < 0.2
    truncated = (torch.rand(steps, simulators, generator=g) < 0.2) & ~terminated
    ended = terminated | truncated
    first = torch.zeros(steps, simulators, dtype=torch.bool)
    first[1:] = ended[:-1]
    if spec.actions:
        action = torch.randint(spec.actions, (steps, simulators), generator=g)
    else:
        action = torch.randn(steps, simulators, *spec.action_shape, generator=g)
    count = int(truncated.sum())
    return Trajectory(
        observation=torch.randn(steps, simulators, 3, generator=g),
        action=action,
        reward=torch.randn(steps, simulators, generator=g),
        terminated=terminated,
        truncated=truncated,
        first=first,
        last_observation=torch.randn(simulators, 3, generator=g),
        truncated_observation=torch.randn(count, 3, generator=g) if count else None,
    )


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("gae_lambda", "normalize"), [(1.0, False), (0.9, False), (0.9, True)])
def test_gradient_is_that_of_the_written_out_loss(seed: int, gae_lambda: float, normalize: bool) -> None:
    learner = agent(gae_lambda=gae_lambda, seed=seed, normalize_advantages=normalize)
    data = trajectory(seed=seed)
    parameters = list(learner.net.parameters())
    slow = torch.autograd.grad(a2c_loss(learner.net, data, learner.config), parameters)
    norm = torch.cat([g.flatten() for g in slow]).norm()
    factor = min(1.0, 0.5 / (float(norm) + 1e-6))
    outcome = learner.learn(Batch(data))
    for parameter, gradient in zip(parameters, slow, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, gradient * factor, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(float(outcome.metrics["gradient_norm"]), float(norm), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("spec", [SPEC, CONTINUOUS], ids=["discrete", "continuous"])
def test_values_are_computed_for_greedy_actions_alone_and_change_no_other(spec: EnvSpec) -> None:
    learner, asked = agent(spec), list[str]()
    learner.net.value_head.register_forward_hook(lambda *_: asked.append("values"))
    observation, first = trajectory().observation[0], torch.ones(3, dtype=torch.bool)
    drawn = learner.act(observation, None, first, torch.Generator().manual_seed(1))
    assert asked == []
    with torch.no_grad():
        policy, value = learner.net(observation)
    assert asked, "values that are computed are seen"
    assert torch.equal(drawn.action, draw(policy, spec, torch.Generator().manual_seed(1), greedy=False))
    greedy = learner.act(observation, None, first, torch.Generator(), greedy=True)
    assert torch.equal(greedy.outputs["value"], value)


def test_truncation_bootstraps_and_termination_does_not() -> None:
    learner = agent()
    base = trajectory(steps=1, simulators=2)
    none = torch.zeros(1, 2, dtype=torch.bool)
    ends = torch.randn(2, 3, generator=torch.Generator().manual_seed(5))
    cut = dataclasses.replace(base, terminated=none, truncated=~none, truncated_observation=ends)
    dead = dataclasses.replace(base, terminated=~none, truncated=none, truncated_observation=None)
    value = learner.net(base.observation[0])[1].detach()[None]
    _, target_cut = learner._targets(cut, value, None)
    _, target_dead = learner._targets(dead, value, None)
    torch.testing.assert_close(target_dead, base.reward)
    torch.testing.assert_close(target_cut[0], base.reward[0] + 0.99 * learner.net(ends)[1].detach())


def test_recurrent_bootstrap_of_a_cut_episode_reads_the_memory_it_had() -> None:
    learner = agent(recurrent=6)
    data = trajectory(seed=3, steps=6)
    memory = torch.randn(3, 2 * 6, generator=torch.Generator().manual_seed(1))
    data = dataclasses.replace(data, memory=memory)
    assert data.truncated_observation is not None
    result = final_values(learner.net, data)
    row = 0
    for t in range(6):
        for b in range(3):
            if not data.truncated[t, b]:
                continue
            own = memory[b : b + 1]
            for s in range(t + 1):
                _, _, own = learner.net.unroll(
                    data.observation[s, b][None, None], own, data.first[s, b][None, None]
                )
            never = torch.zeros(1, 1, dtype=torch.bool)
            _, value, _ = learner.net.unroll(data.truncated_observation[row][None, None], own, never)
            torch.testing.assert_close(result[row], value[0, 0])
            row += 1
    assert row == int(data.truncated.sum()) > 0


def test_actions_are_drawn_from_the_softmax() -> None:
    learner = agent()
    observation = torch.randn(1, 3, generator=torch.Generator().manual_seed(2)).expand(40_000, 3)
    with torch.no_grad():
        learner.net.policy_head.weight.mul_(400)  # from nearly uniform to clearly not
    first = torch.zeros(40_000, dtype=torch.bool)
    drawn = learner.act(observation, None, first, torch.Generator().manual_seed(7)).action
    wanted = learner.net(observation[:1])[0].softmax(-1)[0].detach()
    counts = torch.bincount(drawn, minlength=4) / 40_000
    assert (wanted.max() - wanted.min()) > 0.2
    torch.testing.assert_close(counts, wanted, rtol=0, atol=4 * 0.5 / 200)
    best = learner.act(observation[:1], None, first[:1], torch.Generator(), greedy=True).action
    assert best.item() == wanted.argmax()


def test_continuous_actions_follow_mean_and_standard_deviation() -> None:
    learner = agent(CONTINUOUS)
    observation = torch.zeros(20_000, 3)
    first = torch.zeros(20_000, dtype=torch.bool)
    head = learner.net.policy_head
    with torch.no_grad():  # before that the mean is 0 and the deviation 1
        head.mean.bias.copy_(torch.tensor([1.0, -2.0]))
        head.log_std.copy_(torch.tensor([-1.0, 0.2]))
    drawn = learner.act(observation, None, first, torch.Generator().manual_seed(7)).action
    mean, log_std = learner.net(observation[:1])[0][0].detach().chunk(2)
    torch.testing.assert_close(drawn.mean(0), mean, rtol=0, atol=0.04)
    torch.testing.assert_close(drawn.std(0), log_std.exp(), rtol=0.04, atol=0)
    learner.learn(Batch(trajectory(CONTINUOUS)))


@pytest.mark.parametrize("recurrent", [0, 6])
def test_same_seed_same_agent(recurrent: int) -> None:
    first, second, other = (agent(seed=s, recurrent=recurrent) for s in (1, 1, 2))
    assert torch.equal(first.replica.params, second.replica.params)
    assert not torch.equal(first.replica.params, other.replica.params)


@pytest.mark.parametrize("spec", [SPEC, CONTINUOUS], ids=["discrete", "continuous"])
def test_learns_a_bandit(spec: EnvSpec) -> None:
    learner = agent(spec, learning_rate=1e-2, entropy_coefficient=0.0)
    generator = torch.Generator().manual_seed(0)
    observation = torch.ones(16, 3)
    first = torch.ones(16, dtype=torch.bool)

    def reward(action: torch.Tensor) -> torch.Tensor:
        return (action == 2).float() if spec.actions else -(action - 0.5).square().sum(-1)

    for _ in range(150):
        action = learner.act(observation, None, first, generator).action
        ended = torch.ones(1, 16, dtype=torch.bool)
        learner.learn(
            Batch(
                Trajectory(
                    observation[None], action[None], reward(action)[None], ended, ~ended, ended, observation
                )
            )
        )
    chosen = learner.act(observation, None, first, generator, greedy=True).action
    assert reward(chosen).mean() > (0.99 if spec.actions else -0.02)


def test_linear_schedule_ends_where_it_says() -> None:
    config = A2C(learning_rate=1.0, learning_rate_end=0.25, hidden=4)
    learner = config.build(Context(SPEC, Replica, 0, updates=10))
    rates = [learner.learn(Batch(trajectory(seed=i))).metrics["learning_rate"] for i in range(12)]
    expected = [1 - 0.075 * i for i in range(10)] + [0.25, 0.25]
    assert rates == pytest.approx(expected)
