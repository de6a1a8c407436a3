"""The sum tree in Triton, for CUDA devices. It makes the same additions in the same order as ``_torch_tree``,
so both find the same leaves.

Each thread adds all children of a node, one after the other: they take only one or two cache lines, and a
scan by several threads would add them in an order that depends on the layout of the block.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from murmurate.native import gpu
from murmurate.replay._native_tree import (
    SeededTree,
    check_lengths,
    mass_outside,
    nothing_to_draw,
    wrong_kind,
    wrong_priority,
)
from murmurate.replay.tree import Draw

_BLOCK = 64  # items of a program: few, so that a batch of 256 is spread over several multiprocessors
# constants of SplitMix64
_INCREMENT = tl.constexpr(0x9E3779B97F4A7C15)
_FACTOR_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_FACTOR_2 = tl.constexpr(0x94D049BB133111EB)


@triton.jit
def _descend(rest, sums, leaves, starts, LEVELS: tl.constexpr, FAN_OUT: tl.constexpr):
    """The leaf at each mass ``rest``. At each level the search enters the first child at which the cumulated
    sum exceeds ``rest``; ``rest`` is then reduced to what remains within that child."""
    node = tl.zeros_like(rest).to(tl.int64)
    for level in range(LEVELS):
        child, rest = _child(sums + tl.load(starts + level) + node * FAN_OUT, rest, FAN_OUT)
        node = node * FAN_OUT + child
    child, rest = _child(leaves + node * FAN_OUT, rest, FAN_OUT)
    return node * FAN_OUT + child


@triton.jit
def _child(line, rest, FAN_OUT: tl.constexpr):
    """(number of the child, mass that remains within it). A mass beyond all children by rounding goes to the
    last child that is not empty."""
    cumulated, before = tl.zeros_like(rest), tl.zeros_like(rest)
    child = tl.zeros_like(rest).to(tl.int64)
    for k in tl.static_range(FAN_OUT):
        weight = tl.load(line + k).to(tl.float64)
        reached = (weight > 0) & (cumulated <= rest)
        child = tl.where(reached, k, child)
        before = tl.where(reached, cumulated, before)
        cumulated += weight
    return child, rest - before


@triton.jit
def _find(
    mass, count, sums, leaves, starts, out, LEVELS: tl.constexpr, FAN_OUT: tl.constexpr, BLOCK: tl.constexpr
):
    item = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = item < count
    rest = tl.load(mass + item, mask=inside, other=0.0)
    tl.store(out + item, _descend(rest, sums, leaves, starts, LEVELS, FAN_OUT), mask=inside)


@triton.jit(do_not_specialize=["key", "first"])
def _sample(
    key: tl.int64,
    first: tl.int64,
    count,
    beta,
    sums,
    lows,
    leaves,
    starts,
    indices,
    weights,
    STRATIFIED: tl.constexpr,
    LEVELS: tl.constexpr,
    FAN_OUT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Draw leaves, and compute their weights. SplitMix64 (Steele et al. 2014), from its output number
    ``first`` on, gives each draw a u in [0, 1), and so the mass u x total."""
    item = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = item < count
    z = (item + first).to(tl.uint64) * _INCREMENT + key.to(tl.uint64)
    z = (z ^ (z >> 30)) * _FACTOR_1
    z = (z ^ (z >> 27)) * _FACTOR_2
    z = z ^ (z >> 31)
    u = (z >> 11).to(tl.float64) * 1.1102230246251565e-16  # 2 ** -53
    if STRATIFIED:
        u = (u + item) / count
    # the root's sum comes first in ``sums``; items beyond the batch are also searched for, with mass 0
    index = _descend(tl.where(inside, u, 0.0) * tl.load(sums), sums, leaves, starts, LEVELS, FAN_OUT)
    ratio = tl.maximum(tl.div_rn(tl.load(leaves + index), tl.load(lows)), 1.0)
    tl.store(indices + item, index, mask=inside)
    tl.store(weights + item, tl.exp2(-beta * tl.log2(ratio)), mask=inside)


