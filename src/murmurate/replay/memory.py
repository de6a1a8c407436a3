"""Memory of a replay: private to this process, in memory-mapped files, which may exceed the host's memory, or
on a device."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import torch

from murmurate.errors import Refusal, cause_of

Allocate = Callable[[str, int], memoryview]


def private(label: str, size_bytes: int) -> memoryview:
    """Zeroed memory of this process; pages are allocated when they are first written.

    Raises Refusal if not enough memory is free.
    """
    free = int(psutil.virtual_memory().available)
    if size_bytes > free:
        raise Refusal(
            f"the replay's {label} need {size_bytes / 2**30:.1f} GiB but {free / 2**30:.1f} GiB are free. "
            "Use a smaller --replay.capacity, or keep the replay in files on a disk: --replay.folder FOLDER."
        )
    buffer = mmap.mmap(-1, max(size_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            # random reads of rows miss the TLB less often with huge pages
            buffer.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(buffer)


def in_folder(folder: Path) -> Allocate:
    """Allocates zeroed, memory-mapped files below ``folder``, overwriting existing ones. Raises Refusal if
    the disk has not enough space, and if another replay uses the folder.
    """

    def allocate(label: str, size_bytes: int) -> memoryview:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / f"{label}.bin", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            # the mapping keeps its own duplicate of the descriptor, and with it the lock
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(descriptor, 0)  # also frees the disk that an earlier replay took
            free = psutil.disk_usage(str(folder)).free
            if size_bytes > free:
                raise Refusal(
                    f"the replay's {label} need {size_bytes / 2**30:.1f} GiB and {folder} has "
                    f"{free / 2**30:.1f} GiB left. Use a smaller capacity, or another folder."
                )
            os.ftruncate(descriptor, max(size_bytes, 1))
            return memoryview(mmap.mmap(descriptor, max(size_bytes, 1)))
        except BlockingIOError as error:
            raise Refusal(
                f"{folder} is in use by another replay. Give each run a folder of its own."
            ) from error
        finally:
            os.close(descriptor)

    return allocate


def refuse_full_disk(folder: Path, size_bytes: int) -> None:
    """Raise Refusal if ``folder`` (which may not exist yet) cannot be written to, or its disk has less than
    ``size_bytes`` free; files of earlier replays there count as free, as they are overwritten."""
    try:
        existing = next(path for path in (folder, *folder.parents) if path.exists())
        free = psutil.disk_usage(str(existing)).free
        for files in ("replica-*/*.bin", "shard-*/replica-*/*.bin"):
            free += sum(512 * path.stat().st_blocks for path in folder.glob(files))
    except OSError as error:
        raise Refusal(f"replay.folder cannot be used: {cause_of(error)}. Name another folder.") from error
    if not (existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)):
        raise Refusal(
            f"replay.folder is {folder}, and {existing} is not a folder that can be written to. Name another."
        )
    if size_bytes > free:
        raise Refusal(
            f"the replays need {size_bytes / 2**30:.1f} GiB and {folder} has {free / 2**30:.1f} GiB left. "
            "Use a smaller --replay.capacity, or another --replay.folder."
        )


def array(allocate: Allocate, label: str, shape: tuple[int, ...], dtype: np.dtype | type) -> np.ndarray:
    """Zeros [shape] in memory from ``allocate``."""
    count = int(np.prod(shape, dtype=np.int64))
    buffer = allocate(label, count * np.dtype(dtype).itemsize)
    return np.frombuffer(buffer, dtype=dtype, count=count).reshape(shape)


def on_device(device: torch.device, label: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Zeros [shape] uint8 in a device's memory. Raises Refusal if a GPU has too little free memory."""
    size_bytes = int(np.prod(shape, dtype=np.int64))
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
        if size_bytes > free:
            raise Refusal(
                f"the replay's {label} need {size_bytes / 2**30:.1f} GiB but {device} has "
                f"{free / 2**30:.1f} GiB free. Use a smaller --replay.capacity, or --replay.images host."
            )
    return torch.zeros(shape, dtype=torch.uint8, device=device)
