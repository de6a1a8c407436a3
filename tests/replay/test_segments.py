"""Segments against their definition: probabilities and weights of slots."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from murmurate.replay.priorities import Prioritized, Uniform
from murmurate.replay.row_replay import RowReplay
from murmurate.replay.rows import Column
from murmurate.replay.segments import Segmented

SIZES = (40, 100, 7)
SHARES = (0.25, 0.25, 0.5)
KINDS = ("prioritized", "uniform", "mixed")


def segmented(kind: str, sizes: tuple[int, ...] = SIZES, seed: int = 0, **more: Any) -> Segmented:
    def part(k: int, size: int) -> Prioritized | Uniform:
        if kind == "uniform" or (kind == "mixed" and k == 1):
            return Uniform(size, seed=seed + k)
        return Prioritized(size, alpha=0.7, epsilon=0.0, seed=seed + k)

    return Segmented([part(k, size) for k, size in enumerate(sizes)], seed=seed, **more)


def filled(kind: str, present: Tensor, **more: Any) -> tuple[Segmented, Tensor]:
    """Segments with the slots ``present``, and what each slot is drawn in proportion to in its segment."""
    sampler = segmented(kind, shares=SHARES, **more)
    error = torch.rand(len(present), generator=torch.Generator().manual_seed(5)) + 0.05
    sampler.put(present, error)
    weight = torch.zeros(sampler.capacity, dtype=torch.float64)
    weight[present] = error.double() ** 0.7
    start = 0
    for segment, size in zip(sampler.segments, SIZES, strict=True):
        if isinstance(segment, Uniform):
            weight[start : start + size] = (weight[start : start + size] > 0).double()
        start += size
    return sampler, weight


def exact(weight: Tensor) -> Tensor:
    """The chance of each slot: its segment's share, as far as that is filled, times its part of it."""
    parts = list(weight.split(SIZES))
    shares = [
        share * float((p > 0).sum()) / len(p) if p.sum() > 0 else 0.0
        for share, p in zip(SHARES, parts, strict=True)
    ]
    return torch.cat(
        [s / sum(shares) * p / p.sum().clamp(min=1e-12) for s, p in zip(shares, parts, strict=True)]
    )


PRESENT = {
    "full": torch.arange(147),
    "half": torch.arange(0, 147, 2),
    "without the second": torch.cat([torch.arange(40), torch.arange(140, 147)]),
}


@pytest.mark.parametrize(
    ("kind", "present", "whole"),
    [  # each pair of two factors
        *(
            (kind, present, (i + j) % 2 == 0)
            for i, kind in enumerate(KINDS)
            for j, present in enumerate(PRESENT)
        ),
    ],
)
def test_each_slot_is_drawn_with_its_chance_and_weighed_for_it(kind: str, present: str, whole: bool) -> None:
    """Chi-square within 5 standard deviations. Weights are (N P(i)) ** -beta over the greatest: of the
    mixture; or of each segment, where a batch is from one."""
    sampler, weight = filled(kind, PRESENT[present], whole=whole)
    chance = exact(weight)
    batches, batch, beta = 2_500, 30, 0.6
    drawn = [sampler.draw(batch, beta) for _ in range(batches)]
    indices = torch.cat([result.indices for result in drawn])
    counts = torch.bincount(indices, minlength=sampler.capacity).double()
    if whole:
        relative = torch.cat([p / p[p > 0].min() if p.any() else p for p in weight.split(SIZES)])
    else:
        relative = chance / chance[chance > 0].min()
    weights = torch.cat([result.weights for result in drawn]).double()
    torch.testing.assert_close(weights, relative[indices] ** -beta, rtol=1e-5, atol=0)
    kept = chance > 0
    assert int(counts[~kept].sum()) == 0
    if whole:  # batches are from one segment each: they are what is independent
        numbers = torch.stack([part.sum() for part in counts.split(SIZES)]) / batch
        share = torch.stack([part.sum() for part in chance.split(SIZES)])
        sigma = (batches * share * (1 - share)).sqrt()
        assert bool(((numbers - batches * share).abs() <= 4 * sigma).all())
        parts = zip(numbers / batches, chance.split(SIZES), strict=True)
        chance = torch.cat([n * p / p.sum().clamp(min=1e-12) for n, p in parts])
    expected = batches * batch * chance[kept]
    chi = float(((counts[kept] - expected) ** 2 / expected).sum())
    freedom = int(kept.sum()) - 1
    assert chi < freedom + 5 * math.sqrt(2 * freedom)


