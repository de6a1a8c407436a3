"""How the launcher learns of a worker's end, and that none is left."""

from __future__ import annotations

import errno
import functools
import multiprocessing
import multiprocessing.util
import os
import pickle
import resource
import signal
import struct
import subprocess
from multiprocessing import Pipe
from multiprocessing.context import ForkContext, ForkServerProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from murmurate.errors import Refusal
from murmurate.fabric.processes import process_handle, spawn
from murmurate.fabric.processes.fork_server import own_folder
from murmurate.fabric.processes.report import send_report
from murmurate.fabric.processes.spawn import (
    DIED,
    FINISHED,
    Exit,
    Worker,
    WorkerProcess,
    WorkerProcesses,
    take_signals,
)
from waiting import DEADLINE_SECONDS, until

_MUCH = 1 << 22  # bytes


def test_a_worker_that_dies_while_it_reports_is_dead() -> None:
    """Its pipe holds the length of a report, and only a part of the report."""
    with subprocess.Popen(["sleep", "600"]) as process:
        reads, writes = Pipe(duplex=False)
        stub = SimpleNamespace(pid=process.pid, exitcode=-9, join=lambda seconds: process.wait(seconds))
        worker = WorkerProcess(0, stub, reads)  # type: ignore[arg-type]
        assert not worker.poll()
        os.write(writes.fileno(), struct.pack("!Q", 1000) + b"a part")
        writes.close()
        assert worker.poll()
        assert worker.exit is not None
        assert (worker.exit.how, worker.exit.error) == (DIED, "SIGKILL")
        worker.close()


def test_a_worker_that_is_stopped_while_it_reports_is_not_waited_for() -> None:
    """Not between any two bytes of its report."""
    end = Exit(FINISHED, result=b"any")
    with subprocess.Popen(["sleep", "600"]) as process:
        reads, writes = Pipe(duplex=False)
        stub = SimpleNamespace(pid=process.pid, exitcode=-9, join=lambda seconds: process.wait(seconds))
        worker = WorkerProcess(0, stub, reads)  # type: ignore[arg-type]
        try:
            report = pickle.dumps(end)
            *first, last = struct.pack("!Q", len(report)) + report
            for byte in first:
                os.write(writes.fileno(), bytes([byte]))
                assert not worker.poll()
            os.write(writes.fileno(), bytes([last]))
            assert worker.poll()
            assert worker.exit == end
        finally:
            worker.close()


def test_a_report_of_any_size_arrives_before_the_wait_for_it_ends() -> None:
    with WorkerProcesses(1) as workers:
        workers.start(0, report_much)
        (worker,) = workers.wait(DEADLINE_SECONDS)
        assert worker.exit is not None
        assert worker.exit.how == FINISHED, worker.exit
        assert len(worker.exit.result) == _MUCH
    assert workers.wait(DEADLINE_SECONDS) == []


def test_a_failure_by_too_many_open_files_says_how_to_raise_their_limit() -> None:
    failed = Exit.failed(OSError(errno.EMFILE, "Too many open files"))
    assert failed.error.endswith("Too many open files; raise their limit: ulimit -n 4096")


