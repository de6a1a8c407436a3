"""When a run ought to have ended: whoever is still there holds it up, and may be stopped or stuck for ever.

Nothing asks the members of a run of ``--updates`` to end: each does so by its own count. So a run also ought
to be ending once all living replicas have finished, or all that have not give no sign of life.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from murmurate.launch.failure_detector import CAP_SECONDS
from murmurate.training.coordinator import Coordinator

STOP_DEADLINE_SECONDS = 75.0  # longer than the fabric's, which can name a culprit
_ASLEEP_SECONDS = 1.0


class Ending:
    """Of one run, or of one epoch of it. Ask ``is_overdue`` a few times a second."""

    def __init__(self, coordinator: Coordinator, clock: Callable[[], float] = time.monotonic) -> None:
        self.coordinator, self.run_state, self.run = coordinator, coordinator.run_state, coordinator.run
        self._clock = clock
        self._asked_at = clock()
        self._beats = [(0, clock())] * self.run.replicas  # what was last heard of each, and when
        self._since: float | None = None

    def is_overdue(self) -> bool:
        """Whether the deadline has passed since the run ought to be ending; once, then it begins anew."""
        now = self._clock()
        self._listen(now)
        if not self._ought_to_end(now):
            self._since = None
            return False
        if self._since is None:
            self._since = now
        if now - self._since <= STOP_DEADLINE_SECONDS + self.coordinator.saving_seconds:
            return False
        self._since = None
        return True

    def _ought_to_end(self, now: float) -> bool:
        replicas = range(self.run.replicas)
        finished = [rank for rank in replicas if self.run_state.has_finished(rank)]
        left = [rank for rank in replicas if self.run_state.is_alive(rank) and rank not in finished]
        if self.coordinator.is_due or not left:
            return True
        return bool(finished) and all(now - self._beats[rank][1] > CAP_SECONDS for rank in left)

    def _listen(self, now: float) -> None:
        # nobody listened, as when all of us were stopped by Ctrl-Z: nothing can be held against them
        woke = now - self._asked_at > _ASLEEP_SECONDS
        self._asked_at = now
        for rank, (known, _) in enumerate(self._beats):
            beats = self.run_state.beats(rank)
            if woke or beats != known:
                self._beats[rank] = beats, now
