"""Masks of illegal actions: where they are read, and what nets give under them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from murmurate.losses.divergence import categorical_kl
from murmurate.losses.policy import categorical_log_prob_and_entropy
from murmurate.losses.regret import regret_matching
from murmurate.nets.action_mask import LOWEST, ActionMask, action_mask
from murmurate.nets.actor_critic import actor_critic
from murmurate.nets.q_network import q_network
from murmurate.nets.single_head import policy_net
from murmurate.spec import EnvSpec

PARTS = (("action_mask", 0, 3, ()), ("speed", 3, 5, ()))
SPEC = EnvSpec("masked", (5,), torch.float32, actions=3, parts=PARTS)


def test_an_action_is_legal_where_its_number_is_above_0() -> None:
    mask = action_mask(SPEC)
    assert mask is not None
    observation = torch.tensor([[1.0, 0.0, 0.5, 7.0, 7.0], [0.0, 0.0, 0.0, 7.0, 7.0]])
    assert mask.legal(observation).tolist() == [[True, False, True], [True, True, True]]
    assert mask(torch.ones(2, 3), observation).tolist() == [[1.0, LOWEST, 1.0], [1.0, 1.0, 1.0]]
    assert mask.first_legal(observation[:, [1, 0, 2, 3, 4]]).tolist() == [1, 0]


def test_of_stacked_observations_the_newest_has_the_mask() -> None:
    mask = action_mask(EnvSpec("masked", (15,), torch.float32, actions=3, parts=PARTS, history=3))
    assert mask is not None
    observation = torch.ones(1, 15)
    observation[0, 11] = 0.0
    assert mask.legal(observation).tolist() == [[True, False, True]]


def test_each_part_of_an_action_has_its_own_values() -> None:
    parts = (("action_mask", 1, 6, ()),)
    factors = (2, 3)
    spec = EnvSpec(
        "locks", (6,), torch.float32, 0, (2,), (0, 0), (1, 2), factors=factors, parts=parts
    )  # fmt: skip
    mask = action_mask(spec)
    assert mask is not None
    observation = torch.tensor([[9.0, 0, 1, 0, 0, 0], [9.0, 0, 0, 0, 1, 1]])
    assert mask.legal(observation).int().tolist() == [[0, 1, 1, 1, 1], [1, 1, 0, 1, 1]]
    assert mask.first_legal(observation).tolist() == [[1.0, 0.0], [0.0, 1.0]]
    drawn = torch.stack([mask.random(observation, torch.Generator().manual_seed(s)) for s in range(60)])
    assert drawn.dtype == torch.float32
    assert {tuple(pair) for pair in drawn[:, 0].tolist()} == {(1.0, 0.0), (1.0, 1.0), (1.0, 2.0)}
    assert {tuple(pair) for pair in drawn[:, 1].tolist()} == {(a, b) for a in (0.0, 1.0) for b in (1.0, 2.0)}


def test_other_worlds_have_none() -> None:
    assert action_mask(EnvSpec("plain", (5,), torch.float32, actions=3)) is None
    vectors = EnvSpec("vectors", (5,), torch.float32, 0, (3,), parts=PARTS)
    assert action_mask(vectors) is None


def test_random_actions_are_uniform_over_the_legal_ones() -> None:
    mask, count = ActionMask(0, 4, (4,)), 40_000
    observation = torch.tensor([[1.0, 0.0, 1.0, 1.0]]).expand(count, 4)
    share = torch.bincount(mask.random(observation, torch.Generator().manual_seed(0)), minlength=4) / count
    assert share[1] == 0
    # four standard deviations
    assert ((share[[0, 2, 3]] - 1 / 3).abs() < 4 * math.sqrt(2 / 9 / count)).all()


def test_the_distribution_is_that_over_the_legal_actions_alone() -> None:
    generator = torch.Generator().manual_seed(1)
    logits, other = torch.randn(2, 8, 5, generator=generator, dtype=torch.float64)
    legal = torch.tensor([True, False, True, True, False])
    mask = ActionMask(0, 5, (5,))
    masked, masked_other = (mask(x, legal.double().expand(8, 5)) for x in (logits, other))
    masked.requires_grad_()
    for number, action in enumerate((0, 2, 3)):
        log_prob, entropy = categorical_log_prob_and_entropy(masked, torch.full((8,), action))
        alone = categorical_log_prob_and_entropy(logits[:, legal], torch.full((8,), number))
        assert torch.allclose(log_prob, alone[0], atol=1e-12)
        assert torch.allclose(entropy, alone[1], atol=1e-12)
    divergence = categorical_kl(masked, masked_other)
    assert torch.allclose(divergence, categorical_kl(logits[:, legal], other[:, legal]), atol=1e-12)
    (gradient,) = torch.autograd.grad(divergence.sum() + entropy.sum(), masked)
    assert gradient.isfinite().all()
    assert not gradient[:, ~legal].any()


def test_regret_matching_gives_illegal_actions_no_probability() -> None:
    advantage = torch.tensor([[2.0, 5.0, 6.0], [-1.0, 3.0, -2.0]])
    legal = torch.tensor([[True, False, True], [True, False, True]])
    assert regret_matching(advantage, legal).tolist() == [[0.25, 0.0, 0.75], [0.5, 0.0, 0.5]]
    with pytest.raises(ValueError, match="bool tensor"):
        regret_matching(advantage, legal.float())
    with pytest.raises(ValueError, match="legal"):
        regret_matching(advantage, legal[:1])


@pytest.mark.parametrize("normalize", [False, True])
def test_nets_mask_by_the_observation_before_it_is_normalised(normalize: bool) -> None:
    generator = torch.Generator().manual_seed(2)
    observation = torch.tensor([[1.0, 0.0, 1.0, 3.0, 4.0], [0.0, 1.0, 1.0, 3.0, 4.0]])
    illegal = torch.tensor([[False, True, False], [True, False, False]])
    critic = actor_critic(SPEC, generator=generator, normalize=normalize)
    recurrent = actor_critic(SPEC, generator=generator, normalize=normalize, recurrent=8)
    values = q_network(SPEC, generator=generator, normalize=normalize)
    results = [critic(observation)[0], critic.policy(observation), values(observation)]
    first = torch.zeros(1, 2, dtype=torch.bool)
    results += [
        net.unroll(observation[None], net.initial_memory(2), first)[0][0] for net in (critic, recurrent)
    ]
    results.append(policy_net(SPEC, generator=generator)(observation))
    nets: list[nn.Module] = [critic, values]
    for net in nets:
        if normalize:
            net.normalizer.moments.include(observation.mean(0), observation.square().mean(0), 2)  # type: ignore[union-attr, operator]
    results.append(values(observation))
    for result in results:
        assert torch.equal(result == LOWEST, illegal)
