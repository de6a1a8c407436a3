"""Workers: processes of this host that share memory. This module starts them and reports how each ended; when
the process that started them (here called the launcher) ends, they end too.

Runs, scripts and ``run_members`` start their workers here. A worker is not a daemonic process, so it may
start processes of its own, as a data loader does; those that it forked end with it, however it ends.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import multiprocessing
import multiprocessing.process
import os
import pickle
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from typing import Any, NoReturn

import numpy as np
import torch

from murmurate.errors import file_limit
from murmurate.fabric.interface import Fabric
from murmurate.fabric.processes.deferred_signals import signals_deferred
from murmurate.fabric.processes.fork_server import (
    PRELOADED_BY_RUNS,
    REPORT_SECONDS,
    UNKNOWN_CODE,
    ProcessSettings,
    end_stopped_fork_server,
    fork_server,
    settings_to_adopt,
)
from murmurate.fabric.processes.process_handle import (
    ProcessHandle,
    end_forked_processes_with_this_one,
    is_stopped,
    refuse_too_few_files,
    refuse_without_handles,
)
from murmurate.fabric.processes.report import ReportReader, send_report
from murmurate.fabric.processes.run_state import RunState
from murmurate.fabric.processes.shared_memory import SharedMemoryFile

FINISHED, FAILED, REFUSED, LATE, LEFT, DIED = "finished", "failed", "refused", "late", "left", "died"
_IMPORTED_CODE = 74  # exit code of a worker in which the import of the user's script started a run
# how long a member answers the others after its result; the launcher ends it once it has all results
_LINGER_SECONDS = 60.0
# an optimizer's first step imports the last of these, which would take each process a second
_PRELOADED = ("murmurate.fabric.processes.fabric", "murmurate.fabric.network.channel", "torch._dynamo")


IMPORTED = (
    "each process imports the script, and the script starts a run when it is imported. Put what starts it "
    "under: if __name__ == '__main__':"
)


@dataclass(frozen=True)
class Exit:
    """How a worker ended. The values of ``how``:

    FINISHED: with ``result``. FAILED: by an error; ``error`` is its type and message, ``trace`` the
    traceback.
    REFUSED: before it began; ``error`` is the message of the Refusal. LATE: it was restarted when the run was
    over. LEFT: it could not go on without another member; ``error`` says why. DIED: without reporting its
    end; ``error`` is the signal or exit code.
    """

    how: str
    error: str = ""
    trace: str = ""
    result: Any = None

    @classmethod
    def failed(cls, error: BaseException, result: Any = None) -> Exit:
        return cls(FAILED, describe(error), "".join(traceback.format_exception(error)).rstrip(), result)


def describe(error: BaseException) -> str:
    """The error's type and message, with what to do about too many open files."""
    return f"{type(error).__name__}: {error}".removesuffix(": ") + file_limit(error)


@dataclass(frozen=True)
class Died:
    """Stands for the result of a member whose process ended without one (by SIGKILL, for example).

    exit_code: that of its process, minus the number of a signal; None where another program has started it
        (torchrun, Ray), or if the process ended because another part of its replica did.
    """

    rank: int
    exit_code: int | None


@dataclass
class Worker:
    """The argument of a worker's function. ``afterwards`` is closed once the worker's result is sent."""

    rank: int
    memory_file: SharedMemoryFile
    run_state: RunState
    afterwards: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)


Work = Callable[[Worker], Exit]


def open_run_state(memory_file: SharedMemoryFile, size: int) -> RunState:
    """The run state, in the shared memory's first region."""
    cells: np.ndarray[Any, np.dtype[np.int64]] = memory_file.counters(
        "run_state", (RunState.cells_needed(size),)
    )
    return RunState(size, cells)


# -- in the launcher --------------------------------------------------------------------------------------


