"""A run's centre: the member that does not learn but runs the strategy's ``serve``."""

from __future__ import annotations

import time

import torch

from murmurate.fabric.interface import Channel
from murmurate.fabric.processes.run_state import sending_heartbeats
from murmurate.record.step_timer import StepTimer
from murmurate.replicator.learner import Learner
from murmurate.training.checkpoint import write_part
from murmurate.training.divergence import Probe
from murmurate.training.members import learner_of
from murmurate.training.place import FollowedFolder
from murmurate.training.rejoin import Pace
from murmurate.training.restore import refusing_misfits, replicator_of
from murmurate.training.run import Run
from murmurate.training.schedules import SharedSchedules
from murmurate.training.worker_context import (
    FINAL,
    FINAL_REQUEST,
    WorkerContext,
    drain_seconds,
    member_state,
    restore_counts,
    staging,
)


class CentreServer:
    """The member with the highest rank, in a run whose strategy has a centre."""

    def __init__(self, run: Run, context: WorkerContext) -> None:
        self.run, self.context = run, context
        self.place = FollowedFolder(context.folder)
        self.replicator = replicator_of(run, context.fabric, context.restored is None)
        self.learner: Learner = learner_of(run, context.rank, self.replicator)
        # opens the same channels in the same order as every learner does
        for replica in self.learner.replicas.values():
            Probe(replica, context.fabric, synchronous=False, replicas=run.replicas)
        self.barrier: Channel = context.fabric.channel("barrier", torch.zeros(4, dtype=torch.float64))
        self.recorder = context.recorder(None)
        self.timer = StepTimer(lambda: self.recorder.seconds, list(self.replicator.bound_replicas.values()))
        stepped = self.learner.replicas.values() if run.strategy.centre_steps else ()
        self.shared_schedules = SharedSchedules(run, stepped)
        self._last_record = time.monotonic()
        self._warned = False
        self.saved_request = 0
        self.pace = Pace()
        self.state_transfer = context.state_transfer(self.replicator)
        if context.restored is not None:
            with refusing_misfits("The centre's part of the checkpoint"):
                self.replicator.load(context.restored.state["replicas"])
                restore_counts(self.replicator, context.restored.state)
            self.barrier.gather(torch.zeros(4, dtype=torch.float64))
            self.replicator.resumed()
            self.barrier.gather(torch.zeros(4, dtype=torch.float64))

    def run_to_end(self) -> None:
        """Serve until every living replica has finished, then write the centre's part of the final
        checkpoint."""
        run_state = self.context.run_state
        self.replicator.serve_until(lambda: run_state.have_all_finished(self.run.replicas), self._poll)
        self._record(last=True)
        self.replicator.drain(FINAL_REQUEST, drain_seconds(run_state))
        self.replicator.publish()
        learned = any(run_state.clock(rank) for rank in range(self.run.replicas))
        if learned and (message := self.replicator.no_update_warning):
            self.recorder.event("warning", message, member=self.context.rank)
        run_state.mark_finished(self.context.rank)
        self._write(FINAL)
        run_state.mark_saved(self.context.rank, FINAL_REQUEST)
        self.recorder.close()
        self.place.close()

    def _poll(self) -> None:
        """Between two requests: save, record, send a heartbeat, admit members that were started again."""
        run_state = self.context.run_state
        self.timer.lap("exchange")
        if self.run.strategy.centre_steps:
            living = [rank for rank in run_state.living() if rank < self.run.replicas]
            mean_updates = sum(map(run_state.clock, living)) // max(len(living), 1)
            self.shared_schedules.follow(run_state.total_env_steps(), mean_updates)
        self._save(run_state.checkpoint_requested)
        self._record()
        self.context.between_steps()
        run_state.heartbeat(self.context.rank)
        if (seconds := self.pace.tick()) is not None:
            run_state.set_pace(self.context.rank, seconds)
        if self.state_transfer is not None:
            self.state_transfer.admit_joined()
        self.timer.end_iteration()

    def _record(self, last: bool = False) -> None:
        """Record a line of ``kind`` "centre", which has no env steps and does not count as a replica."""
        now = time.monotonic()
        if now - self._last_record < self.run.record_every_seconds and not last:
            return
        self._last_record = now
        if not self._warned and (message := self.replicator.all_refused_warning):
            self._warned = True
            self.recorder.event("warning", message, member=self.context.rank)
        self.recorder.record(
            {
                "kind": "centre",
                "member": self.context.rank,
                "updates": self.replicator.folds,
                "waiting_seconds": self.replicator.waiting_seconds,
                "bytes_exchanged": self.replicator.bytes_exchanged,
                **self.timer.fields(last=last),
            },
            self.replicator.strategy_fields(),
        )

    def _save(self, requested: int) -> None:
        if requested <= self.saved_request:
            return
        self.saved_request = requested
        if self.replicator.drain(requested, drain_seconds(self.context.run_state)):
            self.replicator.publish()
            self._write(str(requested))
            self.context.run_state.mark_saved(self.context.rank, requested)
        else:
            self.context.run_state.mark_skipped(self.context.rank, requested)

    def _write(self, name: str) -> None:
        with sending_heartbeats(self.context.run_state, self.context.rank):
            write_part(staging(self.place.current_path(), name), self.context.rank, self._state())

    def _state(self) -> dict[str, object]:
        return member_state(self.replicator, self.recorder.seconds) | {
            "exact": True,
            "env_steps": 0,
            "updates": self.replicator.folds,
        }
