"""Signals that wait while something is done that must not be cut short."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

STOPPING = (signal.SIGINT, signal.SIGTERM)  # the signals by which users and schedulers stop a process


@contextmanager
def signals_deferred() -> Iterator[None]:
    """Meanwhile SIGINT and SIGTERM wait: what a handler raises within a library's call may be lost in it."""
    if threading.current_thread() is not threading.main_thread():  # only the main one runs handlers
        yield
        return
    received: list[int] = []
    handlers = {n: signal.signal(n, lambda number, _: received.append(number)) for n in STOPPING}
    try:
        yield
    finally:
        for name, handler in handlers.items():
            signal.signal(name, handler or signal.SIG_DFL)
        for number in received:
            signal.raise_signal(number)
