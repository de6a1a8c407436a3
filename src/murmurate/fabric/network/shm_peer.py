"""Members of one host: what one writes for another, the other reads where it lies.

A connection over loopback copies a vector into the kernel and out of it again. So each member has a file of
shared memory (anonymous, sparse) that a peer on the same host, started by the same user, opens through
``/proc`` and maps in parts: registers and mail lie there (``shm_channel``). A vector of a collective lies in
a file of its own; the line carries its head and where that is. Places are told over sealed connections, so
only members learn of them.

Whether two members are neighbours they find out in the handshake, by trying: each file begins with its
member's incarnation, which no other process has. It is kept open from then on, so what a member left there
can be read although it has ended.
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

_LEAST_BYTES = 64 << 10  # less than this is sent faster than it is looked up
_MOST_REGIONS = 64  # at one member, as each needs two descriptors (Python's mmap keeps one of its own)
_MOST_MAPPED = 32  # regions of one peer
_POPULATE = getattr(mmap, "MAP_POPULATE", 0)  # all pages at once, not by a fault each


_MEMORY, _VECTOR = "murmurate-memory", "murmurate-vector"  # our files, as /proc shows them
_MEMORY_BYTES = 1 << 40
_PAGE = mmap.ALLOCATIONGRANULARITY


class Place(NamedTuple):
    """Where a region lies: a descriptor of its process, the number of its file, and its length."""

    descriptor: int
    inode: int
    size_bytes: int

    def pack(self) -> bytes:
        return PLACE.pack(*self)


PLACE = struct.Struct("<IQQ")


class Region(np.ndarray[Any, Any]):
    """[N] uint8 in shared memory. ``place``: of all of it; None for a part."""

    place: Place | None = None

    def __array_finalize__(self, whole: Any) -> None:
        place = getattr(whole, "place", None)
        self.place = place if place is not None and place.size_bytes == self.nbytes else None


class Span(NamedTuple):
    """A part of a member's memory."""

    start: int
    size_bytes: int


