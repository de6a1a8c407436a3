"""The fork server: the process from which all workers of a host are forked, so torch is imported only once.

The command line, which has imported nothing yet, imports what workers need and forks the server from itself.
Elsewhere the server is a new interpreter.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import multiprocessing
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator, Sequence
from multiprocessing import connection, forkserver, resource_tracker
from multiprocessing.context import ForkServerContext
from multiprocessing.util import get_temp_dir
from typing import Any, NamedTuple

import psutil

from murmurate.errors import Refusal
from murmurate.fabric.processes import preloaded_first
from murmurate.fabric.processes.process_handle import is_stopped

PRELOADED_BY_RUNS = ("murmurate.launch._preloaded",)
REPORT_SECONDS = 2.0  # for the fork server to report an exit code; it may be stopped, or killed
UNKNOWN_CODE = 255  # multiprocessing's exit code of a process whose fork server has ended
# since Python 3.14, a fork server asks for a key, which only the process that started it has
_ASKS_FOR_KEY = sys.version_info >= (3, 14)
_early_pid: int | None = None  # pid of a fork server that was started early and is not in use yet


def fork_server(preload: Sequence[str] = PRELOADED_BY_RUNS) -> ForkServerContext:
    """The context of the fork server, started if necessary. Raises Refusal where that fails, and in a daemon
    of ``multiprocessing``, which may start no processes.

    preload: modules that it imports before the first fork; no effect if it is running already.
    """
    global _early_pid
    if multiprocessing.current_process().daemon:
        raise Refusal(
            "this process is a daemon, as those of multiprocessing.Pool are, and may start no processes. Use "
            "concurrent.futures.ProcessPoolExecutor in place of the pool, or for a run --launcher inline."
        )
    main = sys.modules["__main__"]
    if getattr(main, "__file__", None) == "<stdin>":  # each process would look for a script of this name
        del main.__file__
    context = _ensure_running(preload)
    _early_pid = None
    return context


def begin_fork_server(arguments: Sequence[str]) -> None:
    """Start the fork server early, for a command that starts workers on this host; not if the command's
    arguments name a launcher. Errors are raised later, by ``fork_server``."""
    global _early_pid
    if any(argument.startswith("--launcher") for argument in arguments):
        return
    threads_given, pid_before = "OMP_NUM_THREADS" in os.environ, _pid()
    forks = _may_fork()
    with contextlib.suppress(Refusal):
        _ensure_running(PRELOADED_BY_RUNS, forks)
    if _pid() != pid_before:
        _early_pid = _pid()
    # torch was imported with the workers' one thread, and this process itself may use more
    if forks and not threads_given and (torch := sys.modules.get("torch")):
        cores = psutil.cpu_count(logical=False) or 1
        torch.set_num_threads(min(cores, len(os.sched_getaffinity(0))))


def end_fork_server() -> None:
    """End a fork server that was started early and not used: otherwise it would hold the command's output
    open until its imports are done."""
    global _early_pid
    if _early_pid is not None and _early_pid == _pid():
        _kill()
    _early_pid = None


def end_stopped_fork_server() -> None:
    """End a fork server that SIGSTOP has stopped: starting a worker would wait for it, and it would remain
    after the run. The next start of a worker starts another fork server."""
    if _pid() is not None and is_stopped(_pid()):
        _kill()


def usable_fork_server() -> int | None:
    """The pid of the fork server that this process has started, or was forked from; None if it may not use
    one, as a daemon of ``multiprocessing``."""
    if _ASKS_FOR_KEY or multiprocessing.current_process().daemon:
        return None
    return None if getattr(_server(), "_forkserver_address", None) is None else _pid() or os.getppid()


@contextlib.contextmanager
def workers_on_one_core() -> Iterator[None]:
    """Meanwhile all workers that are started share one core, with the processes that they start. Not where
    ``os`` lacks ``sched_setaffinity``, as on macOS."""
    fork_server()
    pid = _pid()
    assert pid is not None, "the fork server is this process's own"
    usable = os.sched_getaffinity(pid)
    os.sched_setaffinity(pid, {max(usable)})
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):  # it was killed, and the next one is not bound
            os.sched_setaffinity(pid, usable)


@contextlib.contextmanager
def using_existing_fork_server() -> Iterator[None]:
    """Use the fork server that there is: ``multiprocessing`` would start another one for a process that was
    itself forked from one."""
    server = _server()
    server.ensure_running = lambda: None
    try:
        yield
    finally:
        del server.ensure_running


class ProcessSettings(NamedTuple):
    """What a process takes over from the one that starts it: the fork server has what was set when it began.

    start_method: of ``multiprocessing``; None if it is not set. own_folder: see the function of that name.
    """

    start_method: str | None
    environment: dict[str, str]
    own_folder: str

    def adopt(self) -> None:
        """Let them be this process's, too."""
        # A data loader's workers start as they would in the launcher, by default as children of this process.
        # Otherwise this process would start a fork server of its own for them, which would outlive it.
        multiprocessing.set_start_method(self.start_method, force=True)
        os.environ.clear()
        os.environ.update(self.environment)


