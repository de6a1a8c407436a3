"""Memory that the processes of one host share, in a file without a name, so that nothing is left behind.

All workers inherit one anonymous sparse file (``memfd``, or on systems without it an unlinked temporary file,
which is also written to the disk). The kernel frees it when the last process that holds it ends, in whatever
way. ``/dev/shm`` is not used, so its default limit of 64 MB in containers does not matter. Pages take memory
only once they are written.
"""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
import tempfile
import zlib
from multiprocessing.reduction import DupFd
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from murmurate.errors import Refusal, cause_of
from murmurate.fabric.interface import FabricError
from murmurate.native.system_calls import unnamed_file

MEMORY_NAME = "murmurate"  # name of the file in /proc
_PAGE = mmap.ALLOCATIONGRANULARITY
_COMMON_BYTES = 1 << 40  # for regions that all members take; after them come zones for groups of members


class _Zones(NamedTuple):
    """The zones of a file: their number, and the bytes of each."""

    number: int
    size_bytes: int

    @property
    def file_bytes(self) -> int:
        return _COMMON_BYTES + self.number * self.size_bytes


_LARGE = _Zones(1 << 22, 1 << 38)
_SMALL = _Zones(1 << 7, 1 << 36)  # a file of 9 TiB: ext4 has none of more than 16


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
        """A new file. Raises Refusal where the system allows none of its size."""
        descriptor = -1
        try:
            descriptor = unnamed_file(MEMORY_NAME)
            try:
                os.ftruncate(descriptor, _LARGE.file_bytes)
            except OSError:
                os.ftruncate(descriptor, _SMALL.file_bytes)
        except OSError as error:
            if descriptor >= 0:
                os.close(descriptor)
            raise Refusal(
                f"Processes cannot share memory here: {cause_of(error)}. They need a sparse file of "
                f"{_SMALL.file_bytes >> 40} TiB, which takes up only what is written to it. Allow files of "
                f"that size (ulimit -f unlimited), or set TMPDIR, now {tempfile.gettempdir()}, to a folder "
                "on another disk."
            ) from error
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
        depend on the regions taken before. Raises FabricError if none is free."""
        # so that two processes do not find the same zone free; threads of one process make no zones at once
        fcntl.lockf(self.descriptor, fcntl.LOCK_EX)
        try:
            return self._zone(label)
        finally:
            fcntl.lockf(self.descriptor, fcntl.LOCK_UN)

    def _zone(self, label: str) -> SharedMemoryFile:
        digest = hashlib.blake2b(label.encode(), digest_size=8).digest()
        expected = np.frombuffer(digest, dtype=np.int64)[0] | 1
        zones = _LARGE if os.fstat(self.descriptor).st_size >= _LARGE.file_bytes else _SMALL
        number = int(expected) % zones.number
        zone = SharedMemoryFile(self.descriptor)
        for _ in range(zones.number):
            zone._offset = _COMMON_BYTES + number * zones.size_bytes
            header = np.frombuffer(mmap.mmap(self.descriptor, _PAGE, offset=zone._offset), dtype=np.int64)
            if header[0] == 0:
                header[0] = expected
            if header[0] == expected:
                zone._offset += _PAGE
                return zone
            number = (number + 1) % zones.number  # another label has taken that zone
        raise FabricError(
            f"all {zones.number} zones of the shared memory are taken. Use fewer groups of replicas."
        )

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
