"""The sum tree of an FPGA in cycle-accurate simulation: draws what the hardware would draw."""

from __future__ import annotations

import math
import warnings

import torch
from torch import Tensor

from murmurate.fpga.shape import UNIFORM_BITS, TreeShape
from murmurate.fpga.simulation import SimulatedManager
from murmurate.replay._native_tree import (
    SeededTree,
    check_lengths,
    mass_outside,
    nothing_to_draw,
    wrong_priority,
)
from murmurate.replay._torch_tree import _uniform
from murmurate.replay.tree import Draw

_SCALE = 4096.0  # a priority of 1 in fixed point
_WIDTH, _FAN_OUT = 16, 4  # bits of a priority, children of a node


class FpgaTree(SeededTree):
    """See ``SumTree``. Priorities are 16-bit multiples of 1 / 4096. A positive priority is raised to at least
    1 / 4096 and limited to 16; ``saturated`` counts the priorities above 16, and the first one warns.

    Masses are drawn by the hardware from ``UNIFORM_BITS`` random bits, so ``find`` is computed on the host,
    and a priority below total / 2^24 may never be drawn. The number of leaves is ``capacity`` rounded up to a
    power of two.
    """

    backend = "fpga"

    def __init__(self, capacity: int, seed: int) -> None:
        super().__init__(capacity, seed)
        self.fan_out = _FAN_OUT
        leaves = max(2 * _FAN_OUT, 1 << (capacity - 1).bit_length())
        self.manager = SimulatedManager(TreeShape(leaves, _FAN_OUT, _WIDTH))
        self.saturated = 0
        self._fixed = torch.zeros(capacity, dtype=torch.int64, device="cpu")  # priorities in fixed point

    @property
    def priorities(self) -> Tensor:
        return (self._fixed / _SCALE).float()

    @property
    def total(self) -> float:
        return self.manager.total / _SCALE

    @property
    def minimum(self) -> float:
        positive = self._fixed[self._fixed > 0]
        return float(positive.min()) / _SCALE if len(positive) else math.inf

    def set(self, index: Tensor, priority: Tensor) -> None:
        index, priority = index.view(-1).cpu(), priority.view(-1).float().cpu()
        check_lengths(index, priority)
        valid = (index >= 0) & (index < self.capacity) & (priority >= 0) & (priority < math.inf)
        if not bool(valid.all()):
            raise wrong_priority(index, priority, int((~valid).nonzero()[0]), self.capacity)
        greatest = (1 << _WIDTH) - 1
        rounded = (priority.double() * _SCALE).round()
        saturated = int((rounded > greatest).sum())
        if saturated and not self.saturated:
            warnings.warn(
                f"a priority is {float(priority.max()):g}, and the FPGA's replay limits them to 16. Use a "
                "smaller --replay.alpha or smaller rewards, or --replay.manager host.",
                stacklevel=2,
            )
        self.saturated += saturated
        fixed = torch.where(priority > 0, rounded.clamp(1, greatest).long(), 0)
        self.manager.update(index.tolist(), fixed.tolist())
        for i, value in zip(index.tolist(), fixed.tolist(), strict=True):  # the last of equal indices wins
            self._fixed[i] = value

    def find(self, mass: Tensor, out: Tensor | None = None) -> Tensor:
        if not self.total > 0:
            raise nothing_to_draw()
        mass = mass.view(-1).double()
        if not bool(((mass >= 0) & (mass < self.total)).all()):
            raise mass_outside(self.total)
        index = torch.searchsorted(self._fixed.cumsum(0).double() / _SCALE, mass, right=True)
        return index if out is None else out.copy_(index)

    def sample(self, count: int, beta: float, stratified: bool = False, out: Draw | None = None) -> Draw:
        if not self.total > 0:
            raise nothing_to_draw()
        u = _uniform(int(self._stream[0]), int(self._stream[1]), count)
        self._stream[1] += count
        if stratified:
            u = (u + torch.arange(count, dtype=torch.float64, device="cpu")) / count
        bits = (u * (1 << UNIFORM_BITS)).long().clamp(max=(1 << UNIFORM_BITS) - 1)
        drawn = self.manager.sample(bits.tolist())
        index = torch.tensor([leaf for leaf, _, _ in drawn], dtype=torch.int64, device="cpu")
        weight = ((self._fixed[index].double() / _SCALE / self.minimum).clamp(min=1.0) ** -beta).float()
        return Draw(index, weight).copied_into(out)
