"""A pool of buffers, to which each buffer returns by itself once no tensor uses its memory.

A new buffer of 100 MB costs more in page faults than the copy into it, so buffers are reused. Whoever
receives a vector may keep it, so a buffer returns only when the last tensor over its memory is gone.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Bytes = npt.NDArray[np.uint8]


def _allocate(size_bytes: int) -> Bytes:
    return np.empty(size_bytes, dtype=np.uint8)


class Pool:
    """Buffers of uint8, by size; at most ``keep`` unused buffers of each size are kept.

    allocate: makes a new buffer of the given number of bytes.
    """

    def __init__(self, keep: int = 4, allocate: Callable[[int], Bytes] = _allocate) -> None:
        self._keep, self._allocate_new = keep, allocate
        self._free: dict[int, deque[Any]] = {}

    def take(self, size_bytes: int) -> Bytes:
        """A buffer of exactly this size, with arbitrary content; it returns to the pool when it is dropped.

        Make tensors of it with ``as_tensor`` only: numpy's own views do not keep it from being used again.
        """
        free = self._free.setdefault(size_bytes, deque(maxlen=self._keep))
        try:
            base = free.pop()
        except IndexError:
            base = self._allocate_new(size_bytes)
        buffer = base[:]  # a new view: once it is gone, nothing uses the memory of ``base``
        # append is atomic and takes no lock, as this may run in any thread at any time
        weakref.finalize(buffer, free.append, base).atexit = False
        return buffer  # type: ignore[no-any-return]


def as_tensor(buffer: Bytes, dtype: torch.dtype) -> Tensor:
    """A tensor [N] over the buffer's memory, which stays in use while the tensor or a view of it lives."""
    return torch.from_numpy(buffer).view(dtype)


def as_bytes(x: Tensor) -> Tensor:
    """The contents of a tensor, uint8, on the CPU."""
    flat = x.detach().cpu().resolve_conj().resolve_neg().contiguous()
    # a single element may have any stride (0 in the gradient of a sum), but ``view`` requires 1
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)
