"""Copies out of a store: in the calling thread, or in a native thread that never takes the GIL.

A Python thread would need the GIL: its calls and the learner's would then wait for each other, which costs
more time than the copies.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from torch import Tensor

from murmurate import native

_SMALL_BYTES = 32 << 10  # a smaller copy takes no longer than waking a thread, and is made at once


class AsyncCopy:
    """Copies of ``_SMALL_BYTES`` or more are queued, and made in the order of the calls; smaller ones are
    complete when the call returns. ``number``: of the latest queued copy, for ``wait``; 0: there is none."""

    def __init__(self) -> None:
        if native.kernels is None:
            raise RuntimeError(f"there are no compiled kernels: {native.simd}")
        self._kernels = native.kernels
        self._thread: Any = self._kernels.background_thread()
        # (number of a copy, tensors that must stay alive until it is complete)
        self._kept: deque[tuple[int, tuple[Tensor, ...]]] = deque()
        self.number = 0

    def gather(self, source: Tensor, stride: int, bytes: int, index: Tensor, out: Tensor) -> None:
        """out[i] <- ``bytes`` from ``source``'s memory, from index[i] * stride on."""
        arguments = (source.data_ptr(), stride, bytes, index.data_ptr(), index.shape[0], out.data_ptr())
        if bytes * index.shape[0] < _SMALL_BYTES:
            self._kernels.gather(*arguments)
        else:
            self._keep(self._kernels.gather_later(self._thread, *arguments), source, index, out)

    def split(
        self, source: Tensor, stride: int, index: Tensor, fields: Tensor, out: tuple[Tensor, ...]
    ) -> None:
        """out[k][i] <- the bytes of field k of the row at index[i] * stride of ``source``'s memory. fields:
        [K, 2] int64, offset and size in bytes of each field."""
        addresses = tuple([x.data_ptr() for x in out])
        arguments = (
            source.data_ptr(),
            stride,
            index.data_ptr(),
            index.shape[0],
            fields.data_ptr(),
            addresses,
        )
        if stride * index.shape[0] < _SMALL_BYTES:
            self._kernels.split(*arguments)
        else:
            self._keep(self._kernels.split_later(self._thread, *arguments), source, index, fields, *out)

    def _keep(self, number: int, *tensors: Tensor) -> None:
        self.number = number
        self._kept.append((number, tensors))

    def wait(self, number: int) -> None:
        """Block until copy ``number`` and all before it are complete."""
        self._kernels.await_background_thread(self._thread, number)
        while self._kept and self._kept[0][0] <= number:
            self._kept.popleft()
