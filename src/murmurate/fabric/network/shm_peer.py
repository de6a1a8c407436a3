"""Shared memory between members of the network fabric that are on one host.

A connection over loopback copies a vector into the kernel and out of it again. So each member has one
anonymous, sparse shared-memory file that a *local peer* (a member on the same host, started by the same user)
opens through ``/proc`` and maps in parts: registers and mail are stored there (``shm_channel``). Each vector
of a collective has a file of its own; the connection carries only its header and address. Addresses are sent
over authenticated connections, so only members learn of them.

The handshake finds out whether two members are local peers, by trying to read the file: it begins with its
member's incarnation, which no other process has. A peer keeps the file open, so it can read what a member
left there even after that member has ended.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import resource
import struct
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from murmurate.buffers import Bytes
from murmurate.fabric.processes.shared_memory import open_memory
from murmurate.native.system_calls import memfd

_MIN_REGION_BYTES = 64 << 10  # sending fewer bytes is faster than mapping them
_MAX_REGIONS = 64  # of one member; each needs two file descriptors, as mmap duplicates the one it gets
_MAX_CACHED_REGIONS = 32  # regions of one peer that stay mapped
_POPULATE = getattr(mmap, "MAP_POPULATE", 0)  # map all pages at once instead of each by a page fault

_MEMORY, _VECTOR = "murmurate-memory", "murmurate-vector"  # names of our files in /proc
_MEMORY_BYTES = 1 << 40
_PAGE = mmap.ALLOCATIONGRANULARITY


class RegionAddress(NamedTuple):
    """Where another process finds a region: its descriptor in the owner's process, inode and length."""

    descriptor: int
    inode: int
    size_bytes: int

    def pack(self) -> bytes:
        return ADDRESS.pack(*self)


ADDRESS = struct.Struct("<IQQ")


class Region(np.ndarray[Any, Any]):
    """An array [N] of uint8 over a whole shared-memory file, which contains one vector of a collective (for
    registers and mail see ``MemoryRange``).

    ``address``: address of the whole region; None for a slice of it.
    """

    address: RegionAddress | None = None

    def __array_finalize__(self, viewed: Any) -> None:
        address = getattr(viewed, "address", None)
        self.address = address if address is not None and address.size_bytes == self.nbytes else None


class MemoryRange(NamedTuple):
    """A page-aligned range of the one large, sparse file that each member has."""

    start: int
    size_bytes: int