class ShmOwner:
    """A member's memory that its neighbours see, and buffers that they can read.

    Without ``memfd`` or ``/proc`` the buffers are ordinary ones, and it has no neighbours.
    """

    def __init__(self, incarnation: bytes) -> None:
        self._incarnation = incarnation
        self._regions: set[int] = set()  # descriptors
        self._unreadable: set[bytes] = set()  # incarnations whose memory we could not map after all
        self._parts: set[int] = (
            set()
        )  # of our memory and of neighbours', mapped now, as each takes a descriptor
        self._most_parts = _descriptors() // 2
        self._lock = threading.Lock()
        self._end = _PAGE
        self.descriptor = -1
        if hasattr(os, "memfd_create") and os.path.isdir("/proc/self/fd"):
            self.descriptor = os.memfd_create(_MEMORY, os.MFD_CLOEXEC)
            os.ftruncate(self.descriptor, _MEMORY_BYTES)
            os.write(self.descriptor, incarnation)
            weakref.finalize(self, os.close, self.descriptor).atexit = False

    def take(self, size_bytes: int) -> tuple[Bytes, Span]:
        """[size_bytes] zeros that neighbours can map, and where. Raises OSError."""
        with self._lock:
            span = Span(self._end, size_bytes)
            self._end += -(-size_bytes // _PAGE) * _PAGE
        return self.map(self.descriptor, span), span

    def clear(self, span: Span) -> None:
        """Give the pages of a part that nobody will look at any more back to the system."""
        with contextlib.suppress(OSError):
            with mmap.mmap(self.descriptor, span.size_bytes, offset=span.start) as memory:
                memory.madvise(mmap.MADV_REMOVE)

    def map(self, descriptor: int, span: Span) -> Bytes:
        """[span.size_bytes] of a member's memory, to be written too. Raises OSError."""
        if span.start < _PAGE or span.start % _PAGE or not 0 < span.size_bytes <= _MEMORY_BYTES - span.start:
            raise OSError(f"no member's memory has {span.size_bytes} bytes at {span.start}")
        if len(self._parts) >= self._most_parts:
            raise OSError(f"{len(self._parts)} parts of memory are mapped, half of the descriptors allowed")
        memory = mmap.mmap(descriptor, span.size_bytes, flags=mmap.MAP_SHARED, offset=span.start)
        part = np.frombuffer(memory, dtype=np.uint8)
        self._parts.add(id(memory))
        weakref.finalize(memory, self._parts.discard, id(memory)).atexit = False
        return part

    def buffer(self, size_bytes: int) -> Bytes:
        """A fresh one: a ``Region`` if there can be one, else an ordinary array."""
        if self.descriptor < 0 or size_bytes < _LEAST_BYTES or len(self._regions) >= _MOST_REGIONS:
            return np.empty(size_bytes, dtype=np.uint8)
        try:
            return self._region(size_bytes)
        except OSError:  # too many open files, say
            return np.empty(size_bytes, dtype=np.uint8)

    def _region(self, size_bytes: int) -> Bytes:
        descriptor = os.memfd_create(_VECTOR, os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, size_bytes)
            memory = mmap.mmap(descriptor, size_bytes, flags=mmap.MAP_SHARED | _POPULATE)
        except OSError:
            os.close(descriptor)
            raise
        region = np.frombuffer(memory, dtype=np.uint8).view(Region)
        region.place = Place(descriptor, os.fstat(descriptor).st_ino, size_bytes)
        self._regions.add(descriptor)
        weakref.finalize(region, self._closed, descriptor).atexit = False
        return region

    def _closed(self, descriptor: int) -> None:
        self._regions.discard(descriptor)  # one instruction, as this may run in any thread at any time
        os.close(descriptor)

    def neighbour(self, pid: int, descriptor: int, incarnation: bytes) -> ShmPeer | None:
        """The member that says it is process ``pid`` and names its memory, if we can open it there."""
        if self.descriptor < 0 or descriptor < 0 or incarnation in self._unreadable:
            return None
        try:
            file = _open(pid, descriptor, _MEMORY, os.O_RDWR)
        except OSError:
            return None
        neighbour = ShmPeer(self, pid, file, lambda: self._unreadable.add(incarnation))
        try:
            found = os.pread(file, len(incarnation), 0) == incarnation
            found = found and os.fstat(file).st_size == _MEMORY_BYTES
        except OSError:
            found = False
        return neighbour if found else None


class ShmPeer:
    """Sees what another process of this host shows. failed: called when that does not work after all."""

    def __init__(self, lender: ShmOwner, pid: int, memory: int, failed: Callable[[], None]) -> None:
        self._lender, self._pid, self._memory, self._failed = lender, pid, memory, failed
        self._mapped: OrderedDict[int, tuple[Place, Bytes]] = OrderedDict()  # by descriptor
        weakref.finalize(self, os.close, memory).atexit = False

    def map(self, span: Span) -> Bytes:
        """[span.size_bytes] of its memory, also when it has ended. Raises OSError."""
        return self._lender.map(self._memory, span)

    def look(self, place: Place) -> Bytes:
        """[size_bytes] its memory, read-only. Raises OSError; the next connection then does without."""
        known, found = self._mapped.get(place.descriptor, (None, None))
        if known != place or found is None:  # another region under the descriptor: the former one is gone
            found = self._map(place)
            self._mapped[place.descriptor] = place, found
        self._mapped.move_to_end(place.descriptor)
        if len(self._mapped) > _MOST_MAPPED:
            self._mapped.popitem(last=False)
        return found

    def _map(self, place: Place) -> Bytes:
        try:
            descriptor = _open(self._pid, place.descriptor, _VECTOR, os.O_RDONLY)
            try:
                file = os.fstat(descriptor)
                if (file.st_ino, file.st_size) != (place.inode, place.size_bytes):
                    raise OSError(f"descriptor {place.descriptor} of process {self._pid} is another file")
                memory = mmap.mmap(
                    descriptor, place.size_bytes, flags=mmap.MAP_SHARED | _POPULATE, prot=mmap.PROT_READ
                )
            finally:
                os.close(descriptor)
        except (OSError, ValueError):
            self._failed()
            raise
        return np.frombuffer(memory, dtype=np.uint8)


def _descriptors() -> int:
    """How many this process may have."""
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 1 << 20 if allowed == resource.RLIM_INFINITY else allowed


def _open(pid: int, descriptor: int, name: str, access: int) -> int:
    """A file of another process, if it is one of that name: never a pipe or a device, which an open or a read
    would wait for or take from. Raises OSError."""
    path = f"/proc/{pid}/fd/{descriptor}"
    if not os.readlink(path).startswith(f"/memfd:{name}"):
        raise OSError(f"descriptor {descriptor} of process {pid} is another file")
    return os.open(path, access | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
