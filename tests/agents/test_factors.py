"""Actions of several parts, each chosen for itself: the same distribution as one over all combinations."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from murmurate.agents._on_policy import divergence, draw, log_prob_and_entropy, log_probability
from murmurate.agents.a2c import A2C
from murmurate.agents.arm import ARM
from murmurate.agents.dqn import DQN
from murmurate.agents.impala import IMPALA
from murmurate.agents.ppo import PPO
from murmurate.agents.sac import SAC
from murmurate.agents.td3 import TD3
from murmurate.agents.trpo import TRPO
from murmurate.losses.divergence import categorical_kl
from murmurate.losses.policy import categorical_log_prob_and_entropy
from murmurate.replica.vector import Replica
from murmurate.replicator.collectives import Group
from murmurate.replicator.learner import Context
from murmurate.spec import Batch, EnvSpec, Trajectory

FACTORS = (2, 3, 4)
SPEC = EnvSpec(
    "locks", (5,), torch.float32, actions=0, action_shape=(3,), action_low=(0,) * 3, action_high=(1, 2, 3),
    factors=FACTORS,
)  # fmt: skip
ALL = torch.tensor(list(itertools.product(*map(range, FACTORS))), dtype=torch.float32)  # [24, 3]


def logits(rows: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, sum(FACTORS), generator=generator, dtype=torch.float64)


def joint(policy: torch.Tensor) -> torch.Tensor:
    """[n, 24] logits of all combinations, in the order of ``ALL``."""
    a, b, c = policy.split(FACTORS, -1)
    return (a[:, :, None, None] + b[:, None, :, None] + c[:, None, None, :]).flatten(1)


def test_probabilities_are_those_of_all_combinations() -> None:
    policy, other = logits(6, 0), logits(6, 1)
    for number, action in enumerate(ALL):
        actions, numbers = action.expand(6, 3), torch.full((6,), number)
        expected, entropy = categorical_log_prob_and_entropy(joint(policy), numbers)
        log_prob, own_entropy = log_prob_and_entropy(policy, actions, SPEC)
        assert torch.allclose(log_prob, expected, atol=1e-12)
        assert torch.allclose(own_entropy, entropy, atol=1e-12)
        assert torch.allclose(log_probability(policy, actions, SPEC), expected, atol=1e-12)
    assert torch.allclose(
        divergence(policy, other, SPEC), categorical_kl(joint(policy), joint(other)), atol=1e-12
    )


def test_draws_have_these_probabilities() -> None:
    policy, count = logits(1, 3).float(), 40_000
    actions = draw(policy.expand(count, -1), SPEC, torch.Generator().manual_seed(4), greedy=False)
    numbers = (actions * torch.tensor([12.0, 4.0, 1.0])).sum(1).long()
    share = torch.bincount(numbers, minlength=24) / count
    expected = joint(policy)[0].softmax(0)
    # four standard deviations of a share, of which each of 24 exceeds with probability 6e-5
    assert ((share - expected).abs() < 4 * (expected * (1 - expected) / count).sqrt()).all()
    best = draw(policy, SPEC, torch.Generator(), greedy=True)
    assert torch.equal(best[0], ALL[joint(policy).argmax()])
    assert best.dtype == torch.float32


def context() -> Context:
    return Context(SPEC, Replica, 0, open_group=Group.of_one)


@pytest.mark.parametrize(
    "config",
    [A2C(), IMPALA(), PPO(steps=4, minibatches=1, learning_rate=3e-3), TRPO(steps=4, value_minibatches=1)],
)
def test_policy_gradient_agents_learn_from_them(config: Any) -> None:
    """The part that is rewarded becomes more likely; the others hardly change."""
    agent = config.build(context())
    generator = torch.Generator().manual_seed(0)
    size = 64
    seen = torch.randn(4, size, 5, generator=generator)
    first = torch.zeros(4, size, dtype=torch.bool)

    def chance(action: torch.Tensor) -> torch.Tensor:
        chosen = agent.act(seen[0], None, first[0], torch.Generator().manual_seed(5))
        return (chosen.action == action).float().mean(0)

    before = chance(torch.tensor([1.0, 2.0, 3.0]))
    for _ in range(25):
        acted = [agent.act(one, None, first[0], generator) for one in seen]
        action = torch.stack([one.action for one in acted])
        named = config.requires.behaviour
        behaviour = {name: torch.stack([one.behaviour[name] for one in acted]) for name in named}
        agent.learn(
            Batch(
                Trajectory(
                    seen, action, (action[..., 2] == 3).float(), ~first, first, ~first, seen[0],
                    behaviour=behaviour,
                )
            )
        )  # fmt: skip
    after = chance(torch.tensor([1.0, 2.0, 3.0]))
    assert after[2] > before[2] + 0.05
    assert (after[:2] - before[:2]).abs().max() < after[2] - before[2]


@pytest.mark.parametrize("config", [DQN(), ARM(), TD3(), SAC()])
def test_others_refuse_them_with_a_remedy(config: Any) -> None:
    words = "3 parts of 2 to 4 values, which are 24 .*joint-actions 24"
    if isinstance(config, TD3 | SAC):
        words = "needs vector actions, and those of locks are discrete: use ppo"
    with pytest.raises(ValueError, match=words):
        config.build(context())


@pytest.mark.parametrize("greedy", [False, True])
def test_vector_actions_keep_the_worlds_shape(greedy: bool) -> None:
    spec = EnvSpec("matrix", (3,), torch.float32, 0, (2, 3), (-1.0,) * 6, (1.0,) * 6)
    policy = torch.randn(5, 12, generator=torch.Generator().manual_seed(0))
    action = draw(policy, spec, torch.Generator().manual_seed(1), greedy)
    assert action.shape == (5, 2, 3)
    flat = EnvSpec("flat", (3,), torch.float32, 0, (6,), (-1.0,) * 6, (1.0,) * 6)
    log_prob, entropy = log_prob_and_entropy(policy, action, spec)
    expected_log_prob, expected_entropy = log_prob_and_entropy(policy, action.flatten(1), flat)
    assert torch.equal(log_prob, expected_log_prob)
    assert torch.equal(entropy, expected_entropy)
    assert torch.equal(log_probability(policy[None], action[None], spec)[0], expected_log_prob)
