"""The process that all workers of this host are forked from: it imports torch once for all of them.

It needs nothing of this package to begin, so the command line asks for it first of all: it then imports what
workers need while the launcher, beside it, imports what a launcher needs.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Sequence
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerContext
from typing import Any

from murmurate.errors import Refusal

OF_RUNS = ("murmurate.launch.preloaded",)
_ahead: int | None = None  # the process that was begun ahead of time, as long as nobody has asked for it


def fork_server(preload: Sequence[str] = OF_RUNS) -> ForkServerContext:
    """Running, from now on if it was not. Raises Refusal where it cannot.

    preload: modules that it imports before the first fork; of no effect where it runs already.
    """
    global _ahead
    context = _running(preload)
    _ahead = None
    return context


def begin_fork_server(arguments: Sequence[str]) -> None:
    """``fork_server`` ahead of time, for a command that starts workers on this host unless these arguments
    name another launcher. An error is raised when the fork server is needed."""
    global _ahead
    if any(word.startswith("--launcher") for word in arguments):
        return
    threads, before = os.environ.get("OMP_NUM_THREADS"), _pid()
    with contextlib.suppress(Refusal):
        _running(OF_RUNS)
    if _pid() != before:
        _ahead = _pid()
    if threads is None:  # this process has its own torch to begin
        os.environ.pop("OMP_NUM_THREADS", None)


def end_fork_server() -> None:
    """End a fork server that was begun ahead of time for nothing: until its imports are done it would hold
    the command's output open."""
    global _ahead
    if _ahead is not None and _ahead == _pid():
        with contextlib.suppress(ProcessLookupError):
            os.kill(_ahead, signal.SIGKILL)
        with contextlib.suppress(OSError, AttributeError):
            _server()._stop()  # reaps it, so that a later command begins another one
    _ahead = None


def _running(preload: Sequence[str]) -> ForkServerContext:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch makes its pools in the fork server
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    # A scheduler's SIGTERM goes to every process, and with the fork server all news of the workers would be
    # lost: it inherits blocked SIGINT and SIGTERM. Signals of this moment reach the launcher right after it.
    # The tracker's own start would unblock them again, so it comes first.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        forkserver.ensure_running()
    except OSError as error:
        raise Refusal(
            f"no fork server can be started in {tempfile.gettempdir()} ({error}). "
            "Set TMPDIR to a short path that can be written to, such as /tmp."
        ) from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return context


def _server() -> Any:
    return getattr(forkserver, "_forkserver", None)


def _pid() -> int | None:
    found: int | None = getattr(_server(), "_forkserver_pid", None)
    return found
