"""Members of one host: a vector is read where it lies in its sender's memory, not sent over the line.

A connection over loopback copies a vector into the kernel and out of it again. So what is sent lies in shared
memory (an anonymous file each), and a peer on the same host, started by the same user, maps that through
``/proc``. The line then carries only heads, and a sealed token for each piece that may be read: order,
numbering and acknowledgement stay as they are, and only members learn where anything lies.

Whether two members are neighbours they find out in the handshake, by trying: each names a file of its own
that holds its incarnation, which no other process has.
"""

from __future__ import annotations

import mmap
import os
import struct
import weakref
from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np

from murmurate.pool import Bytes

_LEAST_BYTES = 64 << 10  # less than this is sent faster than it is looked up
_MOST_REGIONS = 64  # at one member, as each needs two descriptors (Python's mmap keeps one of its own)
_MOST_MAPPED = 32  # regions of one peer
_POPULATE = getattr(mmap, "MAP_POPULATE", 0)  # all pages at once, not by a fault each


_NAME, _VECTOR = "murmurate-name", "murmurate-vector"  # of our files, as /proc shows them


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


class Lender:
    """What a member offers its neighbours: buffers that they can read, and a file to know it by.

    Without ``memfd`` or ``/proc`` the buffers are ordinary ones, and it has no neighbours.
    """

    def __init__(self, incarnation: bytes) -> None:
        self._incarnation = incarnation
        self._regions: set[int] = set()  # descriptors
        self._unreadable: set[bytes] = set()  # incarnations whose memory we could not map after all
        self.descriptor = -1
        if hasattr(os, "memfd_create") and os.path.isdir("/proc/self/fd"):
            self.descriptor = os.memfd_create(_NAME, os.MFD_CLOEXEC)
            os.write(self.descriptor, incarnation)
            weakref.finalize(self, os.close, self.descriptor).atexit = False

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

    def neighbour(self, pid: int, descriptor: int, incarnation: bytes) -> Neighbour | None:
        """The member that says it is process ``pid`` and names that file, if we can read it there."""
        if self.descriptor < 0 or descriptor < 0 or incarnation in self._unreadable:
            return None
        try:
            file = _open(pid, descriptor, _NAME)
            try:
                found = os.pread(file, len(incarnation) + 1, 0)
            finally:
                os.close(file)
        except OSError:
            return None
        return Neighbour(pid, lambda: self._unreadable.add(incarnation)) if found == incarnation else None


class Neighbour:
    """Reads what another process of this host lends. failed: called when that does not work after all."""

    def __init__(self, pid: int, failed: Any) -> None:
        self._pid, self._failed = pid, failed
        self._mapped: OrderedDict[int, tuple[Place, Bytes]] = OrderedDict()  # by descriptor

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
            descriptor = _open(self._pid, place.descriptor, _VECTOR)
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


def _open(pid: int, descriptor: int, name: str) -> int:
    """A file of another process, if it is one of that name: never a pipe or a device, which an open or a read
    would wait for or take from. Raises OSError."""
    path = f"/proc/{pid}/fd/{descriptor}"
    if not os.readlink(path).startswith(f"/memfd:{name}"):
        raise OSError(f"descriptor {descriptor} of process {pid} is another file")
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
