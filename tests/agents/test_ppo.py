"""PPO: gradient, minibatches, recurrent state and bootstrapping against oracles; it learns a bandit."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from murmurate.agents.ppo import PPO, PPOAgent
from murmurate.errors import Refusal
from murmurate.recipes import recipe
from murmurate.replica.vector import Replica
from murmurate.replicator.learner import Context
from murmurate.spec import Batch, EnvSpec, Trajectory
from murmurate.training.members import build_learner, open_only_source
from oracles.ppo import advantages, ppo_loss
from played import played
from short_runs import altered

SPEC = EnvSpec("toy", (3,), torch.float32, actions=4)
CONTINUOUS = EnvSpec("toy", (3,), torch.float32, actions=0, action_shape=(2,))


def agent(spec: EnvSpec = SPEC, seed: int = 0, updates: int | None = None, **changes: object) -> PPOAgent:
    config = dataclasses.replace(PPO(hidden=8, steps=6), **changes)
    return config.build(Context(spec, Replica, seed, updates=updates))


def made_stale(data: Trajectory, seed: int) -> Trajectory:
    """As if another policy and another critic had played: ratios on both sides of the clip."""
    g = torch.Generator().manual_seed(seed)
    noise = {name: 0.3 * torch.randn(x.shape, generator=g) for name, x in data.behaviour.items()}
    return dataclasses.replace(data, behaviour={n: x + noise[n] for n, x in data.behaviour.items()})


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("value_clip", [0.2, math.inf])
def test_gradient_is_that_of_the_written_out_loss(seed: int, normalize: bool, value_clip: float) -> None:
    changes = {"normalize_advantages": normalize, "value_clip": value_clip, "ratio_clip": 0.2}
    learner = agent(seed=seed, epochs=1, minibatches=1, **changes)
    data = made_stale(played(learner, seed), seed)
    parameters = list(learner.net.parameters())
    loss = ppo_loss(learner.net, data, learner.config)
    slow = torch.autograd.grad(loss, parameters)
    norm = torch.cat([g.flatten() for g in slow]).norm()
    factor = min(1.0, 0.5 / (float(norm) + 1e-6))
    outcome = learner.learn(Batch(data))
    figures = outcome.read_metrics()
    assert float(figures["loss"]) == pytest.approx(loss.item(), rel=1e-4, abs=1e-6)
    assert float(figures["gradient_norm"]) == pytest.approx(float(norm), rel=1e-4)
    assert 0.1 < float(figures["clipped_share"]) < 0.9, "the clip has something to do"
    for parameter, gradient in zip(parameters, slow, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, gradient * factor, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_advantages_are_those_written_out(seed: int) -> None:
    learner = agent()
    data = made_stale(played(learner, seed), seed)
    expected = torch.tensor(advantages(learner.net, data, learner.config)).T
    torch.testing.assert_close(learner._advantages(data), expected, rtol=1e-5, atol=1e-5)
    assert data.truncated.any()
    assert data.terminated.any()


def test_figures_are_means_over_the_updates() -> None:
    """At a rate of 0 each pass has the same."""
    one, three = (agent(learning_rate=0.0, minibatches=1, epochs=epochs) for epochs in (1, 3))
    batch = Batch(played(one))
    expected, found = (
        {name: float(figure) for name, figure in learner.learn(batch).read_metrics().items()}
        for learner in (one, three)
    )
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("recurrent", [0, 5])
@pytest.mark.parametrize("minibatches", [1, 3, 4])
def test_each_pass_takes_every_step_once_with_all_that_belongs_to_it(
    recurrent: int, minibatches: int
) -> None:
    learner = agent(recurrent=recurrent, minibatches=minibatches)
    data = played(learner, steps=5, simulators=7)
    number = torch.arange(35.0).view(5, 7)
    data = dataclasses.replace(
        data,
        action=number.long(),
        observation=number[..., None].expand(5, 7, 3),
        first=(number % 3 == 0),
        behaviour={"log_probability": number + 0.5, "value": number + 0.25},
        memory=None if not recurrent else torch.arange(7.0)[:, None].expand(7, 10),
    )
    generator = torch.Generator().manual_seed(0)
    passes = [list(learner._minibatches(data, number + 0.125, generator)) for _ in range(2)]
    orders = [torch.cat([m.action.flatten() for m in parts]) for parts in passes]
    assert not torch.equal(*orders)
    for parts in passes:
        assert len(parts) == minibatches
        sizes = [m.action.numel() for m in parts]
        assert max(sizes) - min(sizes) <= (5 if recurrent else 1)
        assert sorted(torch.cat([m.action.flatten() for m in parts]).tolist()) == list(range(35))
        for m in parts:
            n = m.action.float()
            assert n.shape[0] == (5 if recurrent else 1)
            assert torch.equal(m.observation, n[..., None].expand(*n.shape, 3))
            assert torch.equal(m.first, n % 3 == 0)
            assert torch.equal(m.old_log_prob, n + 0.5)
            assert torch.equal(m.old_value, n + 0.25)
            assert torch.equal(m.advantage, n + 0.125)
            assert torch.equal(m.target, 2 * n + 0.375)
            if recurrent:
                assert m.memory is not None
                assert torch.equal(m.memory, (n[0] % 7)[:, None].expand(-1, 10))
                assert torch.equal(n, n[0] + 7 * torch.arange(5.0)[:, None]), "whole simulators, in order"


@pytest.mark.parametrize("recurrent", [0, 5])
@pytest.mark.parametrize("spec", [SPEC, CONTINUOUS], ids=["discrete", "continuous"])
def test_before_its_first_update_it_finds_the_probabilities_that_it_acted_with(
    spec: EnvSpec, recurrent: int
) -> None:
    """With a rate of 0 all ratios stay 1: recurrent state is restored and reset exactly as in acting."""
    learner = agent(spec, recurrent=recurrent, learning_rate=0.0, epochs=2)
    figures = learner.learn(Batch(played(learner, steps=12, simulators=5))).read_metrics()
    assert float(figures["kl"]) == pytest.approx(0.0, abs=1e-9)
    assert float(figures["clipped_share"]) == 0.0


@pytest.mark.parametrize("recurrent", [0, 6])
def test_so_it_does_in_a_world_across_batches_and_ends_of_both_kinds(recurrent: int) -> None:
    """A pole that falls after about 20 steps, or is stopped after 15; rollouts of 7 begin anywhere in it."""
    run = recipe("cartpole-ppo")
    learner = dataclasses.replace(run.learner, steps=7, recurrent=recurrent, learning_rate=0.0)
    world = dataclasses.replace(run.world, max_episode_steps=15)
    run = altered(run, learner=learner, world=world, simulators=4)
    made = build_learner(run, 0, Replica)
    made.replica.params.data.mul_(3.0)  # far from uniform, and the memory matters
    source = open_only_source(run, made)
    ends = [0, 0]
    for _, batch in zip(range(12), source, strict=False):
        figures = made.learn(batch).read_metrics()
        assert float(figures["kl"]) == pytest.approx(0.0, abs=1e-9)
        assert float(figures["clipped_share"]) == 0.0
        ends[0] += int(batch.data.terminated.sum())
        ends[1] += int(batch.data.truncated.sum())
    assert min(ends) > 0
    source.close()


def test_recurrent_bootstrap_reads_the_memory_of_its_episode() -> None:
    learner = agent(recurrent=6, gae_lambda=0.0)
    data = played(learner, seed=3, steps=6)
    assert data.memory is not None
    assert data.truncated_observation is not None
    found, row, checked = learner._advantages(data), 0, 0
    for t in range(6):
        for b in range(4):
            own = data.memory[b : b + 1]
            for s in range(t + 1):
                seen, first = data.observation[s, b], data.first[s, b]
                _, _, own = learner.net.unroll(seen[None, None], own, first[None, None])
            never = torch.zeros(1, 1, dtype=torch.bool)
            if data.truncated[t, b]:
                following, row = data.truncated_observation[row], row + 1
            elif not data.terminated[t, b] and t == 5:
                following = data.last_observation[b]
            else:
                continue
            _, value, _ = learner.net.unroll(following[None, None], own, never)
            expected = data.reward[t, b] + 0.99 * value[0, 0] - data.behaviour["value"][t, b]
            torch.testing.assert_close(found[t, b], expected)
            checked += 1
    assert row == int(data.truncated.sum()) > 0
    assert checked > row


def test_normalized_advantages_do_not_depend_on_the_scale_of_rewards() -> None:
    changed = []
    for scale in (1.0, 1000.0):
        learner = agent(epochs=1, minibatches=2, discount=0.0, value_coefficient=0.0, ratio_clip=0.2)
        data = played(learner)
        behaviour = data.behaviour | {"value": torch.zeros_like(data.reward)}
        data = dataclasses.replace(data, reward=scale * data.reward, behaviour=behaviour)
        learner.learn(Batch(data))
        changed.append(learner.replica.params.detach().clone())
    torch.testing.assert_close(changed[0], changed[1], rtol=1e-4, atol=1e-6)


def test_updates_and_the_schedule_are_counted_in_minibatches() -> None:
    learner = agent(updates=24, learning_rate=1.0, learning_rate_end=0.25, epochs=3, minibatches=4)
    assert learner.config.updates(2) == 24
    rates = [learner.learn(Batch(played(learner, i))).metrics["learning_rate"] for i in range(2)]
    assert learner.replica.clock == 24
    assert rates == pytest.approx([1 - 0.75 * 11 / 24, 1 - 0.75 * 23 / 24])


def test_the_order_of_minibatches_follows_from_seed_and_clock() -> None:
    one, two, other = agent(), agent(), agent()
    data = played(one)
    other.replica.tick()
    for learner in (one, two, other):
        learner.learn(Batch(data))
    assert torch.equal(one.replica.params, two.replica.params)
    assert not torch.equal(one.replica.params, other.replica.params)


def test_explained_variance_of_a_perfect_and_of_a_constant_critic() -> None:
    learner = agent(learning_rate=0.0, discount=0.0)
    data = played(learner)
    for value, expected in ((data.reward, 1.0), (torch.ones_like(data.reward), 0.0)):
        seen = dataclasses.replace(data, behaviour=data.behaviour | {"value": value})
        found = learner.learn(Batch(seen)).read_metrics()["explained_variance"]
        assert float(found) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("spec", "recurrent"),
    [
        pytest.param(SPEC, 0, id="discrete"),
        pytest.param(CONTINUOUS, 4, id="continuous recurrent"),
        pytest.param(SPEC, 4, id="discrete recurrent", marks=pytest.mark.slow),
        pytest.param(CONTINUOUS, 0, id="continuous", marks=pytest.mark.slow),
    ],
)
def test_learns_a_bandit(spec: EnvSpec, recurrent: int) -> None:
    learner = agent(spec, learning_rate=1e-2, entropy_coefficient=0.0, ratio_clip=0.2, recurrent=recurrent)
    generator = torch.Generator().manual_seed(0)
    observation, first = torch.ones(16, 3), torch.ones(16, dtype=torch.bool)
    memory = learner.initial_memory(16)

    def reward(action: torch.Tensor) -> torch.Tensor:
        return (action == 2).float() if spec.actions else -(action - 0.5).square().sum(-1)

    for _ in range(60):
        chosen = learner.act(observation, memory, first, generator)
        data = Trajectory(
            observation[None],
            chosen.action[None],
            reward(chosen.action)[None],
            first[None],
            ~first[None],
            first[None],
            observation,
            memory=memory,
            behaviour={name: x[None] for name, x in chosen.behaviour.items()},
        )
        learner.learn(Batch(data))
    best = learner.act(observation, memory, first, generator, greedy=True).action
    assert reward(best).mean() > (0.99 if spec.actions else -0.02)


def test_too_few_simulators_for_the_minibatches_are_refused() -> None:
    run = recipe("cartpole-ppo")
    recurrent = dataclasses.replace(run.learner, recurrent=8)
    altered(run, learner=recurrent, simulators=4).validate()
    with pytest.raises(Refusal, match="--simulators 4"):
        altered(run, learner=recurrent, simulators=3).validate()
    short = dataclasses.replace(run.learner, steps=1)
    with pytest.raises(Refusal, match="--simulators 4"):
        altered(run, learner=short, simulators=3).validate()