@triton.jit(do_not_specialize=["ticket", "count"])
def _elect(index, priority, owner, wrong, ticket: tl.int64, count, capacity, BLOCK: tl.constexpr):
    """owner[index] <- ``ticket`` plus the position of the last item with that index. If an item is invalid,
    wrong <- ``ticket`` plus the number of items from the first invalid one on. Maxima do not depend on the
    order of threads, and tickets only grow, so neither ``owner`` nor ``wrong`` is reset between calls."""
    item = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = item < count
    leaf = tl.load(index + item, mask=inside, other=0)
    new = tl.load(priority + item, mask=inside, other=0.0)
    in_range = (leaf >= 0) & (leaf < capacity)
    valid = in_range & (new >= 0.0) & (new < float("inf"))
    tl.atomic_max(owner + leaf, ticket + item, mask=inside & in_range)
    tl.atomic_max(wrong + tl.zeros_like(item), ticket + count - item, mask=inside & (valid == 0))


@triton.jit(do_not_specialize=["ticket", "count"])
def _write(index, priority, owner, leaves, ticket: tl.int64, count, BLOCK: tl.constexpr):
    """Write the priorities of the items that ``_elect`` found to be the last with their index."""
    item = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = item < count
    leaf = tl.load(index + item, mask=inside, other=0)
    last = tl.load(owner + leaf) == ticket + item
    tl.store(leaves + leaf, tl.load(priority + item, mask=inside, other=0.0), mask=inside & last)


