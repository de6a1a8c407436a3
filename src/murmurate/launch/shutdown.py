"""The deadline by which workers must end, and what to do about workers that miss it, being stopped or stuck.

The deadline begins when the run is due to end. With ``--updates`` each member ends by its own count, without
a request; so a run is also due to end once all living replicas have finished, or once some have and the
others send no heartbeats.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from murmurate.errors import RunFailed
from murmurate.fabric.awake import AwakeClock
from murmurate.training.coordinator import Coordinator
from murmurate.training.run import Run
from murmurate.training.worker_context import seconds_to_decision

STOP_DEADLINE_SECONDS = 75.0
ALL_DIED = "all replicas died. See logs/ in the run folder."


def stop_deadline(run: Run) -> float:
    """Seconds for members to stop and save, without the time that writing a replay takes."""
    return STOP_DEADLINE_SECONDS + run.more_seconds()


def allowed_seconds(coordinator: Coordinator) -> float:
    """Seconds from a request to stop until members are killed."""
    until_noticed = seconds_to_decision(coordinator.run, coordinator.run_state)
    return stop_deadline(coordinator.run) + coordinator.saving_seconds + until_noticed


def members_to_kill(coordinator: Coordinator, late: Sequence[int]) -> Sequence[int]:
    """Which of the ``late`` members to kill: those that have not finished, for which others may wait in order
    to save; if there are none, those that have finished but not ended. Each is recorded as an event.

    Raises RunFailed if no member has finished: it is unknown then which one delays the others.
    """
    run_state, allowed = coordinator.run_state, allowed_seconds(coordinator)
    if not any(run_state.has_finished(rank) for rank in range(run_state.size)):
        raise RunFailed(
            f"no replica stopped within {allowed:.0f} s, and all were killed. See logs/ in the run folder."
        )
    unfinished = [rank for rank in late if not run_state.has_finished(rank)]
    # replicas before the centre, which ends after them, as it waits for all that are not known to be dead
    chosen = [rank for rank in unfinished if rank < coordinator.run.replicas] or unfinished or late
    for rank in chosen:
        message = f"{coordinator.name(rank)} did not stop within {allowed:.0f} s and is killed"
        coordinator.event("killed", message, member=rank)
    return chosen


class Shutdown:
    """The deadline of one run, or of one epoch. Call ``is_overdue`` a few times a second."""

    def __init__(self, coordinator: Coordinator, clock: Callable[[], float] = time.monotonic) -> None:
        self.coordinator, self.run_state, self.run = coordinator, coordinator.run_state, coordinator.run
        self._clock = AwakeClock(clock)
        # the last heartbeat of each replica, and when it was seen
        self._beats = [(0, self._clock.now())] * self.run.replicas
        self._since: float | None = None

    def is_overdue(self) -> bool:
        """Whether the deadline has passed. After it has returned True once, a new deadline begins."""
        now = self._clock.now()
        self._read_heartbeats(now)
        if not self._is_due_to_end(now):
            self._since = None
            return False
        if self._since is None:
            self._since = now
        if now - self._since <= allowed_seconds(self.coordinator):
            return False
        self._since = None
        return True

    def _is_due_to_end(self, now: float) -> bool:
        replicas = range(self.run.replicas)
        finished = [rank for rank in replicas if self.run_state.has_finished(rank)]
        unfinished = [rank for rank in replicas if self.run_state.is_alive(rank) and rank not in finished]
        if self.coordinator.should_end or not unfinished:
            return True
        last_beats = [self._beats[rank][1] for rank in unfinished]
        return bool(finished) and all(now - beat > self.run.hang_after_seconds for beat in last_beats)

    def _read_heartbeats(self, now: float) -> None:
        for rank, (last, _) in enumerate(self._beats):
            beats = self.run_state.beats(rank)
            if beats != last:
                self._beats[rank] = beats, now