# how many draws a segment has does not depend on how it makes them
@pytest.mark.parametrize(("kind", "batch"), [("prioritized", 1), ("uniform", 7), ("mixed", 64)])
def test_a_batch_has_each_segments_share_to_less_than_one_draw(kind: str, batch: int) -> None:
    sampler, _ = filled(kind, PRESENT["full"])
    batches = 2_000
    share = torch.tensor(SHARES, dtype=torch.float64)
    drawn = torch.stack([sampler.draw(batch, 0.4).indices for _ in range(batches)])
    number = torch.bucketize(drawn, torch.tensor(SIZES).cumsum(0), right=True)
    counts = torch.stack([(number == k).sum(1) for k in range(3)], 1).double()
    assert bool(((counts - share * batch).abs() < 1).all())
    # each count is one of two neighbours: its variance is a quarter at most
    assert bool(((counts.mean(0) - share * batch).abs() <= 4 * 0.5 / math.sqrt(batches)).all())


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_put_in_changed_and_taken_out_is_that_of_its_segment(kind: str) -> None:
    sampler = segmented(kind)
    generator = torch.Generator().manual_seed(0)
    there: set[int] = set()
    for _ in range(100):
        slots = torch.randint(147, (30,), generator=generator)
        sampler.put(slots, torch.rand(30, generator=generator))
        there |= set(slots.tolist())
        gone = torch.randint(147, (20,), generator=generator)
        sampler.remove(gone)
        there -= set(gone.tolist())
        sampler.update(torch.tensor(sorted(there)), torch.ones(len(there)))
        assert sampler.filled == len(there)
    drawn = itertools.chain(*(sampler.draw(40, 0.4).indices.tolist() for _ in range(200)))
    assert set(drawn) == there


def rollouts(replay: RowReplay, generation: int, count: int) -> None:
    one = torch.full((count,), float(generation))
    replay.insert(
        {
            "observation": one[:, None],
            "next_observation": one[:, None],
            "action": torch.zeros(count, dtype=torch.int64),
            "reward": one,
            "discount": one,
        },
        count,
    )


def test_a_batch_is_of_one_generation_of_rollouts() -> None:
    """Zhang 2022, Algorithm 2: M rollouts go to the next segment; a batch is from one that is drawn
    uniformly."""
    size, count = 50, 4
    sampler = Segmented([Uniform(size, seed=k) for k in range(count)], whole=True)
    replay = RowReplay(sampler, Column((1,), torch.float32), Column((), torch.int64))
    for generation in range(11):
        rollouts(replay, generation, size)
        kept = range(max(0, generation - count + 1), generation + 1)
        seen = [set(replay.sample(32, 0.4).reward.tolist()) for _ in range(400)]
        assert all(len(result) == 1 for result in seen)
        numbers = torch.bincount(torch.tensor([int(result.pop()) for result in seen]), minlength=11)
        assert {k for k in range(11) if numbers[k]} == set(kept)
        p = 1 / len(kept)
        assert all(abs(int(numbers[k]) - 400 * p) <= 4 * math.sqrt(400 * p * (1 - p)) for k in kept)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("whole", [False, True])
def test_segments_go_on_from_their_state(kind: str, whole: bool) -> None:
    one, _ = filled(kind, PRESENT["half"], whole=whole)
    one.draw(30, 0.4)
    other = segmented(kind, seed=17, shares=SHARES, whole=whole)
    other.put(torch.arange(147))
    other.load(one.state())
    assert other.filled == one.filled
    for _ in range(20):
        for a, b in zip(one.draw(30, 0.4), other.draw(30, 0.4), strict=True):
            assert torch.equal(a, b)
    with pytest.raises(ValueError, match="has 3 segments, but this replay has 2"):
        segmented(kind, (10, 10)).load(one.state())


def test_segments_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="there are no segments"):
        Segmented([])
    for shares in ([1.0], [1.0, 0.0], [1.0, math.inf]):
        with pytest.raises(ValueError, match="not one positive number for each of 2"):
            Segmented([Uniform(5), Uniform(5)], shares=shares)
    sampler = segmented("mixed")
    with pytest.raises(ValueError, match="the replay is empty"):
        sampler.draw(1, 0.4)
    sampler.put(torch.tensor([0, 1, 60]))
    assert len(sampler.draw(3, 0.4).indices) == 3
    with pytest.raises(ValueError, match="a batch of 4 cannot be drawn from 3"):
        sampler.draw(4, 0.4)
    nothing = segmented("prioritized")
    nothing.put(torch.arange(5), torch.zeros(5))
    with pytest.raises(ValueError, match="there is nothing to draw"):
        nothing.draw(2, 0.4)


def test_new_slots_have_the_highest_priority_so_far() -> None:
    sampler = Prioritized(4, alpha=1.0, epsilon=0.0)
    sampler.put(torch.tensor([0, 1]), torch.tensor([5.0, 3.0]))
    sampler.update(torch.tensor([0]), torch.tensor([2.0]))
    sampler.put(torch.tensor([2]))
    assert sampler.tree.priorities.tolist() == [2.0, 3.0, 5.0, 0.0]
