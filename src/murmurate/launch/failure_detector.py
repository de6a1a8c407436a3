"""The failure detector of local runs: which members are silent, excluded, or admitted (docs/decisions/0010).

A member sends heartbeats while it works and while it waits for others, so only one that is stopped, or stuck
in native code, sends none. It is *silent* then, which is reported; the others go on under an asynchronous
strategy, and so does it when it wakes. In a synchronous round it holds up all others, and is *excluded* at a
deadline that follows the times that rounds have taken: its process is ended, so that nothing of it can reach
a later round, and started again to join with a living peer's state.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from murmurate.fabric.processes.run_state import TransferRequest
from murmurate.fabric.processes.spawn import WorkerProcess, WorkerProcesses
from murmurate.training.coordinator import Coordinator

FLOOR_SECONDS = 5.0
CAP_SECONDS = 45.0  # below the fabric's own deadline, which ends the run
ROUNDS = 20.0
REJOINS = 3
OVER = "the run was over"
_ASLEEP_SECONDS = 1.0


def patience(pace_seconds: float) -> float:
    """How long a member may send no heartbeat when rounds take ``pace_seconds`` (a high quantile).

    0: not known yet; the cap then applies.
    """
    return min(max(ROUNDS * pace_seconds, FLOOR_SECONDS), CAP_SECONDS) if pace_seconds > 0 else CAP_SECONDS


@dataclass
class Heartbeats:
    """The last heartbeat of one member."""

    beats: int = 0
    since: float = 0.0
    silent: bool = False


class FailureDetector:
    """Follows the heartbeats of one run's members, and keeps its membership: ``poll`` it a few times a
    second.

    start_again: starts a process for a rank whose last one has ended; it waits for a peer's state.
    """

    def __init__(
        self,
        workers: WorkerProcesses,
        coordinator: Coordinator,
        start_again: Callable[[int], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.workers, self.coordinator, self.run_state = workers, coordinator, coordinator.run_state
        self.run = coordinator.run
        self._start_again = start_again
        self._heartbeats = [Heartbeats() for _ in range(self.run.members)]
        self._clock = clock
        self._polled_at = clock()
        self._restarts: Counter[int] = Counter()
        self._rejoins: Counter[int] = Counter()
        self._request: TransferRequest | None = None
        self._deaths = 0
        self._deaths_at_request = 0

    def poll(self) -> None:
        now = self._clock()
        if now - self._polled_at > _ASLEEP_SECONDS:
            # this process, too, was stopped, by Ctrl-Z for instance: missed heartbeats then mean nothing
            for heartbeat in self._heartbeats:
                heartbeat.since = now
        self._polled_at = now
        for worker in self.workers.by_rank.values():
            if not worker.ended and not self.run_state.has_finished(worker.rank):
                self._check_heartbeat(worker, self._heartbeats[worker.rank], now)
        if self._is_over():
            self._kill_joiners()
        else:
            self._admit_joiner()

    # -- heartbeats ----------------------------------------------------------------------------------

    def _check_heartbeat(self, worker: WorkerProcess, heartbeat: Heartbeats, now: float) -> None:
        beats = self.run_state.beats(worker.rank)
        name = self.coordinator.name(worker.rank)
        if beats != heartbeat.beats or beats == 0:  # a member that is still being built sends none
            if heartbeat.silent:
                silent_seconds = now - heartbeat.since
                message = f"{name} answers again after {silent_seconds:.1f} s"
                self.coordinator.event("woke", message, member=worker.rank)
            heartbeat.beats, heartbeat.since, heartbeat.silent = beats, now, False
            return
        silent_seconds = now - heartbeat.since
        if silent_seconds > self._silence_allowed(worker.rank) / 2 and not heartbeat.silent:
            heartbeat.silent = True
            consequence = "the others wait for it" if self._blocks_others() else "the others go on"
            message = f"{name} has sent no heartbeat for {silent_seconds:.1f} s; {consequence}"
            self.coordinator.event("silent", message, member=worker.rank)
        saving = self.coordinator.is_saving or self.coordinator.is_admitting
        allowed = self._silence_allowed(worker.rank, saving)
        if silent_seconds > allowed and self._blocks_others() and not worker.killed_because:
            message = f"{name} was silent for {silent_seconds:.1f} s in a synchronous round and is excluded"
            self.coordinator.event("excluded", message, member=worker.rank, deadline_seconds=allowed)
            worker.kill("excluded")

    def _silence_allowed(self, rank: int, saving: bool = False) -> float:
        if self.run_state.pace(rank) == 0:
            return CAP_SECONDS
        seconds = patience(max(self.run_state.pace(member) for member in self.run_state.living()))
        if saving:  # a slow disk is no silence
            slowest = self.coordinator.slowest_save_seconds
            seconds = CAP_SECONDS if slowest is None else min(seconds + 4 * slowest, CAP_SECONDS)
        return seconds

    def _blocks_others(self) -> bool:
        return self.run.strategy.synchronous and self.run.members > 1

    # -- deaths and joining -------------------------------------------------------------------------

    def died(self, worker: WorkerProcess) -> None:
        """Called after ``worker`` has ended and is marked dead: restart it if that is allowed."""
        self._deaths += 1
        rank = worker.rank
        self._heartbeats[rank] = Heartbeats(since=self._clock())
        if self._request is not None and self._request.joiner == rank:
            self._clear_request()
        if self._is_over() or not self._donors():
            return
        if worker.killed_because == "excluded" and self._rejoins[rank] < REJOINS:
            self._rejoins[rank] += 1
        elif self._restarts[rank] < self.run.restarts:
            self._restarts[rank] += 1
        elif worker.killed_because != "retried":
            return
        incarnation = self.run_state.begin_incarnation(rank)
        message = f"replica {rank} is started again, and takes a living peer's state"
        self.coordinator.event("restarted", message, member=rank, life=incarnation)
        self._start_again(rank)

    def _is_over(self) -> bool:
        replicas = [
            worker
            for worker in self.workers.by_rank.values()
            if worker.rank < self.run.replicas and not self._is_joining(worker)
        ]
        return self.coordinator.is_due or all(
            w.ended or self.run_state.has_finished(w.rank) for w in replicas
        )

    def _is_joining(self, worker: WorkerProcess) -> bool:
        return worker.joins and not worker.ended and not self.run_state.has_entered(worker.rank)

    def _donors(self) -> list[int]:
        return [
            worker.rank
            for worker in self.workers.by_rank.values()
            if worker.rank < self.run.replicas
            and not worker.ended
            and not self._is_joining(worker)
            and not self.run_state.has_finished(worker.rank)
            and not self._heartbeats[worker.rank].silent
        ]

    def _kill_joiners(self) -> None:
        for worker in self.workers.by_rank.values():
            if self._is_joining(worker) and not worker.killed_because:
                worker.kill(OVER)

    def _admit_joiner(self) -> None:
        """Request a living peer's state for one joiner at a time, and follow the transfer."""
        if self._request is not None:
            self._follow(self._request)
            return
        waiting = [
            rank
            for rank, worker in self.workers.by_rank.items()
            if self._is_joining(worker) and self.run_state.is_ready(rank)
        ]
        donors = self._donors()
        if waiting and donors and not self.coordinator.is_saving:
            # alive from here on: members with common rounds may count with it as soon as they agree
            self.run_state.revive(waiting[0])
            self._request_transfer(waiting[0], donors[0])

    def _request_transfer(self, joiner: int, donor: int) -> None:
        self.coordinator.is_admitting = True
        self._deaths_at_request = self._deaths
        self._request = self.run_state.request_transfer(joiner, donor)

    def _follow(self, request: TransferRequest) -> None:
        if self.run_state.has_entered(request.joiner):
            self.coordinator.joined(request.joiner, request.donor)
            self._clear_request()
            return
        joiner = self.workers.by_rank[request.joiner]
        if self._heartbeats[request.joiner].silent and not joiner.killed_because:
            joiner.kill("retried")  # while it is joining, no checkpoint is made
        if self.run_state.has_transferred(request.donor, request.number):
            return
        if self.run.strategy.synchronous:
            # the others may have admitted the joiner already and wait for it, while it waits for a dead donor
            if self._deaths != self._deaths_at_request and not joiner.killed_because:
                joiner.kill("retried")
        elif request.donor not in (donors := self._donors()) and donors:
            self._request_transfer(request.joiner, donors[0])

    def _clear_request(self) -> None:
        self._request = None
        self.coordinator.is_admitting = False