class WorkerProcess:
    """The launcher's view of one worker. exit: how it ended; None until then.

    joins: the worker replaces one that died. killed_because: why the launcher killed it; else empty.
    """

    def __init__(self, rank: int, process: ForkServerProcess, pipe: Connection, joins: bool = False) -> None:
        self.rank, self.process, self.joins = rank, process, joins
        self.exit: Exit | None = None
        self.killed_because = ""
        self._pipe, self._report = pipe, ReportReader(pipe)
        # multiprocessing's sentinel would also report the end of the fork server, which workers survive
        self._handle = ProcessHandle(process.pid or 0)

    @property
    def ended(self) -> bool:
        return self.exit is not None

    @property
    def is_stopped(self) -> bool:
        """Whether SIGSTOP, or a terminal's Ctrl-Z, has stopped it; a slow worker is not stopped."""
        return is_stopped(self.process.pid)

    def dump_stacks(self) -> bool:
        """Make the worker write its threads' stacks to its log (see ``role.redirect_output_to_log``)."""
        self._handle.send(signal.SIGUSR1)
        return True

    def terminate(self) -> None:
        """Send SIGTERM, for which the worker may have a handler (see ``take_signals``)."""
        self._handle.send(signal.SIGTERM)

    def kill(self, because: str = "") -> None:
        """Send SIGKILL, after which even a stopped or stuck process writes nothing any more."""
        self.killed_because = because
        self._handle.send(signal.SIGKILL)

    @property
    def awaited(self) -> list[Any]:
        """Objects, for ``wait``, of which one becomes ready when the worker reports its end, or dies."""
        return [self._pipe, self._handle]

    def poll(self) -> bool:
        """Whether the worker has ended; if so, sets ``exit``."""
        has_ended = self._handle.has_ended()  # asked first: it may report just before it ends
        # the pipe is also closed when a worker dies without a report, or in the middle of one
        with contextlib.suppress(EOFError, OSError):
            if (report := self._report.read()) is not None:
                self.exit = pickle.loads(report)
                if self.exit is not None and self.exit.how != FINISHED:
                    self._end()
                return True
            if not has_ended:
                return False
        self._end()
        code = self.process.exitcode
        if code == _IMPORTED_CODE:
            self.exit = Exit(REFUSED, IMPORTED)
            return True
        cause = signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
        if code in (None, UNKNOWN_CODE):
            cause = "the fork server did not report how"
        self.exit = Exit(DIED, self.killed_because or cause)
        return True

    def _end(self) -> None:
        self._handle.send(signal.SIGKILL)
        self._handle.wait()
        self.process.join(REPORT_SECONDS)

    def close(self) -> None:
        self._end()
        self._handle.close()
        self._pipe.close()


class WorkerProcesses:
    """The workers of one run or script, and their shared memory, which contains the run state.

    A context manager, which ends all workers at exit. preload: see ``fork_server``. Raises Refusal where no
    process can be started.
    """

    def __init__(self, size: int, preload: Sequence[str] = PRELOADED_BY_RUNS) -> None:
        self.size = size
        refuse_without_handles()
        refuse_too_few_files(size)
        self._context = fork_server(preload)
        self.memory_file = SharedMemoryFile.create()
        self.run_state = open_run_state(self.memory_file, size)
        self.run_state.open()
        self.by_rank: dict[int, WorkerProcess] = {}
        atexit.register(self.close)  # else multiprocessing would wait for them after an interrupt

    def __enter__(self) -> WorkerProcesses:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def start(self, rank: int, work: Work, joins: bool = False) -> None:
        """Start a process that executes ``work``, which is pickled. joins: it replaces one that has ended."""
        if rank in self.by_rank:
            self.by_rank[rank].close()
        end_stopped_fork_server()
        ours, theirs = self._context.Pipe(duplex=False)
        packed = pickle.dumps(work)  # torch's own pickling would move tensors to shared memory
        with settings_to_adopt() as settings, signals_deferred():
            process = self._context.Process(
                target=_run_worker,
                args=(packed, rank, self.size, self.memory_file, theirs, settings),
                name=f"murmurate-replica-{rank}",
            )
            process.start()  # a Ctrl-C after this would leave a process that nothing ends
            self.by_rank[rank] = WorkerProcess(rank, process, ours, joins)
        theirs.close()

    @property
    def alive(self) -> list[WorkerProcess]:
        return [worker for worker in self.by_rank.values() if not worker.ended]

    def wait(self, timeout_seconds: float) -> list[WorkerProcess]:
        """The workers that have ended since the last call; returns as soon as there is one."""
        end = time.monotonic() + timeout_seconds
        while workers := self.alive:
            left = max(0.0, end - time.monotonic())
            wait([awaited for worker in workers for awaited in worker.awaited], left)
            ended = [worker for worker in workers if worker.poll()]
            if ended or time.monotonic() >= end:  # else only a part of a report has arrived
                return ended
        return []

    def kill(self) -> None:
        """End all workers."""
        for worker in self.by_rank.values():
            worker.close()

    def close(self) -> None:
        self.kill()
        self.run_state.detach()  # else its descriptor stays open until the next garbage collection
        self.memory_file.close()
        end_stopped_fork_server()
        atexit.unregister(self.close)