def own_folder() -> str:
    """The folder of this process's sockets, which those that outlive it are to remove; empty if it is that of
    the process that started this one by ``multiprocessing``, which still needs it."""
    return get_temp_dir() if multiprocessing.parent_process() is None else ""


@contextlib.contextmanager
def settings_to_adopt() -> Iterator[ProcessSettings]:
    """This process's settings. A new process learns the start method by name, and would not know one that a
    library has added, as joblib does in its workers: in place of that it is told another, and the value is
    None."""
    environment = {"OMP_NUM_THREADS": "1", **os.environ}  # as the fork server has it
    method = multiprocessing.get_start_method(allow_none=True)
    if method is None or method in multiprocessing.get_all_start_methods():
        yield ProcessSettings(method, environment, own_folder())
        return
    multiprocessing.set_start_method("forkserver", force=True)
    try:
        yield ProcessSettings(None, environment, own_folder())
    finally:
        multiprocessing.set_start_method(method, force=True)


def _kill() -> None:
    with contextlib.suppress(ProcessLookupError, TypeError):
        os.kill(_pid(), signal.SIGKILL)  # type: ignore[arg-type]
    with contextlib.suppress(OSError, AttributeError):
        _server()._stop()  # waits for the killed process, so that it is no zombie


def _may_fork() -> bool:
    """Whether the fork server can be forked from this process: not from one with threads, nor where the
    user's code has imported torch, and may have used a GPU."""
    return (
        sys.platform == "linux"
        and not _ASKS_FOR_KEY
        and _pid() is None
        and "torch" not in sys.modules
        and psutil.Process().num_threads() == 1
    )


def _ensure_running(preload: Sequence[str], forks: bool = False) -> ForkServerContext:
    threads_given = "OMP_NUM_THREADS" in os.environ
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch makes its thread pools in the fork server
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([preloaded_first.__name__, *preload])
    # A scheduler sends SIGTERM to every process, and without the fork server the launcher would not learn how
    # its workers end. So SIGINT and SIGTERM are blocked while the fork server starts, and it inherits that.
    # If one arrives meanwhile, the launcher gets it afterwards. Starting the resource tracker would unblock
    # them, so the tracker is started first. SIGHUP, which a closed terminal sends to all, stays blocked in
    # workers and in the tracker.
    mask_before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    try:
        resource_tracker.ensure_running()
        if forks:
            gc.disable()  # as in preloaded_first
            try:
                # numpy first: torch, where it imports numpy, swallows a Ctrl-C
                for module in ("numpy", *preload):
                    importlib.import_module(module)
            finally:
                gc.enable()
            gc.freeze()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        if folder := own_folder():
            os.environ[preloaded_first.VARIABLE] = folder
        if forks:
            _fork()
        else:
            forkserver.ensure_running()
    except OSError as error:
        raise Refusal(
            f"no fork server can be started in {tempfile.gettempdir()} ({error}). "
            "Set TMPDIR to a short path that can be written to, such as /tmp."
        ) from error
    finally:
        os.environ.pop(preloaded_first.VARIABLE, None)
        if not threads_given:  # this process itself may use more, and the number is the default of later runs
            os.environ.pop("OMP_NUM_THREADS", None)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask_before)
    return context


def _fork() -> None:
    """Fork the server from this process, and register it as if ``multiprocessing`` had started it."""
    address = connection.arbitrary_address("AF_UNIX")  # type: ignore[attr-defined]
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        os.chmod(address, 0o600)
        listener.listen()
        alive_read, alive_write = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.close(alive_write)
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                forkserver.main(listener.fileno(), alive_read, [])
            finally:  # not in the workers that it forks
                shutil.rmtree(own_folder(), ignore_errors=True)
                os._exit(0)
        os.close(alive_read)
    server = _server()
    server._forkserver_address, server._forkserver_alive_fd = address, alive_write
    server._forkserver_pid = pid


def _server() -> Any:
    return getattr(forkserver, "_forkserver", None)


def _pid() -> int | None:
    pid: int | None = getattr(_server(), "_forkserver_pid", None)
    return pid