class ShmOwner:
    """A member's own shared memory: its file, and buffers that local peers can read.

    Without ``memfd`` or ``/proc`` the buffers are ordinary ones, and the member has no local peers.
    """

    def __init__(self, incarnation: bytes) -> None:
        self._regions: set[int] = set()  # descriptors
        self._unreadable: set[bytes] = set()  # incarnations whose memory could not be mapped after all
        # ids of the ranges that are mapped now, of this member and of peers; each takes a file descriptor
        self._mapped_ranges: set[int] = set()
        self._max_mapped_ranges = _descriptor_limit() // 2
        self._lock = threading.Lock()
        self._end = _PAGE  # of the allocated ranges; the first page contains the incarnation
        self.descriptor = -1
        if os.path.isdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                self.descriptor = memfd(_MEMORY)
        if self.descriptor >= 0:
            os.ftruncate(self.descriptor, _MEMORY_BYTES)
            os.write(self.descriptor, incarnation)
            weakref.finalize(self, os.close, self.descriptor).atexit = False

    def allocate(self, size_bytes: int) -> tuple[Bytes, MemoryRange]:
        """Zeros [size_bytes] that local peers can map, and their range in the file. Raises OSError."""
        with self._lock:
            where = MemoryRange(self._end, size_bytes)
            self._end += -(-size_bytes // _PAGE) * _PAGE
        return self.map(self.descriptor, where), where

    def release(self, where: MemoryRange) -> None:
        """Give the pages of an unused range back to the system."""
        with contextlib.suppress(OSError):
            with mmap.mmap(self.descriptor, where.size_bytes, offset=where.start) as memory:
                memory.madvise(mmap.MADV_REMOVE)

    def map(self, descriptor: int, where: MemoryRange) -> Bytes:
        """Map a range of a member's file, [where.size_bytes], writable. Raises OSError."""
        start, size_bytes = where
        if start < _PAGE or start % _PAGE or not 0 < size_bytes <= _MEMORY_BYTES - start:
            raise OSError(
                f"range [{start}, {start + size_bytes}) is not page-aligned or lies outside "
                "the shared-memory file"
            )
        if len(self._mapped_ranges) >= self._max_mapped_ranges:
            count = len(self._mapped_ranges)
            raise OSError(f"too many mapped ranges ({count}): the limit is half of RLIMIT_NOFILE")
        memory = mmap.mmap(descriptor, size_bytes, flags=mmap.MAP_SHARED, offset=start)
        self._mapped_ranges.add(id(memory))
        weakref.finalize(memory, self._mapped_ranges.discard, id(memory)).atexit = False
        return np.frombuffer(memory, dtype=np.uint8)

    def new_buffer(self, size_bytes: int) -> Bytes:
        """A ``Region`` if the size is worth one and the system provides it, else an ordinary array."""
        if self.descriptor < 0 or size_bytes < _MIN_REGION_BYTES or len(self._regions) >= _MAX_REGIONS:
            return np.empty(size_bytes, dtype=np.uint8)
        try:
            return self._new_region(size_bytes)
        except OSError:  # too many open files, for example
            return np.empty(size_bytes, dtype=np.uint8)

    def _new_region(self, size_bytes: int) -> Bytes:
        descriptor = memfd(_VECTOR)
        try:
            os.ftruncate(descriptor, size_bytes)
            memory = mmap.mmap(descriptor, size_bytes, flags=mmap.MAP_SHARED | _POPULATE)
        except OSError:
            os.close(descriptor)
            raise
        region = np.frombuffer(memory, dtype=np.uint8).view(Region)
        region.address = RegionAddress(descriptor, os.fstat(descriptor).st_ino, size_bytes)
        self._regions.add(descriptor)
        weakref.finalize(region, self._close_region, descriptor).atexit = False
        return region

    def _close_region(self, descriptor: int) -> None:
        self._regions.discard(descriptor)  # atomic: this may run in any thread at any time
        os.close(descriptor)

    def open_peer(self, pid: int, descriptor: int, incarnation: bytes) -> ShmPeer | None:
        """The memory of the member that claims to be process ``pid``; None if it cannot be opened here."""
        if self.descriptor < 0 or descriptor < 0 or incarnation in self._unreadable:
            return None
        try:
            memory = open_memory(pid, descriptor, _MEMORY)
        except OSError:
            return None
        peer = ShmPeer(self, pid, memory, lambda: self._unreadable.add(incarnation))
        try:
            is_theirs = os.pread(memory, len(incarnation), 0) == incarnation
            is_theirs = is_theirs and os.fstat(memory).st_size == _MEMORY_BYTES
        except OSError:
            is_theirs = False
        return peer if is_theirs else None


class ShmPeer:
    """The memory of a local peer. memory: descriptor of its file, here. on_failure: called when a region of
    the peer cannot be mapped after all."""

    def __init__(self, owner: ShmOwner, pid: int, memory: int, on_failure: Callable[[], None]) -> None:
        self._owner, self._pid, self._memory, self._on_failure = owner, pid, memory, on_failure
        self._cached_regions: OrderedDict[int, tuple[RegionAddress, Bytes]] = OrderedDict()  # by descriptor
        weakref.finalize(self, os.close, memory).atexit = False

    def map(self, where: MemoryRange) -> Bytes:
        """Map a range of the peer's file, [where.size_bytes], even after the peer has ended. Raises
        OSError."""
        return self._owner.map(self._memory, where)

    def region(self, address: RegionAddress) -> Bytes:
        """A region of the peer, read-only, [address.size_bytes]. Raises OSError or ValueError if it cannot be
        mapped; after the next reconnect, the peer's vectors are then sent over TCP."""
        cached_address, memory = self._cached_regions.get(address.descriptor, (None, None))
        if cached_address != address or memory is None:  # not cached, or the peer has reused the descriptor
            memory = self._map_region(address)
            self._cached_regions[address.descriptor] = address, memory
        self._cached_regions.move_to_end(address.descriptor)
        if len(self._cached_regions) > _MAX_CACHED_REGIONS:
            self._cached_regions.popitem(last=False)
        return memory

    def _map_region(self, address: RegionAddress) -> Bytes:
        try:
            descriptor = open_memory(self._pid, address.descriptor, _VECTOR, os.O_RDONLY)
            try:
                status = os.fstat(descriptor)
                if (status.st_ino, status.st_size) != (address.inode, address.size_bytes):
                    raise OSError(f"descriptor {address.descriptor} of process {self._pid} is another file")
                memory = mmap.mmap(
                    descriptor, address.size_bytes, flags=mmap.MAP_SHARED | _POPULATE, prot=mmap.PROT_READ
                )
            finally:
                os.close(descriptor)
        except (OSError, ValueError):
            self._on_failure()
            raise
        return np.frombuffer(memory, dtype=np.uint8)


def _descriptor_limit() -> int:
    """The largest number of file descriptors that this process may have."""
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 1 << 20 if allowed == resource.RLIM_INFINITY else allowed
