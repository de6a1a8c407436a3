"""Slots in segments: a batch has a share of draws from each segment, or comes from a single one.

Zhang 2022, section 3.2.3 and Algorithm 2 (MEMR): a model is rolled out in rounds of M rollouts. Each round
starts at states drawn with different priorities and so forms a segment; a batch is drawn from one segment,
which is chosen first. A ring fills its slots in order, so its segments are consecutive ranges of M slots.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from murmurate.replay._native_tree import nothing_to_draw
from murmurate.replay.priorities import Prioritized, Uniform, refuse_too_many
from murmurate.replay.tree import Draw, empty_draw


class Segmented:
    """See ``SlotSampler``. Segment k has the slots that follow those of segment k - 1.

    shares: each segment's share of the draws; None: equal shares. The share of a partly filled segment is
        reduced in proportion, in favour of the others.
    whole: a batch is drawn from one segment, chosen with the probability of its share, and the weights are
        computed within it (Zhang: weights of different segments are not comparable). Otherwise each segment
        has its share of a batch's draws, rounded up or down, and item i of segment k is drawn with
        probability share_k p_i / P_k, P_k being the sum of its priorities. The item's weight, divided by the
        greatest weight, is (p_i / least p of k) ** -beta times a factor that depends on k.
    """

    weighted: ClassVar[bool] = True

    def __init__(
        self,
        segments: Sequence[Prioritized | Uniform],
        *,
        shares: Sequence[float] | None = None,
        whole: bool = False,
        seed: int = 0,
    ) -> None:
        if not segments:
            raise ValueError("there are no segments: give at least one")
        shares = [1.0] * len(segments) if shares is None else list(shares)
        if len(shares) != len(segments) or not all(0 < share < math.inf for share in shares):
            raise ValueError(
                f"the shares {shares} are not one positive number for each of {len(segments)} segments"
            )
        self.segments, self.shares, self.whole = list(segments), shares, whole
        ends = torch.tensor([segment.capacity for segment in segments], device="cpu").cumsum(0)
        self.capacity = int(ends[-1])
        self._ends = ends
        self._starts: list[int] = [0, *ends[:-1].tolist()]
        self._generator = torch.Generator().manual_seed(seed)

    @property
    def filled(self) -> int:
        return sum(segment.filled for segment in self.segments)

    def put(self, slots: Tensor, error: Tensor | None = None) -> None:
        for segment, mask, own_slots in self._by_segment(slots):
            segment.put(own_slots, None if error is None else error[mask])

    def remove(self, slots: Tensor) -> None:
        for segment, _, own_slots in self._by_segment(slots):
            segment.remove(own_slots)

    def update(self, slots: Tensor, error: Tensor) -> None:
        for segment, mask, own_slots in self._by_segment(slots):
            segment.update(own_slots, error[mask])

    def set_alpha(self, alpha: float) -> None:
        for segment in self.segments:
            segment.set_alpha(alpha)

    @property
    def mass(self) -> tuple[float, float]:
        """The sum and the least of the slots' probabilities, both times the number of filled slots."""
        least = min(self._least_probabilities(self._segment_probabilities()).values(), default=math.inf)
        return float(self.filled), self.filled * least

    def draw(self, count: int, beta: float, out: Draw | None = None) -> Draw:
        refuse_too_many(count, self.filled)
        if out is None:
            out = empty_draw(count)
        probabilities = self._segment_probabilities()
        if not probabilities:
            raise nothing_to_draw()
        least = self._least_probabilities(probabilities)
        least_of_all = min(least.values())
        start = 0
        for k, segment_count in self._counts(count, probabilities).items():
            part = Draw(*(x[start : start + segment_count] for x in out))
            self.segments[k].draw_any(segment_count, beta, part)
            part.indices.add_(self._starts[k])
            if not self.whole:
                part.weights.mul_((least_of_all / least[k]) ** beta)
            start += segment_count
        return out

    def _segment_probabilities(self) -> dict[int, float]:
        """For each non-empty segment, the probability that a draw is from it."""
        weights = {
            k: share * segment.filled / segment.capacity
            for k, (share, segment) in enumerate(zip(self.shares, self.segments, strict=True))
            if segment.filled and segment.mass[0] > 0
        }
        total = sum(weights.values())
        return {k: weight / total for k, weight in weights.items()}

    def _counts(self, count: int, probabilities: dict[int, float]) -> dict[int, int]:
        """For each segment, how many of a batch's draws come from it."""
        u = float(torch.rand((), dtype=torch.float64, device="cpu", generator=self._generator))
        if self.whole:
            bounds = torch.tensor(list(probabilities.values()), dtype=torch.float64, device="cpu").cumsum(0)
            position = min(int((bounds <= u).sum()), len(probabilities) - 1)
            return {list(probabilities)[position]: count}
        # systematic sampling, at the points u, u + 1, .. along the cumulated shares: the number of draws from
        # each segment is its share on average, and differs from it by less than one; the last has the rest
        counts, cumulated, before = {}, 0.0, 0
        for k, probability in probabilities.items():
            cumulated += probability
            after = count if k == max(probabilities) else min(count, math.floor(cumulated * count + u))
            if after > before:
                counts[k] = after - before
            before = max(before, after)
        return counts

    def _least_probabilities(self, probabilities: dict[int, float]) -> dict[int, float]:
        """For each segment, the least probability of a slot in it."""
        least_of = {}
        for k, probability in probabilities.items():
            total, least = self.segments[k].mass
            least_of[k] = probability * least / total
        return least_of

    def _by_segment(self, slots: Tensor) -> Iterator[tuple[Prioritized | Uniform, Tensor, Tensor]]:
        """(segment, mask of the ``slots`` in it, their numbers within it) for each segment that has any."""
        segment_of_slot = torch.bucketize(slots, self._ends, right=True)
        for k in torch.unique(segment_of_slot).tolist():
            mask = segment_of_slot == k
            yield self.segments[k], mask, slots[mask] - self._starts[k]

    def state(self) -> dict[str, Any]:
        segments = [segment.state() for segment in self.segments]
        return {"segments": segments, "generator": self._generator.get_state()}

    def load(self, state: dict[str, Any]) -> None:
        """Raises ValueError for a state with another number of segments."""
        if len(state["segments"]) != len(self.segments):
            raise ValueError(
                f"the state has {len(state['segments'])} segments, but this replay has {len(self.segments)}: "
                "open the replay with as many as the state has"
            )
        for segment, saved in zip(self.segments, state["segments"], strict=True):
            segment.load(saved)
        self._generator.set_state(state["generator"])
