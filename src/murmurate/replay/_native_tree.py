"""The compiled sum tree; ``native/kernels.hpp`` describes its memory layout."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from murmurate import native
from murmurate.replay.tree import NATIVE_FAN_OUT, Draw

_LINE_BYTES = 64


class SeededTree(ABC):
    """What all trees have in common (see ``SumTree``)."""

    def __init__(self, capacity: int, seed: int) -> None:
        self.capacity = capacity
        # key and counter of the random numbers
        self._stream = torch.tensor([seed, 0], dtype=torch.int64, device="cpu")

    @property
    @abstractmethod
    def priorities(self) -> Tensor: ...

    @abstractmethod
    def set(self, index: Tensor, priority: Tensor) -> None: ...

    def update(self, index: Tensor, error: Tensor, alpha: float, epsilon: float) -> float:
        priority = to_priority(error, alpha, epsilon)
        self.set(index, priority)
        return float(priority.max()) if len(priority) else 0.0

    def state(self) -> dict[str, Any]:
        return {"priorities": self.priorities.to("cpu", copy=True), "stream": self._stream.clone()}

    def load(self, state: dict[str, Any]) -> None:
        self.set(torch.arange(self.capacity, device="cpu"), state["priorities"])
        self._stream.copy_(state["stream"])


class NativeTree(SeededTree):
    """See ``SumTree``. Calls release the GIL, so several trees of one process can run in parallel.

    A kernel returns None for tensors that it cannot read as they are, such as those of another dtype; it is
    then called again with the addresses of converted tensors.
    """

    backend = "native"
    fan_out = NATIVE_FAN_OUT

    def __init__(
        self, capacity: int, seed: int = 0, memory: memoryview | None = None, threads: int = 1
    ) -> None:
        super().__init__(capacity, seed)
        self._kernels, self._threads = _compiled(), threads
        needed = self.bytes_needed(capacity)
        if memory is None:
            buffer = np.zeros(needed + _LINE_BYTES, dtype=np.uint8)
            start = -buffer.ctypes.data % _LINE_BYTES
            self._memory = buffer[start : start + needed]
        else:
            self._memory = np.frombuffer(memory, dtype=np.uint8, count=needed)
        # an initialized tree is never all zeros: the minimum of an empty node is stored as infinity
        fresh = not self._memory.any()
        self._tree = self._kernels.tree(self._memory.ctypes.data, capacity, fresh)
        offset = self._kernels.leaves(self._tree) - self._memory.ctypes.data
        leaves = self._memory[offset : offset + 4 * capacity]
        self._priorities = torch.from_numpy(leaves).view(torch.float32)
        self._stream_address = self._stream.data_ptr()

    @staticmethod
    def bytes_needed(capacity: int) -> int:
        return int(_compiled().tree_bytes(capacity))

    @property
    def priorities(self) -> Tensor:
        return self._priorities

    @property
    def total(self) -> float:
        return float(self._kernels.total(self._tree))

    @property
    def minimum(self) -> float:
        return float(self._kernels.minimum(self._tree))

    def set(self, index: Tensor, priority: Tensor) -> None:
        wrong = self._kernels.set(self._tree, index, priority, 0)
        if wrong is None:
            index, priority = as_pair(index, priority)
            wrong = self._kernels.set(self._tree, index.data_ptr(), priority.data_ptr(), index.numel())
        if wrong != -1:
            raise wrong_priority(index, priority, wrong, self.capacity)

    def update(self, index: Tensor, error: Tensor, alpha: float, epsilon: float) -> float:
        greatest: float | None = self._kernels.update(self._tree, index, error, 0, alpha, epsilon)
        if greatest is None:
            index, error = as_pair(index, error)
            greatest = self._kernels.update(
                self._tree, index.data_ptr(), error.data_ptr(), index.numel(), alpha, epsilon
            )
        if greatest < 0.0:  # -1 minus the position of a wrong priority
            priority = to_priority(error, alpha, epsilon)
            raise wrong_priority(index, priority, int(-1.0 - greatest), self.capacity)
        return greatest

    def find(self, mass: Tensor, out: Tensor | None = None) -> Tensor:
        index = self._stream.new_empty(mass.numel()) if out is None else out
        inside = self._kernels.find(self._tree, mass, 0, index, self._threads)
        if inside is None:
            mass = as_vector(mass, torch.float64)
            check_out(index, torch.int64, mass.numel())
            inside = self._kernels.find(
                self._tree, mass.data_ptr(), mass.numel(), index.data_ptr(), self._threads
            )
        if not self._kernels.total(self._tree) > 0.0:
            raise nothing_to_draw()
        if not inside:
            raise mass_outside(self.total)
        return index

    def sample(self, count: int, beta: float, stratified: bool = False, out: Draw | None = None) -> Draw:
        if out is None:
            # new_empty is a third cheaper than torch.empty with dtype and device
            out = Draw(self._stream.new_empty(count), self._priorities.new_empty(count))
        index, weight = out
        drawn = self._kernels.sample(
            self._tree, self._stream_address, count, beta, index, weight, stratified, self._threads
        )
        if drawn is None:
            check_out(index, torch.int64, count)
            check_out(weight, torch.float32, count)
            addresses = (index.data_ptr(), weight.data_ptr())
            drawn = self._kernels.sample(
                self._tree, self._stream_address, count, beta, *addresses, stratified, self._threads
            )
        if not drawn:
            raise nothing_to_draw()
        return out


def _compiled() -> Any:
    if native.kernels is None:
        raise RuntimeError(f"there are no compiled kernels: {native.simd}")
    return native.kernels


def as_vector(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x`` [B] as ``dtype``, contiguous and on the CPU. Raises TypeError for integers in place of
    floating-point numbers, or the reverse."""
    if x.dtype is dtype and x.is_cpu and x.is_contiguous():
        return x
    if x.is_floating_point() != dtype.is_floating_point:
        raise wrong_kind(x, dtype)
    return x.to("cpu", dtype).contiguous()


