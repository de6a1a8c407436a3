"""Buffers that come back by themselves once nobody holds what they carry.

A fresh buffer of 100 MB costs more in page faults than the copy into it. So buffers are used again, and
as a vector may be kept by whoever received it, they return only when the last tensor over them is gone.
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


def _ordinary(size_bytes: int) -> Bytes:
    return np.empty(size_bytes, dtype=np.uint8)


class Pool:
    """Buffers of uint8 by size; at most ``keep`` unused ones of each size are kept.

    fresh: makes one of so many bytes.
    """

    def __init__(self, keep: int = 4, fresh: Callable[[int], Bytes] = _ordinary) -> None:
        self._keep, self._fresh = keep, fresh
        self._free: dict[int, deque[Any]] = {}

    def take(self, size_bytes: int) -> Bytes:
        """A buffer of exactly this size, with whatever it held; back in the pool when it is forgotten.

        Make tensors of it with ``as_tensor`` only: numpy's own views do not keep it from being used again.
        """
        free = self._free.setdefault(size_bytes, deque(maxlen=self._keep))
        try:
            base = free.pop()
        except IndexError:
            base = self._fresh(size_bytes)
        buffer = base[:]
        # append is atomic and takes no lock, as this may run in any thread at any time
        weakref.finalize(buffer, free.append, base).atexit = False
        return buffer  # type: ignore[no-any-return]


def as_tensor(buffer: Bytes, dtype: torch.dtype) -> Tensor:
    """[N] over the buffer's memory, which stays taken as long as the tensor or a view of it lives."""
    return torch.from_numpy(buffer).view(dtype)
