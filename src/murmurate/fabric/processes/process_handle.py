"""Handles of processes that this one observes and ends without being their parent."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import threading
from multiprocessing.connection import wait
from typing import Any

import psutil

from murmurate.errors import Refusal
from murmurate.native.system_calls import pidfd_open, pidfd_send_signal

# open files that a process costs the one that starts it: two by which each learns of the other's end, a pipe
# for its report, and its handle
_FILES_OF_PROCESS = 4


def is_stopped(pid: int | None) -> bool:
    """Whether SIGSTOP, or a terminal's Ctrl-Z, has stopped the process."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    except psutil.Error:
        return False


class ProcessHandle:
    """A handle of one process. ``multiprocessing.connection.wait`` can wait for it.

    It is a pidfd (Linux 5.3), which never refers to a later process with the same pid. On macOS, which has
    none, it is a kqueue that reports the end of the process. Raises OSError where the system refuses that.
    """

    def __init__(self, pid: int) -> None:
        self._pid, self._queue = pid, None
        self._descriptor: int | None = None
        try:
            if has_kqueue():
                self._queue = _queue_of_end(pid)
                self._descriptor = self._queue.fileno()
            else:
                self._descriptor = pidfd_open(pid)
        except ProcessLookupError:  # the process has ended
            self._descriptor, write = os.pipe()
            os.close(write)  # so the pipe's other end is always ready, as if the process had ended just now

    def fileno(self) -> int:
        if self._descriptor is None:
            raise ValueError("the handle is closed")
        return self._descriptor

    def has_ended(self) -> bool:
        return self._descriptor is None or bool(wait([self.fileno()], 0))

    def wait(self) -> None:
        if self._descriptor is not None:
            wait([self._descriptor])

    def send(self, number: signal.Signals) -> None:
        """Send a signal; no effect if the process has ended."""
        if self._descriptor is None:
            return
        with contextlib.suppress(OSError):
            if self._queue is None:
                pidfd_send_signal(self._descriptor, number)
            elif not self.has_ended():
                os.kill(self._pid, number)

    def close(self) -> None:
        if self._queue is not None:
            self._queue.close()
        elif self._descriptor is not None:
            os.close(self._descriptor)
        self._queue = self._descriptor = None

    def in_forked_process(self) -> ProcessHandle:
        """This handle, in a process that was forked since: kqueues are not inherited."""
        return self if self._queue is None else ProcessHandle(self._pid)


def has_kqueue() -> bool:
    """Whether processes are watched by a kqueue, as on macOS."""
    return hasattr(select, "kqueue")


def refuse_without_handles() -> None:
    """Raises Refusal where no process can be watched, and so none may be started."""
    try:
        ProcessHandle(os.getpid()).close()
    except OSError as error:
        what = "a kqueue for the end of a process" if has_kqueue() else "pidfd_open (Linux 5.3)"
        raise Refusal(
            f"Processes cannot be watched for their end here: {what} failed ({error}). Use a newer system, "
            "or for a run --launcher inline, which starts no processes."
        ) from error


def refuse_too_few_files(processes: int) -> None:
    """Raises Refusal if this process may not open as many files as it needs to start ``processes`` more."""
    needed = psutil.Process().num_fds() + processes * _FILES_OF_PROCESS
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed != resource.RLIM_INFINITY and needed > allowed:
        raise Refusal(
            f"{processes} processes need at least {needed:,} open files, and {allowed:,} are allowed. Raise "
            f"the limit (ulimit -n {1 << needed.bit_length()}), or use fewer replicas."
        )


def _queue_of_end(pid: int) -> Any:
    """A kqueue that is ready once the process has ended. Raises ProcessLookupError if it had ended before."""
    kernel: Any = select  # these names exist on macOS alone
    queue = kernel.kqueue()
    try:
        # its only event is never taken out of it, so it stays ready
        queue.control([kernel.kevent(pid, kernel.KQ_FILTER_PROC, kernel.KQ_EV_ADD, kernel.KQ_NOTE_EXIT)], 0)
    except BaseException:
        queue.close()
        raise
    return queue


def end_forked_processes_with_this_one() -> None:
    """From now on, let the processes that this one forks end when it ends, however it ends."""
    # a data loader's worker watches for its parent's death only once it has started, so could miss it
    parent = ProcessHandle(os.getpid())

    def exit_with(handle: ProcessHandle) -> None:
        handle.wait()
        os._exit(1)

    def watch() -> None:
        handle = parent.in_forked_process()
        threading.Thread(target=exit_with, args=(handle,), daemon=True).start()

    os.register_at_fork(after_in_child=watch)
