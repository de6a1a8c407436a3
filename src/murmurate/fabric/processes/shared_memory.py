"""Memory that the processes of one host share, in a file without a name, so that nothing is left behind.

All workers inherit one anonymous sparse file (``memfd``, or an unlinked temporary file where that does not
exist). The kernel frees it when the last process that holds it ends, in whatever way. ``/dev/shm`` is not
used, so its default limit of 64 MB in containers does not matter. Pages take memory only once they are
written.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import tempfile
import zlib
from multiprocessing.reduction import DupFd
from typing import Any

import numpy as np
import torch
from torch import Tensor

from murmurate.fabric.interface import FabricError

MEMORY_NAME = "murmurate"  # name of the file in /proc
_PAGE = mmap.ALLOCATIONGRANULARITY
_COMMON_BYTES = 1 << 40  # for regions that all members take; after them come zones for groups of members
_ZONE_BYTES = 1 << 38
_ZONES = 1 << 22


class SharedMemoryFile:
    """Allocates regions of the shared file, one after another.

    All members take the same regions in the same order, so they agree on the offsets without communication. A
    label in each region's header detects a member that takes other regions.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._closed = False
        self._offset = 0

    @classmethod
    def create(cls) -> SharedMemoryFile:
        if hasattr(os, "memfd_create"):
            descriptor = os.memfd_create(MEMORY_NAME, os.MFD_CLOEXEC)
        else:
            with tempfile.TemporaryFile() as file:
                descriptor = os.dup(file.fileno())
        os.ftruncate(descriptor, _COMMON_BYTES + _ZONES * _ZONE_BYTES)
        return cls(descriptor)

    def take(self, label: str, size_bytes: int) -> memoryview:
        """The next region: ``size_bytes``, zeros at first, page-aligned, shared by all members.

        Raises FabricError if another member took something else here.
        """
        length = -(-size_bytes // _PAGE) * _PAGE + _PAGE
        region = memoryview(mmap.mmap(self.descriptor, length, flags=mmap.MAP_SHARED, offset=self._offset))
        self._offset += length
        header = np.frombuffer(region[:8], dtype=np.int64)
        expected = zlib.crc32(f"{label}:{size_bytes}".encode()) + 1
        if header[0] == 0:
            header[0] = expected
        if header[0] != expected:
            raise FabricError(
                f"this member took '{label}' ({size_bytes} bytes) where another took something else. "
                "All replicas must replicate the same modules in the same order."
            )
        return region[_PAGE : _PAGE + size_bytes]

    def zone(self, label: str) -> SharedMemoryFile:
        """A separate part of the file for the members that call this with the same label; its place does not
        depend on the regions taken before."""
        digest = hashlib.blake2b(label.encode(), digest_size=8).digest()
        expected = np.frombuffer(digest, dtype=np.int64)[0] | 1
        number = int(expected) % _ZONES
        zone = SharedMemoryFile(self.descriptor)
        while True:
            zone._offset = _COMMON_BYTES + number * _ZONE_BYTES
            header = np.frombuffer(mmap.mmap(self.descriptor, _PAGE, offset=zone._offset), dtype=np.int64)
            if header[0] == 0:
                header[0] = expected
            if header[0] == expected:
                zone._offset += _PAGE
                return zone
            number = (number + 1) % _ZONES  # another label has taken that zone

    def tensors(self, label: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A region as a tensor of zeros that all members share."""
        count = int(np.prod(shape, dtype=np.int64))
        region = self.take(label, count * dtype.itemsize)
        return torch.frombuffer(region, dtype=dtype, count=count).view(shape)

    def counters(self, label: str, shape: tuple[int, ...]) -> np.ndarray:
        """A region as an int64 array of zeros that all members share."""
        count = int(np.prod(shape))
        return np.frombuffer(self.take(label, count * 8), dtype=np.int64).reshape(shape)

    def close(self) -> None:
        """Close the file, once: by the next call its descriptor may be that of another file."""
        if not self._closed:
            self._closed = True
            os.close(self.descriptor)

    def __reduce__(self) -> tuple[Any, ...]:
        """Allows this object to be sent to a process that is being started; there, regions are taken again
        from the first on."""
        return _unpickled, (DupFd(self.descriptor),)


def _unpickled(duplicate: Any) -> SharedMemoryFile:
    return SharedMemoryFile(duplicate.detach())


def open_memory(pid: int, descriptor: int, name: str, access: int = os.O_RDWR) -> int:
    """Open a ``memfd`` of another process by its descriptor there. Raises OSError, also if the file is not
    called ``name``: opening or reading a pipe or a device could block, or take data from it."""
    path = f"/proc/{pid}/fd/{descriptor}"
    if not os.readlink(path).startswith(f"/memfd:{name} "):
        raise OSError(f"descriptor {descriptor} of process {pid} is another file")
    return os.open(path, access | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