def wrong_kind(x: Tensor, dtype: torch.dtype) -> TypeError:
    return TypeError(f"expected a tensor of {dtype}, this is {x.dtype}")


def as_pair(index: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Both [B], as int64 and float32, in the layout that the kernels read."""
    index, values = as_vector(index, torch.int64), as_vector(values, torch.float32)
    check_lengths(index, values)
    return index, values


def check_lengths(index: Tensor, values: Tensor) -> None:
    if index.numel() != values.numel() or index.dim() != 1 or values.dim() != 1:
        raise ValueError(f"{list(index.shape)} indices and {list(values.shape)} values: give one for each")


def check_out(out: Tensor, dtype: torch.dtype, count: int) -> None:
    """Raise ValueError for a tensor that the kernels cannot write draws into."""
    if out.dtype is not dtype or out.shape != (count,) or not (out.is_cpu and out.is_contiguous()):
        raise ValueError(
            f"{count} draws need a contiguous tensor of {dtype} [{count}] on the CPU, but this is "
            f"{out.dtype} {list(out.shape)} on {out.device}"
        )


def to_priority(error: Tensor, alpha: float, epsilon: float) -> Tensor:
    """(|error| + epsilon) ** alpha; what is not finite stays so, although its power of 0 would be 1."""
    x = error.detach().abs() + epsilon
    return torch.where(x.isfinite(), x**alpha, x)


def wrong_priority(index: Tensor, priority: Tensor, at: int, capacity: int) -> ValueError:
    i, p = int(index[at]), float(priority[at])
    if not 0 <= i < capacity:
        return ValueError(f"there is no index {i} in a tree of {capacity}")
    return ValueError(f"the priority of index {i} is {p}: priorities are finite and not negative")


def mass_outside(total: float) -> ValueError:
    return ValueError(f"masses must lie between 0 and the total, {total}, and some do not")


def nothing_to_draw() -> ValueError:
    return ValueError(
        "there is nothing to draw: no priority is above zero, or their sum is not finite. Insert something."
    )
