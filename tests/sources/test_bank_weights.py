"""Importance weights of learners with separate replays equal those of a single replay."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

from murmurate.fabric.interface import Fabric
from murmurate.fabric.simulated.fabric import run_members
from murmurate.replay.priorities import Prioritized, SlotSampler, Uniform
from murmurate.sources.bank_weights import CHANNEL_LIKE, BankWeights

SIZES, SCALES = (40, 100, 7), (1.0, 5.0, 0.01)


def bank(rank: int, uniform: bool) -> tuple[SlotSampler, Tensor]:
    """Some items, and what each is drawn in proportion to."""
    errors = SCALES[rank] * (torch.rand(SIZES[rank], generator=torch.Generator().manual_seed(rank)) + 0.1)
    sampler: SlotSampler
    if uniform:
        sampler = Uniform(SIZES[rank])
        sampler.put(torch.arange(SIZES[rank]))
        return sampler, torch.ones(SIZES[rank])
    sampler = Prioritized(SIZES[rank], alpha=1.0, epsilon=0.0)
    sampler.put(torch.arange(SIZES[rank]), errors)
    return sampler, errors


def weigh(uniform: bool, beta: float, least: float, fabric: Fabric) -> tuple[Tensor, Tensor]:
    """([n] what each item of this member's bank is drawn in proportion to, [n] chance times weight)"""
    sampler, priority = bank(fabric.rank, uniform)
    total, minimum = sampler.mass
    channel = fabric.channel("banks", CHANNEL_LIKE)
    for banks in (BankWeights(channel, 3), BankWeights(channel, 3)):
        weight = (priority / minimum / least) ** -beta
        banks.weigh(weight, total, minimum * least, beta)
        channel.gather(torch.zeros(1, dtype=torch.int64))  # all have spoken
        assert weight.min() > 0
        assert weight.max() < 1 + 1e-6
    return priority, priority / priority.sum() * weight


@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("uniform", [False, True])
def test_chances_times_weights_are_those_of_one_replay(uniform: bool, beta: float) -> None:
    """From one replay an item would weigh p_i * p_i ** -beta, but for a constant."""
    result = run_members(3, [functools.partial(weigh, uniform, beta, 1.0)] * 3)
    greatest = max(float((weighed / (priority / priority.sum())).max()) for priority, weighed in result)
    assert greatest == pytest.approx(1.0, rel=1e-5)
    priority, weighed = (torch.cat(parts) for parts in zip(*result, strict=True))
    constant = weighed / priority ** (1 - beta)
    torch.testing.assert_close(constant, constant[0].expand_as(constant), rtol=1e-4, atol=0)


def test_an_item_that_nobody_drew_makes_no_weight_small() -> None:
    """One with an error of nearly 0 in one bank, or in all."""
    usual = run_members(3, [functools.partial(weigh, False, 1.0, 1.0)] * 3)
    for kinds in ((1e-6, 1.0, 1.0), (1e-6, 1e-9, 1e-3)):
        result = run_members(3, [functools.partial(weigh, False, 1.0, least) for least in kinds])
        for (_, one), (_, other) in zip(usual, result, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=0)


def alone(fabric: Fabric) -> list[float]:
    weights = torch.tensor([0.5, 0.25, 0.1])
    BankWeights(fabric.channel("banks", CHANNEL_LIKE), 1).weigh(weights, 3.0, 0.5, 0.4)
    return weights.tolist()


def test_who_has_no_others_weighs_over_the_greatest_of_the_batch() -> None:
    [result] = run_members(1, [alone])
    assert result == pytest.approx([1.0, 0.5, 0.2])
