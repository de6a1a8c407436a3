"""The failure detector of local runs: it kills the processes of silent members, and lets new ones join.

A silent member's process is killed, so that it cannot send anything to the others any more. A new process
takes its place, and joins with a living peer's state (docs/decisions/0010).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from murmurate.fabric.processes.run_state import TransferRequest
from murmurate.fabric.processes.spawn import WorkerProcess, WorkerProcesses
from murmurate.launch.heartbeats import HeartbeatMonitor
from murmurate.training.coordinator import Coordinator

REJOINS = 3  # how often a silent rank may be replaced; other deaths count against ``Run.restarts``
OVER, EXCLUDED = "the run was over", "silent, and excluded"  # why a worker is killed
RETRIED = "retried"  # why a joiner is killed whose donor may have died; it is started again


class FailureDetector:
    """Follows the heartbeats of one run's members, kills silent ones, and lets new ones join. Call ``poll`` a
    few times a second.

    start_again: function that starts a new process for a rank whose last one has ended; the new process waits
    for a peer's state.
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
        self._heartbeats = HeartbeatMonitor(coordinator, clock)
        self._restarts: Counter[int] = Counter()
        self._rejoins: Counter[int] = Counter()
        self._request: TransferRequest | None = None
        self._deaths = 0
        self._deaths_at_request = 0

    def poll(self) -> None:
        running = [w for w in self.workers.by_rank.values() if not w.ended and not w.killed_because]
        for worker in self._heartbeats.poll(running):
            worker.kill(EXCLUDED)
        if self._is_over():
            for worker in self.workers.by_rank.values():
                if self._is_joining(worker) and not worker.killed_because:
                    worker.kill(OVER)
        else:
            self._admit_joiner()

    # -- deaths and joining -------------------------------------------------------------------------

    def died(self, worker: WorkerProcess) -> None:
        """Called after ``worker`` has ended and was marked dead: replace it if that is allowed."""
        self._deaths += 1
        rank = worker.rank
        self._heartbeats.forget(rank)
        if self._request is not None and self._request.joiner == rank:
            self._clear_request()
        if self._is_over() or self.run_state.has_finished(rank) or not self._peers():
            return
        if worker.killed_because == EXCLUDED and self._rejoins[rank] < REJOINS:
            self._rejoins[rank] += 1
        elif worker.killed_because == RETRIED:
            pass
        elif self._restarts[rank] < self.run.restarts:
            self._restarts[rank] += 1
        else:
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
        return self.coordinator.should_end or all(
            w.ended or self.run_state.has_finished(w.rank) for w in replicas
        )

    def _is_joining(self, worker: WorkerProcess) -> bool:
        return worker.joins and not worker.ended and not self.run_state.has_entered(worker.rank)

    def _donors(self) -> list[int]:
        """The replicas that can send their state to a joiner now."""
        return [rank for rank in self._peers() if not self._heartbeats.is_silent(rank)]

    def _peers(self) -> list[int]:
        """The replicas that can do so now, or once they are no longer silent."""
        return [
            worker.rank
            for worker in self.workers.by_rank.values()
            if worker.rank < self.run.replicas
            and not worker.ended
            and not self._is_joining(worker)
            and not self.run_state.has_finished(worker.rank)
        ]

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
            # alive from now on: members that run the same rounds may include it as soon as they agree
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
        if self._heartbeats.is_silent(request.joiner) and not joiner.killed_because:
            joiner.kill(EXCLUDED)  # it must not take long to join, as no checkpoint is made meanwhile
        if self.run_state.has_transferred(request.donor, request.number):
            return
        if self.run.strategy.synchronous:
            # the others may have admitted the joiner already and wait for it, while its donor may have died
            if self._deaths != self._deaths_at_request and not joiner.killed_because:
                joiner.kill(RETRIED)
        elif request.donor not in (donors := self._donors()) and donors:
            self._request_transfer(request.joiner, donors[0])

    def _clear_request(self) -> None:
        self._request = None
        self.coordinator.is_admitting = False
