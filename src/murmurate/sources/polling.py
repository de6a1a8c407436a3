"""What processes of a learner have in common: how they begin, and how they wait for one another through
shared memory. Nothing here needs torch."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import sys
import threading
import time
from typing import Any

_SHORTEST_SECONDS, LONGEST_SECONDS = 1e-4, 2e-3


class Backoff:
    """Sleeps for polling. The first sleep of a wait is half as long as all sleeps of the last wait together,
    each further one a quarter of what this wait has slept so far.

    So a wait that is not much shorter than the last one ends at most a quarter too late. With sleeps that
    double it may last twice as long as needed; an actor and a learner that wait for each other's next
    trajectory then both wait longer each time. Sleeping leaves the core and its caches to the process that is
    waited for.
    """

    def __init__(self, longest_seconds: float = LONGEST_SECONDS) -> None:
        self._longest = longest_seconds
        self._seconds, self._slept = _SHORTEST_SECONDS, 0.0

    def sleep(self) -> float:
        """Sleep; returns for how many seconds."""
        begun, seconds = time.monotonic(), self._seconds
        time.sleep(seconds)
        self._slept += seconds
        self._seconds = min(max(self._slept / 4, _SHORTEST_SECONDS), self._longest)
        return time.monotonic() - begun

    def reset(self) -> None:
        """To be called when the wait has ended."""
        self._seconds = min(max(self._slept / 2, _SHORTEST_SECONDS), self._longest)
        self._slept = 0.0


def settings_of_learner() -> Any:
    """What the learner sends over stdin. From now on this process exits when the learner does, and ignores
    SIGINT: the launcher decides what Ctrl-C means."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pipe = sys.stdin.buffer
    settings = pickle.load(pipe)

    def exit_with_learner() -> None:
        pipe.read()  # returns when the learner's end is closed, however the learner exits
        os._exit(0)

    threading.Thread(target=exit_with_learner, daemon=True).start()
    return settings


def use_batch_scheduling() -> None:
    """Schedule this process as SCHED_BATCH (Linux): it does not preempt a running process when it wakes up.
    Two learners that share two cores with four actors then draw a third more batches."""
    if hasattr(os, "SCHED_BATCH") and os.sched_getscheduler(0) == os.SCHED_OTHER:  # not chosen by the user
        with contextlib.suppress(OSError):  # it may be forbidden
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