def test_more_workers_than_files_may_be_opened_for_are_refused_before_any_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    monkeypatch.setattr(spawn, "fork_server", lambda preload: pytest.fail("started"))
    with pytest.raises(Refusal, match=r"processes need at least .* open files.* or use fewer replicas"):
        WorkerProcesses(soft // 4)


def test_each_worker_takes_as_many_open_files_as_are_counted_before() -> None:
    with WorkerProcesses(2) as workers:
        workers.start(0, take_signals)  # what all need is open then
        before = psutil.Process().num_fds()
        workers.start(1, take_signals)
        assert psutil.Process().num_fds() - before == process_handle._FILES_OF_PROCESS


def test_a_report_that_comes_just_before_the_end_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker reports and ends while the launcher looks at the pipe, and then at the process."""
    with subprocess.Popen(["sleep", "600"]) as process:
        reads, writes = Pipe(duplex=False)
        stub = SimpleNamespace(pid=process.pid, exitcode=0, join=lambda seconds: process.wait(seconds))
        worker = WorkerProcess(0, stub, reads)  # type: ignore[arg-type]

        def reports_and_ends() -> bool:
            send_report(writes, pickle.dumps(Exit(FINISHED, result=7)))
            return True

        monkeypatch.setattr(worker._handle, "has_ended", reports_and_ends)
        assert worker.poll()
        assert worker.exit == Exit(FINISHED, result=7)
        worker.close()


def test_ctrl_c_while_a_worker_is_started_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fork server has forked it by then, and only the launcher ends it."""
    started: list[int] = []
    start = ForkServerProcess.start

    def interrupted(process: ForkServerProcess) -> None:
        start(process)
        started.append(process.pid or 0)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(ForkServerProcess, "start", interrupted)
    with pytest.raises(KeyboardInterrupt), WorkerProcesses(1) as workers:
        workers.start(0, take_signals_and_pause)
    assert not psutil.pid_exists(started[0])


def test_a_process_whose_start_method_a_library_has_added_starts_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As joblib's do, with which scikit-learn fits estimators in parallel."""

    class Added(ForkContext):
        _name = "added"

    contexts: Any = multiprocessing.context
    monkeypatch.setitem(contexts._concrete_contexts, "added", Added())
    monkeypatch.setattr(contexts._default_context, "_actual_context", Added())
    with WorkerProcesses(1) as workers:
        workers.start(0, start_method_in_worker)
        (worker,) = workers.wait(60.0)
    assert worker.exit == Exit(FINISHED, result=None)
    assert multiprocessing.get_start_method() == "added"


def test_a_worker_has_the_environment_that_its_launcher_has_now(monkeypatch: pytest.MonkeyPatch) -> None:
    with WorkerProcesses(1) as workers:
        monkeypatch.setenv("SET_SINCE_THE_FORK_SERVER_BEGAN", "seen")
        workers.start(0, environment_in_worker)
        (worker,) = workers.wait(DEADLINE_SECONDS)
        assert worker.exit is not None
        assert worker.exit.result == {"OMP_NUM_THREADS": "1", **os.environ}


def test_the_folder_of_sockets_is_not_that_of_a_launcher_that_is_a_worker_itself() -> None:
    with WorkerProcesses(1) as workers:
        workers.start(0, folder_of_a_worker)
        (worker,) = workers.wait(DEADLINE_SECONDS)
        assert worker.exit is not None
        assert worker.exit.result == ""
        assert own_folder() == multiprocessing.util.get_temp_dir()


@pytest.mark.slow
def test_the_workers_of_a_worker_that_is_killed_leave_the_sockets_of_its_launcher(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    with WorkerProcesses(1) as workers:
        workers.start(0, functools.partial(start_worker_and_pause, file))
        until(file.exists, "the pid of the worker's worker")
        inner = psutil.Process(int(file.read_text()))
        workers.by_rank[0].kill()
        assert [worker.rank for worker in workers.wait(DEADLINE_SECONDS)] == [0]
        until(lambda: not inner.is_running(), "its end")
        workers.start(0, report_much)
        (worker,) = workers.wait(DEADLINE_SECONDS)
        assert worker.exit is not None
        assert worker.exit.how == FINISHED


def start_worker_and_pause(file: Path, worker: Worker) -> None:
    with WorkerProcesses(1) as workers:
        workers.start(0, take_signals_and_pause)
        (file.parent / "written").write_text(str(workers.by_rank[0].process.pid))
        (file.parent / "written").rename(file)
        signal.pause()


def folder_of_a_worker(worker: Worker) -> Exit:
    return Exit(FINISHED, result=own_folder())


def environment_in_worker(worker: Worker) -> Exit:
    return Exit(FINISHED, result=dict(os.environ))


def start_method_in_worker(worker: Worker) -> Exit:
    return Exit(FINISHED, result=multiprocessing.get_start_method(allow_none=True))


def take_signals_and_pause(worker: Worker) -> None:
    take_signals()
    signal.pause()


def report_much(worker: Worker) -> Exit:
    return Exit(FINISHED, result=bytes(_MUCH))