@triton.jit(do_not_specialize=["count"])
def _refresh(
    index,
    below,
    lows_below,
    sums,
    lows,
    count,
    leaves_each,
    ALL: tl.constexpr,
    LEAVES: tl.constexpr,
    FAN_OUT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Recompute the sums and least priorities of one level from the level below, for the nodes above
    ``index``, or, if ``ALL``, for the first ``count`` nodes. leaves_each: leaves under each node. LEAVES:
    whether the level below holds the leaves. Threads that share a node write the same numbers."""
    item = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = item < count
    node = item if ALL else tl.load(index + item, mask=inside, other=0) // leaves_each
    line = tl.where(inside, node, 0) * FAN_OUT
    total = tl.zeros([BLOCK], tl.float64)
    least = tl.full([BLOCK], float("inf"), tl.float32)
    for k in tl.static_range(FAN_OUT):
        weight = tl.load(below + line + k)
        total += weight.to(tl.float64)
        low = tl.where(weight > 0, weight, float("inf")) if LEAVES else tl.load(lows_below + line + k)
        least = tl.minimum(least, low)
    tl.store(sums + node, total, mask=inside)
    tl.store(lows + node, least, mask=inside)


class TritonTree(SeededTree):
    """See ``SumTree``. Leaves are float32, sums float64. Not for concurrent use."""

    backend = "triton"

    def __init__(self, capacity: int, fan_out: int, seed: int, device: torch.device) -> None:
        super().__init__(capacity, seed)
        self.fan_out = fan_out
        self._device = device
        sizes = [-(-capacity // fan_out) * fan_out]
        while sizes[-1] > fan_out:
            sizes.append(-(-sizes[-1] // fan_out // fan_out) * fan_out)
        self._leaves = torch.zeros(sizes[0], dtype=torch.float32, device=device)
        levels = [*sizes[1:], 1]  # from the leaves' parents up; the last is the root
        # where each level begins in ``_all_sums``; the root comes first there
        starts = [sum(levels[k + 1 :]) for k in range(len(levels))]
        self._all_sums = torch.zeros(sum(levels), dtype=torch.float64, device=device)
        self._all_lows = torch.full((sum(levels),), math.inf, dtype=torch.float32, device=device)
        spans = [slice(start, start + size) for start, size in zip(starts, levels, strict=True)]
        self._sums = [self._all_sums[span] for span in spans]
        self._lows = [self._all_lows[span] for span in spans]
        # the starts of the levels below the root, in the order of a search
        self._starts = torch.tensor(starts[-2::-1] or [0], dtype=torch.int64, device=device)
        self._search = {"LEVELS": len(levels) - 1, "FAN_OUT": fan_out}
        self._owner = torch.zeros(capacity, dtype=torch.int64, device=device)
        self._wrong = torch.zeros(1, dtype=torch.int64, device=device)
        self._ticket = 1
        self._root: tuple[float, float] | None = None  # (sum, least priority), once they have been read

    @property
    def priorities(self) -> Tensor:
        return self._leaves[: self.capacity]

    @property
    def total(self) -> float:
        return self._mass[0]

    @property
    def minimum(self) -> float:
        return self._mass[1]

    @property
    def _mass(self) -> tuple[float, float]:
        if self._root is None:
            total, least = torch.cat((self._sums[-1], self._lows[-1].double())).tolist()
            self._root = total, least
        return self._root

    def set(self, index: Tensor, priority: Tensor) -> None:
        if index.is_floating_point():
            raise wrong_kind(index, torch.int64)
        index = index.to(self._device, torch.int64).contiguous().view(-1)
        priority = priority.to(self._device, torch.float32).contiguous().view(-1)
        check_lengths(index, priority)
        count = len(index)
        if not count:
            return
        grid, size = gpu.block(count, _BLOCK)
        ticket = self._ticket
        self._ticket += count + 1
        with gpu.on(self._device):
            _elect[grid](index, priority, self._owner, self._wrong, ticket, count, self.capacity, BLOCK=size)
            wrong = int(self._wrong)
            if wrong > ticket:
                raise wrong_priority(index, priority, ticket + count - wrong, self.capacity)
            _write[grid](index, priority, self._owner, self._leaves, ticket, count, BLOCK=size)
            self._root = None
            below, lows_below, leaves_each = self._leaves, self._leaves, self.fan_out
            for level, (sums, lows) in enumerate(zip(self._sums, self._lows, strict=True)):
                nodes = -(-self.capacity // leaves_each)
                all_nodes = nodes <= count
                grid, size = gpu.block(min(nodes, count), _BLOCK)
                _refresh[grid](
                    index,
                    below,
                    lows_below,
                    sums,
                    lows,
                    min(nodes, count),
                    leaves_each,
                    ALL=all_nodes,
                    LEAVES=level == 0,
                    FAN_OUT=self.fan_out,
                    BLOCK=size,
                )
                below, lows_below, leaves_each = sums, lows, leaves_each * self.fan_out

    def update(self, index: Tensor, error: Tensor, alpha: float, epsilon: float) -> float:
        return super().update(index, error.to(self._device), alpha, epsilon)

    def find(self, mass: Tensor, out: Tensor | None = None) -> Tensor:
        if not self.total > 0:
            raise nothing_to_draw()
        rest = mass.to(self._device, torch.float64).contiguous().view(-1)
        if not bool(((rest >= 0) & (rest < self.total)).all()):
            raise mass_outside(self.total)
        index = torch.empty(len(rest), dtype=torch.int64, device=self._device)
        if len(rest):
            grid, size = gpu.block(len(rest), _BLOCK)
            with gpu.on(self._device):
                _find[grid](
                    rest,
                    len(rest),
                    self._all_sums,
                    self._leaves,
                    self._starts,
                    index,
                    **self._search,
                    BLOCK=size,
                    enable_fp_fusion=False,
                )
        return index if out is None else out.copy_(index)

    def sample(self, count: int, beta: float, stratified: bool = False, out: Draw | None = None) -> Draw:
        if not self.total > 0:
            raise nothing_to_draw()
        index = torch.empty(count, dtype=torch.int64, device=self._device)
        weight = torch.empty(count, dtype=torch.float32, device=self._device)
        key, first = self._stream.tolist()
        self._stream[1] += count
        if count:
            grid, size = gpu.block(count, _BLOCK)
            # a fused multiply and subtract would round the mass differently from ``_torch_tree``
            with gpu.on(self._device):
                _sample[grid](
                    key,
                    first,
                    count,
                    float(beta),
                    self._all_sums,
                    self._all_lows,
                    self._leaves,
                    self._starts,
                    index,
                    weight,
                    STRATIFIED=stratified,
                    **self._search,
                    BLOCK=size,
                    enable_fp_fusion=False,
                )
        return Draw(index, weight).copied_into(out)
