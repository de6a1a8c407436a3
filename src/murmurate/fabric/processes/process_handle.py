"""Handles of processes that this one observes and ends without being their parent."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from multiprocessing.connection import wait

import psutil


def is_stopped(pid: int | None) -> bool:
    """Whether SIGSTOP, or a terminal's Ctrl-Z, has stopped the process."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    except psutil.Error:
        return False


class ProcessHandle:
    """A handle of one process (a pidfd, Linux 5.3), which never refers to a later process with the same pid.

    ``multiprocessing.connection.wait`` can wait for it.
    """

    def __init__(self, pid: int) -> None:
        try:
            self._descriptor: int | None = os.pidfd_open(pid)
        except ProcessLookupError:  # the process has ended; a null device is always ready, as if it had ended
            self._descriptor = os.open(os.devnull, os.O_RDONLY)

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
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(self._descriptor, number)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def end_forked_processes_with_this_one() -> None:
    """From now on, let the processes that this one forks end when it ends, however it ends."""
    # a data loader's worker watches for its parent's death only once it has started, so could miss it
    parent = ProcessHandle(os.getpid())

    def exit_with_parent() -> None:
        parent.wait()
        os._exit(1)

    def watch() -> None:
        threading.Thread(target=exit_with_parent, daemon=True).start()

    os.register_at_fork(after_in_child=watch)
