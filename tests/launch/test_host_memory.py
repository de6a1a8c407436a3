"""Memory that a process of one host lends to another."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from launch.rendezvous_ranks import needs_proc
from murmurate.fabric.processes.fork_server import fork_server
from murmurate.fabric.processes.shared_memory import SharedMemoryFile
from murmurate.launch.host_memory import MemoryOffer, Process, borrow, lend, this_host

pytestmark = needs_proc


def add_one(offer: MemoryOffer) -> None:
    cells = borrow(offer).counters("cells", (1,))
    cells[0] += 1


def test_another_process_borrows_the_same_memory() -> None:
    memory_file = SharedMemoryFile.create()
    offer = lend(memory_file)
    memory_file.counters("cells", (1,))[0] = 41
    process = fork_server().Process(target=add_one, args=(offer,))
    process.start()
    process.join()
    assert process.exitcode == 0
    assert borrow(offer).counters("cells", (1,))[0] == 42
    memory_file.close()


def test_what_is_not_the_lent_memory_is_not_taken(tmp_path: Path) -> None:
    memory_file = SharedMemoryFile.create()
    offer = lend(memory_file)
    with (tmp_path / "file").open("w") as file:
        not_memory = MemoryOffer(offer.host, offer.pid, file.fileno(), offer.mark)
        assert borrow(not_memory) is None
    assert borrow(MemoryOffer("another host", offer.pid, offer.descriptor, offer.mark)) is None
    assert borrow(MemoryOffer(offer.host, offer.pid, offer.descriptor, offer.mark + 1)) is None
    assert borrow(MemoryOffer(offer.host, offer.pid, -1, offer.mark)) is None
    other_file = SharedMemoryFile.create()
    other_file.counters("run_state", (3,))
    not_lent = MemoryOffer(offer.host, offer.pid, other_file.descriptor, offer.mark)
    opened = len(list(Path("/proc/self/fd").iterdir()))
    assert borrow(not_lent) is None
    assert len(list(Path("/proc/self/fd").iterdir())) == opened
    other_file.close()
    memory_file.close()
    assert borrow(offer) is None


def test_a_process_that_ended_is_gone_even_before_it_is_reaped() -> None:
    mine = Process.this()
    assert mine.is_gone() is False
    assert Process("another host", mine.pid, mine.created).is_gone() is None
    assert Process(this_host(), mine.pid, mine.created - 5).is_gone() is True, "a later one of that number"
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # ended, and a zombie
    assert Process(this_host(), child.pid, 0).is_gone() is True
    child.wait()
    assert Process(this_host(), child.pid, 0).is_gone() is True


def test_a_process_is_not_gone_because_the_systems_clock_was_set(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = Process.this()
    # the start that psutil reports moves with the clock: it adds the boot time, which Linux derives from it
    monkeypatch.setattr("psutil._pslinux.boot_time", lambda: 1e9)
    assert mine.is_gone() is False
