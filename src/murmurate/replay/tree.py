"""What a sum tree offers, and what it draws."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

NATIVE_FAN_OUT = 16


class Draw(NamedTuple):
    """indices: [B] int64. weights: [B] float32, (p / least positive p) ** -beta, so at most 1."""

    indices: Tensor
    weights: Tensor

    def copied_into(self, out: Draw | None) -> Draw:
        """``out`` with the values of this draw; without ``out`` this draw itself."""
        if out is None:
            return self
        out.indices.copy_(self.indices)
        out.weights.copy_(self.weights)
        return out


def empty_draw(count: int) -> Draw:
    """Tensors for ``sample`` to write into, whatever torch's default dtype and device are."""
    indices = torch.empty(count, dtype=torch.int64, device="cpu")
    return Draw(indices, torch.empty(count, dtype=torch.float32, device="cpu"))


class SumTree(Protocol):
    """Priorities p_0 .. p_{capacity - 1}, zero at first. A priority of zero is never drawn.

    Only one process may write to a tree in shared memory; any number may read it meanwhile, and each priority
    they read is either the old or the new one.
    """

    capacity: int
    fan_out: int
    backend: str

    @property
    def priorities(self) -> Tensor:
        """[capacity] float32, a view; not to be written to."""
        ...

    @property
    def total(self) -> float: ...

    @property
    def minimum(self) -> float:
        """The least positive priority; inf if there is none."""
        ...

    def set(self, index: Tensor, priority: Tensor) -> None:
        """p[index] <- priority, both [B]; the last of equal indices wins.

        Raises ValueError, naming index and value, for a priority that is negative or not finite, or an index
        out of range, before any change.
        """
        ...

    def update(self, index: Tensor, error: Tensor, alpha: float, epsilon: float) -> float:
        """p[index] <- (|error| + epsilon) ** alpha (Schaul et al. 2016, proportional), both [B]; raises as
        ``set``. Returns the greatest of these priorities."""
        ...

    def find(self, mass: Tensor, out: Tensor | None = None) -> Tensor:
        """[B] int64: for each mass [B] float64 in [0, total) the least i with p_0 + .. + p_i > mass.

        out: [B] int64, contiguous, to be written into. Raises ValueError for a mass that is not in
        [0, total), and if all priorities are zero.
        """
        ...

    def sample(self, count: int, beta: float, stratified: bool = False, out: Draw | None = None) -> Draw:
        """``count`` draws, each with probability p_i / total; stratified: one from each of ``count`` equal
        parts of the total.

        out: tensors to write into; None allocates new ones. Raises ValueError if all priorities are zero.
        """
        ...

    def state(self) -> dict[str, Any]:
        """Priorities and the stream of random numbers (tensors and plain values)."""
        ...

    def load(self, state: dict[str, Any]) -> None: ...
