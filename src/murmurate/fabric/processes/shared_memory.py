"""Memory that the processes of one host share, without names and so without left-overs.

One anonymous sparse file (``memfd``, or an unlinked temporary file where there is none) is inherited by
every role process. The kernel frees it with the last process that holds it, however that one dies, and
``/dev/shm`` is not involved, so a container's 64 MB default does not matter. Pages cost memory only
once they are written.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import tempfile
import threading
import zlib
from multiprocessing.reduction import DupFd
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor

from murmurate.errors import Refusal
from murmurate.fabric.interface import FabricError

_PAGE = mmap.ALLOCATIONGRANULARITY
_WHOLE_BYTES = 1 << 40  # where the regions lie that all members ask for; behind them the zones of groups
_ZONE_BYTES = 1 << 38
_ZONES = 1 << 22


class SharedMemoryFile:
    """Regions of the shared file, handed out in the order in which they are asked for.

    All members ask for the same regions in the same order, so they agree on the places without
    talking; a label in each region's header finds those who do not.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._place = 0

    @classmethod
    def create(cls) -> SharedMemoryFile:
        if hasattr(os, "memfd_create"):
            descriptor = os.memfd_create("murmurate", os.MFD_CLOEXEC)
        else:
            with tempfile.TemporaryFile() as file:
                descriptor = os.dup(file.fileno())
        os.ftruncate(descriptor, _WHOLE_BYTES + _ZONES * _ZONE_BYTES)
        return cls(descriptor)

    def take(self, label: str, size_bytes: int) -> memoryview:
        """The next region: ``size_bytes`` of zeros at first, page-aligned, shared by all members.

        Raises FabricError if another member took something else here.
        """
        length = -(-size_bytes // _PAGE) * _PAGE + _PAGE
        region = memoryview(mmap.mmap(self.descriptor, length, flags=mmap.MAP_SHARED, offset=self._place))
        self._place += length
        mark = np.frombuffer(region[:8], dtype=np.int64)
        wanted = zlib.crc32(f"{label}:{size_bytes}".encode()) + 1
        if mark[0] == 0:
            mark[0] = wanted
        if mark[0] != wanted:
            raise FabricError(
                f"this member asked for '{label}' ({size_bytes} bytes) where another asked for something "
                "else. All replicas must replicate the same modules in the same order."
            )
        return region[_PAGE : _PAGE + size_bytes]

    def apart(self, label: str) -> SharedMemoryFile:
        """A zone of its own for those who ask for this label, whatever they and others asked for before."""
        digest = hashlib.blake2b(label.encode(), digest_size=8).digest()
        wanted = np.frombuffer(digest, dtype=np.int64)[0] | 1
        number = int(wanted) % _ZONES
        zone = SharedMemoryFile(self.descriptor)
        while True:
            zone._place = _WHOLE_BYTES + number * _ZONE_BYTES
            mark = np.frombuffer(mmap.mmap(self.descriptor, _PAGE, offset=zone._place), dtype=np.int64)
            if mark[0] == 0:
                mark[0] = wanted
            if mark[0] == wanted:
                zone._place += _PAGE
                return zone
            number = (number + 1) % _ZONES  # another label lies there

    def tensors(self, label: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A region as a tensor of zeros that all members share."""
        count = int(np.prod(shape, dtype=np.int64))
        item = torch.empty(0, dtype=dtype).element_size()
        region = self.take(label, max(count * item, 1))
        return torch.frombuffer(region, dtype=dtype, count=count).view(shape)

    def counters(self, label: str, shape: tuple[int, ...]) -> np.ndarray:
        """A region as an int64 array of zeros that all members share."""
        count = int(np.prod(shape))
        return np.frombuffer(self.take(label, count * 8), dtype=np.int64).reshape(shape)

    def close(self) -> None:
        os.close(self.descriptor)

    def __reduce__(self) -> tuple[Any, ...]:
        """Travels to a process that is being started; the regions are then taken anew, in order."""
        return _received, (DupFd(self.descriptor),)


def _received(duplicate: Any) -> SharedMemoryFile:
    return SharedMemoryFile(duplicate.detach())


def fence(lock: threading.Lock) -> None:
    """A full memory barrier: a release followed by an acquire lets nothing pass, on ARM too."""
    with lock:
        pass
    with lock:
        pass


def refuse_if_small(needed_bytes: int, what: str, available_bytes: int | None = None) -> None:
    """Raise Refusal when the host cannot hold ``needed_bytes`` of shared memory."""
    if available_bytes is None:
        available_bytes = int(psutil.virtual_memory().available)
    if needed_bytes > available_bytes:
        raise Refusal(
            f"{what} needs {needed_bytes / 2**20:.0f} MiB of shared memory and "
            f"{available_bytes / 2**20:.0f} MiB are free. Use fewer replicas or a smaller network, "
            "or give the container more memory."
        )
