"""Shared memory for processes without a common parent: one creates it, and lends it to the others.

The memory file has no path; processes of the same host open it through the owner's ``/proc`` entry and check
a random mark in it. So ranks share memory wherever that works, whatever names hosts and containers have.
"""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from murmurate.fabric.interface import FabricError
from murmurate.fabric.processes.shared_memory import MEMORY_NAME, SharedMemoryFile, open_memory


@dataclass(frozen=True)
class Process:
    """One process on one host.

    created: when it started, in clock ticks since the host's boot, which distinguishes it from later
    processes with its pid. It does not depend on the system's clock, which may be set while the process runs.
    """

    host: str
    pid: int
    created: int

    @classmethod
    def this(cls) -> Process:
        """The calling process."""
        try:
            _, created = _state_and_start(os.getpid())
        except FileNotFoundError:  # without /proc nothing is compared, as ``host`` differs between processes
            created = 0
        return cls(this_host(), os.getpid(), created)

    def is_gone(self) -> bool | None:
        """Whether the process has ended (or is a zombie); None if it is on another host."""
        if self.host != this_host():
            return None
        try:
            state, created = _state_and_start(self.pid)
        except (FileNotFoundError, ProcessLookupError):
            return True
        return state in _ENDED or created != self.created


_ENDED = (b"Z", b"X")  # states of a process that has ended: a zombie, or dead


def _state_and_start(pid: int) -> tuple[bytes, int]:
    """(state, start in clock ticks since boot) of a process, from ``/proc/<pid>/stat``.

    Raises FileNotFoundError if there is none, and ProcessLookupError if it ends meanwhile.
    """
    # the second field, a name in parentheses, may itself contain spaces and parentheses
    fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    return fields[0], int(fields[19])


@dataclass(frozen=True)
class MemoryOffer:
    """Where a shared-memory file can be opened, and the mark in it. descriptor: -1 if no process can."""

    host: str
    pid: int
    descriptor: int
    mark: int


def this_host() -> str:
    """An identifier of this host: of its kernel and its table of processes, within which ``/proc/<pid>``
    means the same to all."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"no /proc in process {os.getpid()}"  # differs from all others, so no memory is shared


def lend(memory_file: SharedMemoryFile) -> MemoryOffer:
    """Offer ``memory_file``, of which no region has been taken yet, to the other processes of this host."""
    mark = secrets.randbits(62) + 1
    memory_file.counters("mark", (1,))[0] = mark
    try:
        os.close(open_memory(os.getpid(), memory_file.descriptor, MEMORY_NAME))
        descriptor = memory_file.descriptor
    except OSError:  # no memfd, or no /proc
        descriptor = -1
    return MemoryOffer(this_host(), os.getpid(), descriptor, mark)


def can_borrow(offer: MemoryOffer) -> bool:
    """Whether ``borrow`` succeeds here."""
    memory_file = borrow(offer)
    if memory_file is not None:
        memory_file.close()
    return memory_file is not None


def borrow(offer: MemoryOffer) -> SharedMemoryFile | None:
    """The shared memory of ``offer``, with the region of the mark taken; None if it cannot be opened here."""
    if offer.host != this_host():
        return None
    try:
        descriptor = open_memory(offer.pid, offer.descriptor, MEMORY_NAME)
    except OSError:
        return None
    memory_file = SharedMemoryFile(descriptor)
    try:
        is_lent = int(memory_file.counters("mark", (1,))[0]) == offer.mark
    except (FabricError, OSError):  # another memory file of that process; no room for the mapping
        is_lent = False
    if is_lent:
        return memory_file
    memory_file.close()
    return None
