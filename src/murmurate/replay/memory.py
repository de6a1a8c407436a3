"""Where a replay lies: in this process, in memory that others share, or in a file larger than memory."""

from __future__ import annotations

import contextlib
import fcntl
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
            "Use a smaller --replay.capacity, or files: --replay.folder, for a folder on a disk."
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
    rest. What was in them is lost. Raises Refusal where there is no room, and if another replay lives there.
    """

    def take(label: str, size_bytes: int) -> memoryview:
        folder.mkdir(parents=True, exist_ok=True)
        free = psutil.disk_usage(str(folder)).free
        if size_bytes > free:
            raise Refusal(
                f"the replay's {label} need {size_bytes / 2**30:.1f} GiB and {folder} has "
                f"{free / 2**30:.1f} GiB left. Use a smaller capacity, or another folder."
            )
        descriptor = os.open(folder / f"{label}.bin", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            # held as long as the map is, which keeps a descriptor of its own
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(descriptor, 0)
            os.ftruncate(descriptor, max(size_bytes, 1))
            return memoryview(mmap.mmap(descriptor, max(size_bytes, 1)))
        except BlockingIOError as error:
            raise Refusal(
                f"{folder} is in use by another replay. Give each run a folder of its own."
            ) from error
        finally:
            os.close(descriptor)

    return take


def refuse_full_disk(folder: Path, size_bytes: int) -> None:
    """Raise Refusal where the disk that will hold ``folder`` has no room for so much."""
    there = next(place for place in (folder, *folder.parents) if place.exists())
    free = psutil.disk_usage(str(there)).free
    if size_bytes > free:
        raise Refusal(
            f"replays of {size_bytes / 2**30:.1f} GiB are to lie in {folder}, where {free / 2**30:.1f} GiB "
            "are left. Use a smaller --replay.capacity, or another --replay.folder."
        )


def array(take: Take, label: str, shape: tuple[int, ...], dtype: np.dtype | type) -> np.ndarray:
    """[shape] of zeros."""
    count = int(np.prod(shape, dtype=np.int64))
    room = take(label, count * np.dtype(dtype).itemsize)
    return np.frombuffer(room, dtype=dtype, count=count).reshape(shape)
