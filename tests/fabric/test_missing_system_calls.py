"""Where Python or the system has no pidfd or memfd: conda's Python 3.11 on Linux, and macOS."""

from __future__ import annotations

import errno
import os
import select
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from murmurate.errors import Refusal
from murmurate.fabric.interface import FabricError
from murmurate.fabric.network.shm_peer import ShmOwner
from murmurate.fabric.processes import process_handle, shared_memory
from murmurate.fabric.processes.process_handle import ProcessHandle, refuse_without_handles
from murmurate.fabric.processes.shared_memory import MEMORY_NAME, SharedMemoryFile, open_memory
from murmurate.fabric.processes.spawn import WorkerProcesses
from murmurate.native import system_calls
from murmurate.replica import robust_lock

# A script, which each of its workers imports too. It has what macOS has in place of pidfds, by its manual.
_SCRIPT = """
import os, select, selectors, signal  # selectors first, else it would use the kqueue below
import torch
import murmurate.native.system_calls
from murmurate.fabric.processes.fabric import ProcessFabric
from murmurate.fabric.processes.spawn import run

pidfd_open = os.pidfd_open
del os.pidfd_open, os.memfd_create, signal.pidfd_send_signal

class kevent:
    def __init__(self, ident, filter, flags, fflags):
        self.ident = ident
        assert (filter, flags, fflags) == (-5, 0x0001, 0x80000000)

class kqueue:
    def __init__(self):
        self.pid, self.descriptor, self.process = os.getpid(), None, None

    def control(self, changes, most):
        assert most == 0
        (change,) = changes
        self.descriptor = pidfd_open(change.ident)
        path = f"/proc/{change.ident}/stat"
        if open(path).read().rpartition(")")[2].split()[0] == "Z":
            raise ProcessLookupError(3, "No such process")

    def fileno(self):
        assert self.pid == os.getpid(), "kqueues are not inherited"
        return self.descriptor

    def close(self):
        if self.descriptor is not None:
            os.close(self.descriptor)

select.kqueue, select.kevent = kqueue, kevent
select.KQ_FILTER_PROC, select.KQ_EV_ADD, select.KQ_NOTE_EXIT = -5, 0x0001, 0x80000000

def c_library():
    raise OSError(78, "Function not implemented")

murmurate.native.system_calls._c_library = c_library

def member(fabric):
    if fabric.rank == 2:
        if os.fork() == 0:
            signal.pause()
        os.kill(os.getpid(), signal.SIGKILL)
    x = torch.full((1000,), float(fabric.rank))
    fabric.channel("both", x, [0, 1]).mean_(x)
    return x.unique().tolist()

def fabric(memory_file, run_state, rank, deadline_seconds):
    return ProcessFabric(memory_file, run_state, rank, deadline_seconds)

if __name__ == "__main__":
    print(run(3, [member] * 3, fabric, 60.0))
"""


@pytest.fixture
def as_conda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "pidfd_open")
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.delattr(signal, "pidfd_send_signal")


@pytest.fixture
def without_memfd(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> int:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(system_calls, "memfd", missing)


@pytest.mark.usefixtures("as_conda")
def test_a_python_without_pidfds_watches_and_ends_processes() -> None:
    with subprocess.Popen(["sleep", "600"]) as process:
        handle = ProcessHandle(process.pid)
        assert not handle.has_ended()
        handle.send(signal.SIGKILL)
        handle.wait()
        assert handle.has_ended()
        assert process.wait() == -signal.SIGKILL
        late = ProcessHandle(process.pid)
        assert late.has_ended()
        late.send(signal.SIGKILL)
        late.wait()
        late.close()
        handle.close()


@pytest.mark.usefixtures("as_conda")
def test_a_python_without_memfds_shares_memory_with_others_of_the_host() -> None:
    file = SharedMemoryFile.create()
    assert os.fstat(file.descriptor).st_size == shared_memory._LARGE.file_bytes
    assert not os.get_inheritable(file.descriptor)
    os.close(open_memory(os.getpid(), file.descriptor, MEMORY_NAME))
    file.close()
    owner = ShmOwner(b"incarnation")
    assert owner.open_peer(os.getpid(), owner.descriptor, b"incarnation") is not None
    assert system_calls.has_memfd()


@pytest.mark.usefixtures("without_memfd")
def test_a_file_on_disk_shares_memory_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    first = SharedMemoryFile.create()
    assert list(tmp_path.iterdir()) == []
    assert not system_calls.has_memfd()
    second = SharedMemoryFile(os.dup(first.descriptor))
    for name in ("all", "others"):
        x, y = (file.zone(name).tensors(name, (300_000,), torch.float32) for file in (first, second))
        x.fill_(2.0)
        assert torch.equal(x, y)
    assert first.tensors("x", (10,), torch.float32).sum() == 0
    assert os.fstat(first.descriptor).st_blocks * 512 < 2**24  # what was written, and not the file's length
    first.close()
    second.close()


@pytest.mark.usefixtures("without_memfd")
def test_its_zones_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "_LARGE", shared_memory._Zones(2**22, 2**40))  # ext4 has no such file
    monkeypatch.setattr(shared_memory, "_SMALL", shared_memory._Zones(2, 2**20))
    file = SharedMemoryFile.create()
    for name in ("a", "b", "a"):
        file.zone(name)
    with pytest.raises(FabricError, match="all 2 zones of the shared memory are taken"):
        file.zone("c")
    file.close()


@pytest.mark.usefixtures("without_memfd")
def test_a_limit_of_files_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    def too_large(descriptor: int, size: int) -> None:
        tried.append(descriptor)
        raise OSError(errno.EFBIG, "File too large")

    monkeypatch.setattr(os, "ftruncate", too_large)
    with pytest.raises(Refusal, match=r"share memory here: File too large.*ulimit -f unlimited.*TMPDIR"):
        SharedMemoryFile.create()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(tried[-1])


def test_a_kernel_that_watches_no_process_starts_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(pid: int) -> int:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(process_handle, "pidfd_open", missing)
    with pytest.raises(Refusal, match=r"pidfd_open \(Linux 5.3\) failed.*--launcher inline"):
        WorkerProcesses(1)


def test_a_kqueue_that_is_refused_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[bool] = []

    def denied(changes: Any, most: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    queue = SimpleNamespace(control=denied, close=lambda: closed.append(True))
    for name in ("kevent", "KQ_FILTER_PROC", "KQ_EV_ADD", "KQ_NOTE_EXIT"):
        monkeypatch.setattr(select, name, lambda *_: None, raising=False)
    monkeypatch.setattr(select, "kqueue", lambda: queue, raising=False)
    with pytest.raises(Refusal, match="a kqueue for the end of a process failed"):
        refuse_without_handles()
    assert closed == [True]


def test_a_c_library_without_robust_mutexes_refuses_what_needs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(robust_lock, "_libc", SimpleNamespace())
    with pytest.raises(Refusal, match=r"no robust mutexes.*--strategy gala"):
        robust_lock.open_locks(2)


def test_processes_run_where_all_is_as_on_macos(tmp_path: Path) -> None:
    """Three members, one of which is killed; the process that it forked, which holds the output open, ends
    too."""
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT)
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[[0.5], [0.5], Died(rank=2, exit_code=-9)]"
