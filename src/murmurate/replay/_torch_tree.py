"""The sum tree in plain torch: any fan-out, any device that has float64."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from murmurate.replay._native_tree import (
    SeededTree,
    check_lengths,
    mass_outside,
    nothing_to_draw,
    wrong_kind,
    wrong_priority,
)
from murmurate.replay.tree import Draw


class TorchTree(SeededTree):
    """See ``SumTree``. Leaves are float32, sums float64. On a CPU a node's children are added in their order;
    on other devices torch may add them in another order."""

    backend = "torch"

    def __init__(self, capacity: int, fan_out: int, seed: int, device: torch.device) -> None:
        super().__init__(capacity, seed)
        self.fan_out = fan_out
        self._device = device
        sizes = [-(-capacity // fan_out) * fan_out]
        while sizes[-1] > fan_out:
            sizes.append(-(-sizes[-1] // fan_out // fan_out) * fan_out)
        self._leaves = torch.zeros(sizes[0], dtype=torch.float32, device=device)
        # levels from the leaves' parents up; the last one holds the root's children
        self._sums = [torch.zeros(size, dtype=torch.float64, device=device) for size in sizes[1:]]
        self._least = [
            torch.full((size,), math.inf, dtype=torch.float32, device=device) for size in sizes[1:]
        ]

    @property
    def priorities(self) -> Tensor:
        return self._leaves[: self.capacity]

    @property
    def total(self) -> float:
        return float((self._sums[-1] if self._sums else self._leaves.double()).cumsum(0)[-1])

    @property
    def minimum(self) -> float:
        return float((self._least[-1] if self._least else _positive(self._leaves)).min())

    def set(self, index: Tensor, priority: Tensor) -> None:
        if index.is_floating_point():
            raise wrong_kind(index, torch.int64)
        index = index.to(self._device, torch.int64).view(-1)  # torch takes uint8 for a mask
        priority = priority.detach().to(self._device, torch.float32).view(-1)
        check_lengths(index, priority)
        valid = (index >= 0) & (index < self.capacity) & (priority >= 0) & (priority < math.inf)
        if not bool(valid.all()):
            raise wrong_priority(index, priority, int((~valid).nonzero()[0]), self.capacity)
        # torch does not define the order of writes to equal indices: keep only the last of each
        ordered, order = index.sort(stable=True)
        last = torch.ones_like(ordered, dtype=torch.bool)
        torch.ne(ordered[1:], ordered[:-1], out=last[:-1])
        self._leaves[ordered[last]] = priority[order[last]]
        self._refresh(index)

    def _refresh(self, index: Tensor) -> None:
        """Recompute all sums above ``index`` from their children, level by level."""
        below = self._leaves
        for level, (sums, lows) in enumerate(zip(self._sums, self._least, strict=True)):
            index = torch.unique(torch.div(index, self.fan_out, rounding_mode="floor"))
            children = below.view(-1, self.fan_out)[index]
            sums[index] = children.to(sums.dtype).cumsum(1)[:, -1]
            low = _positive(children) if level == 0 else self._least[level - 1].view(-1, self.fan_out)[index]
            lows[index] = low.amin(1)
            below = sums

    def find(self, mass: Tensor, out: Tensor | None = None) -> Tensor:
        if not self.total > 0:
            raise nothing_to_draw()
        rest = mass.to(self._device, torch.float64).view(-1)
        if not bool(((rest >= 0) & (rest < self.total)).all()):
            raise mass_outside(self.total)
        node = self._search(rest)
        return node if out is None else out.copy_(node)

    def _search(self, rest: Tensor) -> Tensor:
        """The leaf at each mass ``rest`` [B], which each level reduces to what remains within a child."""
        node = torch.zeros(len(rest), dtype=torch.int64, device=self._device)
        for level in [*reversed(self._sums), self._leaves]:
            children = level.view(-1, self.fan_out)[node].double()
            cumulated = children.cumsum(1)
            # a mass beyond all children by rounding goes to the last child that is not empty
            numbers = torch.arange(self.fan_out, device=self._device)
            last = torch.where(children > 0, numbers, -1).amax(1)
            child = torch.minimum((cumulated <= rest[:, None]).sum(1), last)
            before = cumulated.gather(1, (child - 1).clamp(min=0)[:, None])[:, 0]
            rest = torch.where(child > 0, rest - before, rest)
            node = node * self.fan_out + child
        return node

    def sample(self, count: int, beta: float, stratified: bool = False, out: Draw | None = None) -> Draw:
        total = self.total
        if not total > 0:
            raise nothing_to_draw()
        u = _uniform(int(self._stream[0]), int(self._stream[1]), count).to(self._device)
        self._stream[1] += count
        if stratified:
            u = (u + torch.arange(count, dtype=torch.float64, device=self._device)) / count
        index = self._search(u * total)  # the product may round up to the total itself
        weight = (self._leaves[index] / self.minimum).clamp(min=1.0) ** -beta
        return Draw(index, weight).copied_into(out)


def _positive(x: Tensor) -> Tensor:
    """``x`` with inf in place of 0, for minima."""
    return torch.where(x > 0, x, math.inf)


# constants of SplitMix64
_INCREMENT, _FACTOR_1, _FACTOR_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def _signed(x: int) -> int:
    """The int64 with the bits of a uint64."""
    x &= (1 << 64) - 1
    return x - (1 << 64) if x >> 63 else x


def _shifted(x: Tensor, by: int) -> Tensor:
    """A right shift of 64 bits that fills with zeros; torch's fills with the sign."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def _uniform(key: int, first: int, count: int) -> Tensor:
    """[count] float64 in [0, 1): the outputs of SplitMix64 from number ``first`` on (Steele et al. 2014)."""
    z = torch.arange(count, dtype=torch.int64, device="cpu") + first
    z = z * _signed(_INCREMENT) + _signed(key)
    z = (z ^ _shifted(z, 30)) * _signed(_FACTOR_1)
    z = (z ^ _shifted(z, 27)) * _signed(_FACTOR_2)
    z = z ^ _shifted(z, 31)
    return _shifted(z, 11).double() * 2.0**-53
