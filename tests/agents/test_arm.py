"""ARM: Algorithm 1 by hand, its iterations, off-policy weights; it learns where states look alike."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import agreeing
from murmurate.agents.arm import ARM, ARMAgent
from murmurate.losses.regret import regret_matching
from murmurate.replay.interface import Steps
from murmurate.replay.sequences import Trajectories
from murmurate.replica.vector import Replica
from murmurate.replicator.learner import Context
from murmurate.spec import Batch, EnvSpec, SequenceSample

SPEC = EnvSpec("toy", (5,), torch.float32, actions=3)


def agent(spec: EnvSpec = SPEC, **changes: object) -> ARMAgent:
    config = dataclasses.replace(ARM(hidden=16, batch=8, n_step=3), **changes)
    return config.build(Context(spec, Replica, 0))


def sample(made: ARMAgent, size: int = 8, seed: int = 0) -> SequenceSample:
    g = torch.Generator().manual_seed(seed)
    requires = made.config.requires
    return SequenceSample(
        observation=torch.randn(requires.steps if requires.every else 1, size, 5, generator=g),
        action=torch.randint(3, (requires.steps, size), generator=g),
        reward=torch.randn(requires.steps, size, generator=g),
        length=torch.randint(1, requires.steps + 1, (size,), generator=g),
        terminated=torch.rand(size, generator=g) < 0.3,
        last_observation=torch.randn(size, 5, generator=g),
        behaviour={name: torch.rand(requires.steps, size, generator=g) for name in requires.behaviour},
    )


def stirred(made: ARMAgent) -> ARMAgent:
    """With different random numbers in all nets."""
    nets = [made.net, made.target.net] + ([] if made.previous is None else [made.previous.net])
    for number, net in enumerate(nets):
        for x in net.parameters():
            x.data += 0.3 * torch.randn(x.shape, generator=torch.Generator().manual_seed(number))
    return made


def test_the_first_policy_is_uniform() -> None:
    made = agent()
    observation = torch.randn(3000, 5, generator=torch.Generator().manual_seed(0))
    action = made.act(observation, None, torch.zeros(3000) > 0, torch.Generator().manual_seed(1))
    assert action.behaviour["advantage"].eq(0).all()
    assert torch.bincount(action.action, minlength=3).float().div(3000).sub(1 / 3).abs().max() < 0.03


@pytest.mark.parametrize("clip", [None, 1.0, 2.0])
def test_targets_are_those_of_the_definition(clip: float | None) -> None:
    """A sequence at a time, with nets that differ from one another."""
    made = stirred(agent(importance_clip=clip))
    data, gamma = sample(made), made.config.discount
    value_errors, q_errors = [], []
    with torch.no_grad():
        for b in range(8):
            m = int(data.length[b])
            weights = [1.0] * m
            if made.previous is None:
                phi = float(data.behaviour["advantage"][0, b])
            else:
                for i in range(m):
                    q, v = made.previous.net(data.observation[i, b : b + 1])
                    pi = regret_matching(q - v[:, None])[0, data.action[i, b]]
                    weights[i] = min(clip, float(pi / data.behaviour["probability"][i, b]))
                    if i == 0:
                        phi = float(q[0, data.action[0, b]] - v[0])
            g, product = 0.0, 1.0
            for i in range(m):
                product *= weights[i]
                g += gamma**i * product * float(data.reward[i, b])
            if not data.terminated[b]:
                g += gamma**m * float(made.target.net(data.last_observation[b : b + 1])[1])
            q_target = max(0.0, phi) + (1 - weights[0]) * float(data.reward[0, b]) + g
            q, v = made.net(data.observation[0, b : b + 1])
            value_errors.append(g - float(v))
            q_errors.append(q_target - float(q[0, data.action[0, b]]))
    metrics = made.learn(Batch(data)).read_metrics()
    assert "gradient_norm" not in metrics, "it is measured only where it is clipped"
    value_loss, q_loss = (torch.tensor(e).square().mean() for e in (value_errors, q_errors))
    torch.testing.assert_close(metrics["value_loss"], value_loss, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(metrics["cumulative_loss"], q_loss, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(metrics["loss"], 0.5 * (value_loss + q_loss), rtol=1e-4, atol=1e-6)


def test_an_iteration_begins_with_new_env_steps() -> None:
    """phi <- theta_{t-1}; then it moves by tau with each update; the previous nets stand still."""
    made = agent(importance_clip=1.0, target_rate=0.25)
    for update in range(9):
        before = torch.cat([x.detach().flatten() for x in made.net.parameters()])
        target = torch.cat([x.flatten() for x in made.target.net.parameters()])
        made.learn(Batch(sample(made, seed=update), env_steps=100 if update % 3 == 0 else 0))
        after = torch.cat([x.detach().flatten() for x in made.net.parameters()])
        if update % 3 == 0:
            start = target = before
        torch.testing.assert_close(
            torch.cat([x.flatten() for x in made.target.net.parameters()]), target.lerp(after, 0.25)
        )
        assert torch.equal(torch.cat([x.flatten() for x in made.previous.net.parameters()]), start)
    assert made.iterations == 3


def test_an_iteration_that_begins_within_a_round_copies_the_nets_at_its_end() -> None:
    """H = 3, iterations of 4 updates. Within a round replicas differ, and so would their targets."""
    made = agent(importance_clip=1.0)
    made.replica.exchange = agreeing.every(3)
    copied = []
    for update in range(12):
        before = made.previous.net.value_head.weight.clone()
        made.learn(Batch(sample(made, seed=update), env_steps=100 if update % 4 == 0 else 0))
        if not torch.equal(before, made.previous.net.value_head.weight):
            copied.append(update)
            for net in (made.previous.net, made.target.net):
                assert torch.equal(net.value_head.weight, made.net.value_head.weight)
    assert copied == [5, 8]


def test_evaluation_draws_from_the_policy_unless_it_is_asked_to_be_greedy() -> None:
    observation = torch.randn(500, 5, generator=torch.Generator().manual_seed(0))
    for evaluate in ("policy", "greedy"):
        made = stirred(agent(evaluate=evaluate))
        g, first = torch.Generator().manual_seed(1), torch.zeros(500) > 0
        action = made.act(observation, None, first, g, greedy=True).action
        q, v = made.net(observation)
        best = (q - v[:, None]).argmax(1)
        assert torch.equal(action, best) == (evaluate == "greedy")
        policy = regret_matching(q - v[:, None])
        assert policy.gather(1, action[:, None]).gt(0).all() or evaluate == "greedy"


def test_a_loaded_agent_goes_on_as_the_saved_one() -> None:
    made, other = (agent(importance_clip=1.0) for _ in range(2))
    for update in range(5):
        made.learn(Batch(sample(made, seed=update), env_steps=int(update % 2 == 0)))
    other.replica.load(made.replica.state())
    other.load(made.state())
    for update in range(5, 9):
        for each in (made, other):
            each.learn(Batch(sample(each, seed=update), env_steps=int(update % 2 == 0)))
    assert torch.equal(made.replica.params, other.replica.params)
    assert made.iterations == other.iterations


def test_vectors_of_actions_are_refused() -> None:
    with pytest.raises(ValueError, match="needs discrete ones: use a2c"):
        agent(EnvSpec("arm", (5,), torch.float32, actions=0, action_shape=(2,)))


@pytest.mark.parametrize("clip", [pytest.param(None, marks=pytest.mark.slow), 1.0])
def test_it_finds_the_stochastic_policy_of_an_aliased_chain(clip: float | None) -> None:
    """Two states look alike: action 0 leads from the first to the second, and action 1 from the second to
    the goal; the other action leads back to the first. A deterministic policy never arrives; with the
    probability p of action 0 it takes 1 / (p (1 - p)) + 1 / (1 - p) steps, least for p = 0.41 (5.8)."""
    spec = EnvSpec("chain", (1,), torch.float32, actions=2)
    made = agent(spec, batch=64, n_step=5, learning_rate=3e-3, importance_clip=clip)
    with torch.no_grad():  # begins at p = 0.9, as uniform would be near enough from the start
        made.net.policy_head.bias.copy_(torch.tensor([0.18, 0.02]))
    ring = Trajectories(spec, 40 if clip is None else 120, 32, made.config.requires.behaviour)
    g, second = torch.Generator().manual_seed(0), torch.zeros(32, dtype=torch.bool)
    observation, no = torch.ones(32, 1), torch.zeros(32, dtype=torch.bool)
    chances = []
    for _iteration in range(18):
        for _ in range(40):
            chosen = made.act(observation, None, no, g)
            goal = second & (chosen.action == 1)
            second = ~second & (chosen.action == 0)
            reward = torch.full((32,), -0.1)
            ring.observe(
                0,
                Steps(observation, chosen.action, reward, observation, goal, no, behaviour=chosen.behaviour),
            )
        for update in range(60):
            data = ring.draw(64, 5, g, made.config.requires.every)
            made.learn(Batch(data, env_steps=1280 if update == 0 else 0))
        q, v = made.net(observation[:1])
        chances.append(float(regret_matching(q - v[:, None])[0, 0].detach()))
    mean = sum(chances[10:]) / 8
    assert 0.2 < mean < 0.8, chances
