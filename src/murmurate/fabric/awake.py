"""A clock for deadlines on other processes, which stands still while this process is stopped."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

ASLEEP_SECONDS = 1.0


class AwakeClock:
    """Seconds as ``clock`` counts them, less those for which this process was stopped, by Ctrl-Z for
    instance: the others may have been stopped with it, and their silence meanwhile means nothing.

    ``now`` must be called a few times a second, by any threads: of the time between two calls at most
    ``ASLEEP_SECONDS`` count.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._read_at = clock()
        self._asleep = 0.0
        self._lock = threading.Lock()

    def now(self) -> float:
        with self._lock:
            now = self._clock()
            self._asleep += max(now - self._read_at - ASLEEP_SECONDS, 0.0)
            self._read_at = now
            return now - self._asleep
