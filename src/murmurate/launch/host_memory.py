"""Common ground of roles that nobody forked together: the memory of one host, lent by one of them.

The lender's memory_file has no name; others of the same host open it through the lender's ``/proc`` entry and
look for a mark in it, so ranks share memory exactly if they can, whatever hosts and containers are called.
"""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass
from pathlib import Path

import psutil

from murmurate.fabric.processes.shared_memory import SharedMemoryFile

_MEMORY = "/memfd:murmurate (deleted)"


@dataclass(frozen=True)
class Process:
    """One process of one host, told apart from a later one with the same number."""

    host: str
    pid: int
    created: float

    @classmethod
    def this(cls) -> Process:
        return cls(this_host(), os.getpid(), psutil.Process().create_time())

    def is_gone(self) -> bool | None:
        """Whether it has ended, a zombie included; None if it is one of another host."""
        if self.host != this_host():
            return None
        try:
            process = psutil.Process(self.pid)
            return process.status() == psutil.STATUS_ZOMBIE or process.create_time() != self.created
        except psutil.NoSuchProcess:
            return True


@dataclass(frozen=True)
class Offer:
    """Where a file of shared memory can be opened, and the mark in it; ``descriptor`` is -1 if it cannot."""

    host: str
    pid: int
    descriptor: int
    mark: int


def this_host() -> str:
    """One kernel and one table of processes: within it, ``/proc/<pid>`` means the same to all."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"no /proc in process {os.getpid()}"  # shares memory with nobody


def lend(memory_file: SharedMemoryFile) -> Offer:
    """Offer ``memory_file``, of which nothing was taken yet, to the other processes of this host."""
    mark = secrets.randbits(62) + 1
    memory_file.counters("mark", (1,))[0] = mark
    lent = _is_memory(os.getpid(), memory_file.descriptor)
    return Offer(this_host(), os.getpid(), memory_file.descriptor if lent else -1, mark)


def borrow(offer: Offer) -> SharedMemoryFile | None:
    """The shared memory of ``offer``, its mark taken; None if this process cannot have it."""
    if offer.host != this_host() or not _is_memory(offer.pid, offer.descriptor):
        return None
    try:
        descriptor = os.open(f"/proc/{offer.pid}/fd/{offer.descriptor}", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    memory_file = SharedMemoryFile(descriptor)
    if int(memory_file.counters("mark", (1,))[0]) != offer.mark:
        memory_file.close()
        return None
    return memory_file


def _is_memory(pid: int, descriptor: int) -> bool:
    """Looked at before anything is opened: a descriptor of that number may be anything, a terminal even."""
    try:
        return os.readlink(f"/proc/{pid}/fd/{descriptor}") == _MEMORY
    except OSError:
        return False
