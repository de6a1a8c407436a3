"""Shared memory for processes without a common parent: one creates it, and lends it to the others.

The memory file has no path; processes of the same host open it through the owner's ``/proc`` entry and check
a random mark in it. So ranks share memory wherever that works, whatever names hosts and containers have.
"""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass
from pathlib import Path

import psutil

from murmurate.fabric.processes.shared_memory import MEMORY_NAME, SharedMemoryFile, open_memory


@dataclass(frozen=True)
class Process:
    """One process on one host. Its start time (``created``) distinguishes it from later ones with its pid."""

    host: str
    pid: int
    created: float

    @classmethod
    def this(cls) -> Process:
        return cls(this_host(), os.getpid(), psutil.Process().create_time())

    def is_gone(self) -> bool | None:
        """Whether the process has ended (or is a zombie); None if it is on another host."""
        if self.host != this_host():
            return None
        try:
            process = psutil.Process(self.pid)
            return process.status() == psutil.STATUS_ZOMBIE or process.create_time() != self.created
        except psutil.NoSuchProcess:
            return True


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


def borrow(offer: MemoryOffer) -> SharedMemoryFile | None:
    """The shared memory of ``offer``, with the region of the mark taken; None if it cannot be opened here."""
    if offer.host != this_host():
        return None
    try:
        descriptor = open_memory(offer.pid, offer.descriptor, MEMORY_NAME)
    except OSError:
        return None
    memory_file = SharedMemoryFile(descriptor)
    if int(memory_file.counters("mark", (1,))[0]) != offer.mark:
        memory_file.close()
        return None
    return memory_file
