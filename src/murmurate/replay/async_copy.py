"""Copies out of a store: at once, or by a thread that never asks for the interpreter's lock.

A thread of Python's own would: each of its calls then waits for the learner to let go of the lock, and the
learner for it, which cost more than what was copied.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from torch import Tensor

from murmurate import native

_SMALL_BYTES = 32 << 10  # a copy that takes no longer than to wake a thread is done at once


class Courier:
    """``number`` tells, for ``wait``, all that was asked for by then."""

    def __init__(self) -> None:
        if native.kernels is None:
            raise RuntimeError(f"there are no compiled kernels: {native.simd}")
        self._kernels = native.kernels
        self._thread: Any = self._kernels.courier()
        self._kept: deque[tuple[int, tuple[Tensor, ...]]] = deque()  # what is read and written until then
        self.number = 0

    def gather(self, source: Tensor, stride: int, bytes: int, index: Tensor, out: Tensor) -> None:
        """out[i] <- ``bytes`` from ``source``'s memory, from index[i] * stride on."""
        what = (source.data_ptr(), stride, bytes, index.data_ptr(), index.shape[0], out.data_ptr())
        if bytes * index.shape[0] < _SMALL_BYTES:
            self._kernels.gather(*what)
        else:
            self._keep(self._kernels.gather_later(self._thread, *what), source, index, out)

    def split(
        self, source: Tensor, stride: int, index: Tensor, places: Tensor, out: tuple[Tensor, ...]
    ) -> None:
        """out[k][i] <- the bytes of field k of the row at index[i] * stride of ``source``'s memory. places:
        [K, 2] int64, offset and bytes of each field."""
        addresses = tuple([x.data_ptr() for x in out])
        what = (source.data_ptr(), stride, index.data_ptr(), index.shape[0], places.data_ptr(), addresses)
        if stride * index.shape[0] < _SMALL_BYTES:
            self._kernels.split(*what)
        else:
            self._keep(self._kernels.split_later(self._thread, *what), source, index, places, *out)

    def _keep(self, number: int, *tensors: Tensor) -> None:
        self.number = number
        self._kept.append((number, tensors))

    def wait(self, number: int) -> None:
        self._kernels.await_courier(self._thread, number)
        while self._kept and self._kept[0][0] <= number:
            self._kept.popleft()