# -- in a worker ------------------------------------------------------------------------------------------


def _run_worker(
    packed: bytes,
    rank: int,
    size: int,
    memory_file: SharedMemoryFile,
    pipe: Connection,
    settings: ProcessSettings,
) -> None:
    """The entry point of a worker process. packed: its ``Work``, pickled. settings: the launcher's."""
    settings.adopt()
    faulthandler.enable()
    threading.Thread(target=_exit_with_launcher, args=(settings.own_folder,), daemon=True).start()
    end_forked_processes_with_this_one()
    worker = Worker(rank, memory_file, open_run_state(memory_file, size))
    with worker.afterwards:
        try:
            end: Exit = pickle.loads(packed)(worker)
        except BaseException as error:
            end = Exit.failed(error)
        message = pickled_exit(end)
        sys.stdout.flush()
        sys.stderr.flush()
        send_report(pipe, message)
        pipe.close()
    # simulators' native threads must not keep the process alive
    exit_now(0)


def pickled_exit(end: Exit, dumps: Callable[[Exit], bytes] = pickle.dumps) -> bytes:
    """``end`` pickled by ``dumps``, or a failure that says that its result cannot be."""
    try:
        pickled = dumps(end)
        pickle.loads(pickled)  # can fail, as for an exception whose constructor does not take its message
        return pickled
    except Exception as error:
        reason = f"its result cannot be sent back ({error}): return tensors and plain values"
        return pickle.dumps(Exit(FAILED, end.error or reason, end.trace))


def refuse_import() -> None:
    """End this process if it is a worker that is importing the user's script: the script starts a run when it
    is imported, and would do so in each worker. The launcher then raises Refusal."""
    if getattr(multiprocessing.process.current_process(), "_inheriting", False):
        os._exit(_IMPORTED_CODE)


def take_signals(on_sigterm: Any = signal.SIG_DFL) -> None:
    """Set a worker's signal handlers, and unblock SIGINT and SIGTERM, which it inherits blocked. SIGINT is
    ignored, as the launcher handles Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, on_sigterm)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})


def exit_now(code: int) -> NoReturn:
    """End this process at once, and the processes that it has started (a data loader's, for example)."""
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(code)


def _exit_with_launcher(folder: str) -> None:
    launcher = multiprocessing.parent_process()
    if launcher is not None:
        wait([launcher.sentinel])
        shutil.rmtree(folder, ignore_errors=True)  # the launcher cannot remove its sockets any more
        exit_now(1)


# -- members as functions ---------------------------------------------------------------------------------

MakeFabric = Callable[[SharedMemoryFile, RunState, int, float], Fabric]


def run(
    size: int,
    functions: Sequence[Callable[[Fabric], Any]],
    make_fabric: MakeFabric,
    deadline_seconds: float,
) -> list[Any]:
    """Start one process for each function and wait for all; see ``run_members``."""
    if len(functions) != size:
        raise ValueError(f"{len(functions)} functions for {size} members: give one each.")
    results: dict[int, Any] = {}
    errors: list[BaseException] = []
    with WorkerProcesses(size, _PRELOADED) as workers:
        for rank, function in enumerate(functions):
            workers.start(rank, functools.partial(_member, function, make_fabric, deadline_seconds))
        while workers.alive:
            for worker in workers.wait(timeout_seconds=60.0):
                end = worker.exit
                assert end is not None
                if end.how == FINISHED:
                    results[worker.rank] = end.result
                    continue
                workers.run_state.mark_dead(worker.rank)
                if end.how == DIED:
                    results[worker.rank] = Died(worker.rank, worker.process.exitcode)
                else:
                    errors.append(end.result or RuntimeError(f"rank {worker.rank}: {end.error}"))
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(size)]


def _member(
    function: Callable[[Fabric], Any], make_fabric: MakeFabric, deadline_seconds: float, worker: Worker
) -> Exit:
    take_signals()
    torch.set_num_threads(1)
    try:
        fabric: Any = make_fabric(worker.memory_file, worker.run_state, worker.rank, deadline_seconds)
        result = function(fabric)
    except BaseException as error:
        return Exit.failed(error, result=error)
    # closed only after the result is sent, as the others may still read what this member published
    if hasattr(fabric, "close"):
        worker.afterwards.callback(fabric.close, _LINGER_SECONDS)
    return Exit(FINISHED, result=result)
