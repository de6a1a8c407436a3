"""What Ctrl-C, SIGTERM and a closed terminal do to a run: the first saves and stops it, the second stops it
at once."""

from __future__ import annotations

import contextlib
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from murmurate.fabric.processes.deferred_signals import STOPPING

# A scheduler's SIGTERM may reach a process twice: from the scheduler, which signals all processes of a job,
# and from torchrun, which passes it on.
REPEATED_WITHIN_SECONDS = 5.0


class RepeatedSigterm:
    """Called at each SIGTERM: whether it repeats one that was acted on."""

    def __init__(self) -> None:
        self._acted_at = -math.inf

    def __call__(self) -> bool:
        now = time.monotonic()
        if now - self._acted_at < REPEATED_WITHIN_SECONDS:
            return True
        self._acted_at = now
        return False


class SecondInterrupt(KeyboardInterrupt):
    """A second Ctrl-C or SIGTERM: stop at once."""


class Interruptible(Protocol):
    """What a signal stops: a coordinator, or a simulation's monitor."""

    interrupted: bool
    signal: int

    def stop(self, why: str) -> None: ...


@contextmanager
def signals(coordinator: Interruptible, *, all_saved: bool = False) -> Iterator[None]:
    """Handle Ctrl-C and SIGTERM: the first saves and stops the run; the second, or the first if
    ``all_saved``, raises SecondInterrupt. A SIGTERM within 5 s of another counts as the same.

    After this context, also after an exception, a signal only sets ``interrupted`` (see
    ``signals_restored``), and a further Ctrl-C raises KeyboardInterrupt.
    """

    repeats = RepeatedSigterm()

    def handle(number: int, frame: object) -> None:
        name, is_second = signal.Signals(number).name, coordinator.interrupted
        if number == signal.SIGTERM and repeats():
            return
        coordinator.interrupted, coordinator.signal = True, number
        if all_saved:
            raise SecondInterrupt(f"{name} came after the last checkpoint")
        if is_second:
            raise SecondInterrupt(f"{name} came twice; nothing more was saved")
        coordinator.stop(name)

    def record_signal(number: int, frame: object) -> None:
        if coordinator.interrupted and number == signal.SIGINT:
            raise KeyboardInterrupt  # the user does not want to wait for the cleanup
        coordinator.interrupted, coordinator.signal = True, number

    _install(handle)
    try:
        yield
    finally:
        _install(record_signal)


@contextmanager
def hangup_terminates() -> Iterator[None]:
    """Meanwhile a closed terminal (SIGHUP) has the effect of SIGTERM, unless SIGHUP is ignored, as under
    nohup, or has a handler."""
    number = getattr(signal, "SIGHUP", None)  # Windows has none
    is_main = threading.current_thread() is threading.main_thread()
    if number is None or not is_main or signal.getsignal(number) != signal.SIG_DFL:
        yield
        return
    signal.signal(number, lambda *_: signal.raise_signal(signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(number, signal.SIG_DFL)


@contextmanager
def signals_restored() -> Iterator[None]:
    """Used around a whole run: restores the earlier signal handlers when it ends, and no sooner.

    Torch elastic sends SIGTERM as soon as a rank fails; rank 0 must still report and record that failure.
    """
    earlier_handlers = {number: signal.getsignal(number) for number in STOPPING}
    try:
        with hangup_terminates():
            yield
    finally:
        for number, earlier in earlier_handlers.items():
            if signal.getsignal(number) is not earlier:  # else this is not the main thread, and none was set
                signal.signal(number, earlier or signal.SIG_DFL)


@contextmanager
def signals_ignored() -> Iterator[None]:
    """Meanwhile Ctrl-C and SIGTERM have no effect: for what is short, after a signal that was acted on."""
    with signals_restored():
        _install(lambda *_: None)
        yield


def _install(handler: Callable[[int, object], None]) -> None:
    with contextlib.suppress(ValueError):  # only the main thread may set handlers
        for number in STOPPING:
            signal.signal(number, handler)
