"""Where a replay lies: in this process, in memory that others share, or in a file larger than memory."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil

from murmurate.errors import Refusal

Take = Callable[[str, int], memoryview]
_PAGE = mmap.PAGESIZE


def private(label: str, size_bytes: int) -> memoryview:
    """Zeros of this process's own; pages cost memory only once they are written.

    Raises Refusal where the machine has no room for them.
    """
    free = int(psutil.virtual_memory().available)
    if size_bytes > free:
        raise Refusal(
            f"the replay's {label} need {size_bytes / 2**30:.1f} GiB and {free / 2**30:.1f} GiB are free. "
            "Use a smaller capacity, or keep them in a file."
        )
    if not hasattr(mmap, "MAP_PRIVATE"):
        return memoryview(mmap.mmap(-1, max(size_bytes, 1)))
    room = mmap.mmap(-1, max(size_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            # who reads rows at random looks up a page for each, and of small ones most are not at hand
            room.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(room)


def in_folder(folder: Path) -> Take:
    """Files of zeros below ``folder``, mapped: the system keeps in memory what is used, and writes the
    rest."""

    def take(label: str, size_bytes: int) -> memoryview:
        folder.mkdir(parents=True, exist_ok=True)
        free = psutil.disk_usage(str(folder)).free
        if size_bytes > free:
            raise Refusal(
                f"the replay's {label} need {size_bytes / 2**30:.1f} GiB and {folder} has "
                f"{free / 2**30:.1f} GiB left. Use a smaller capacity, or another folder."
            )
        descriptor = os.open(folder / f"{label}.bin", os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            os.ftruncate(descriptor, max(size_bytes, 1))
            return memoryview(mmap.mmap(descriptor, max(size_bytes, 1)))
        finally:
            os.close(descriptor)

    return take


def array(take: Take, label: str, shape: tuple[int, ...], dtype: np.dtype | type) -> np.ndarray:
    """[shape] of zeros."""
    count = int(np.prod(shape, dtype=np.int64))
    room = take(label, count * np.dtype(dtype).itemsize)
    return np.frombuffer(room, dtype=dtype, count=count).reshape(shape)
