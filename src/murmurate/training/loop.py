"""The training loop of one replica."""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections import deque
from typing import Any, cast

import torch

from murmurate.errors import Refusal, RunFailed
from murmurate.fabric.interface import Channel
from murmurate.fabric.processes.run_state import sending_heartbeats
from murmurate.record.gossip_window import gossip_window
from murmurate.record.step_timer import StepTimer
from murmurate.replicator.learner import Learner, updates_of
from murmurate.spec import Batch, Outcome, derive_seed
from murmurate.training.checkpoint import write_part
from murmurate.training.divergence import Probes
from murmurate.training.episode_means import EpisodeMeans, endless_warning
from murmurate.training.members import learner_of, open_source
from murmurate.training.part_processes import LearnerInParts, PartProcesses
from murmurate.training.place import FollowedFolder
from murmurate.training.rejoin import Pace, StateTransfer, state_to_load
from murmurate.training.restore import refusing_misfits, replicator_of
from murmurate.training.run import Run
from murmurate.training.schedules import SharedSchedules
from murmurate.training.worker_context import (
    BATCHES_TO_DECISION,
    FINAL,
    FINAL_REQUEST,
    Restored,
    WorkerContext,
    drain_seconds,
    member_state,
    restore_counts,
    staging,
)


class TrainingLoop:
    """The training loop of one replica, with its recording, probing, checkpoints and state transfers."""

    def __init__(self, run: Run, context: WorkerContext) -> None:
        self.run, self.context = run, context
        self.place = FollowedFolder(context.folder)
        starts_anew = context.restored is None and not context.joins
        self.replicator = replicator_of(run, context.fabric, starts_anew)
        self.parts = PartProcesses(run, context.rank) if math.prod(run.grid) > 1 else None
        self.learner: Learner = self._build()
        self.source = open_source(run, context.rank, self.learner, context.fabric)
        self.source.alive = self._alive
        self.synchronous = run.strategy.synchronous and context.fabric.size > 1
        self.before_first_batch = self.synchronous and not context.joins
        self.exact = True  # whether a resumed run can continue as this one would have
        self.probes = Probes(run, self.learner.replicas.values(), context.fabric, self.synchronous)
        self.shared_schedules = SharedSchedules(run, self.learner.replicas.values())
        self.barrier: Channel = context.fabric.channel("barrier", torch.zeros(4, dtype=torch.float64))
        self.recorder = context.recorder(context.rank)
        bound_replicas = list(self.replicator.bound_replicas.values())
        other_channels = [self.barrier, *self.probes.channels]
        self.timer = StepTimer(lambda: self.recorder.seconds, bound_replicas, other_channels)
        self.window = gossip_window(context.run_state.total_env_steps, bound_replicas)
        self.env_steps = 0
        self.batches = 0
        self._global_seed = derive_seed(run.seed, "global generator", context.rank)
        self.updates = 0
        self.saved_request = 0  # number of the newest checkpoint request already served
        self.state_transfer = context.state_transfer(self.replicator)
        self.pace = Pace()
        self.returns: deque[float] = deque(maxlen=100)
        self.episode_means = EpisodeMeans()
        self.unreported: list[list[float]] = []  # [return, length] of episodes since the last record
        self.probed: dict[str, Any] = {}  # results of probes since the last record
        self._last_record = time.monotonic()
        self._last_steps = 0
        if context.restored is not None:
            has_own_part = context.restored.is_own
            if has_own_part:
                self._restore(context.restored)
            self._meet_at_barrier()  # no replica may update a shared vector that another is still restoring
            if not has_own_part:  # after the others, so that it keeps what they restored in shared memory
                self._restore(context.restored)
            context.restored = None  # it may hold a whole replay
            self.replicator.resumed()
            self._meet_at_barrier()
            if not has_own_part:
                self.replicator.rejoined()
        if context.joins and self.state_transfer is not None:
            self._join(self.state_transfer)
        self.probes.prepare(self.updates, 1)

    def _build(self) -> Learner:
        run, rank = self.run, self.context.rank
        heartbeat = functools.partial(self.context.run_state.heartbeat, rank)
        if self.parts is None:
            return cast(Learner, learner_of(run, rank, self.replicator, heartbeat=heartbeat))
        replica_parts = self.parts.replica_parts
        replicate = functools.partial(replica_parts.replicate, self.replicator.replicate)
        return LearnerInParts(learner_of(run, rank, self.replicator, replicate, heartbeat), self.parts)

    def run_to_end(self) -> None:
        """Train until the run's end or a request to stop; write this replica's part of the final
        checkpoint."""
        self.context.run_state.heartbeat(self.context.rank)  # the first reset may hang
        self.replicator.publish()
        outcome: Outcome | None = None
        # a replica that joins begins where its peers have just agreed on the requests
        if self.context.joins or not self._is_over(self._agree_on_requests()):
            self._seed_global_generators()
            for batch in self.source:
                self.timer.lap("collect")
                if self._ends_with(batch):
                    self._count(batch)
                    break
                try:
                    outcome = self.learner.learn(batch)
                except Refusal as refusal:  # a broken validation image, for example
                    raise (RunFailed(str(refusal)) if self.updates else refusal) from None
                batch.feedback(outcome.priorities)
                self.timer.lap("learn")
                updates_before = self.updates
                self.batches += 1
                self._count(batch)
                self.probed |= self.probes.measure(updates_before, self.updates)
                self._record(outcome)
                self._record_events()
                self.context.between_steps()
                if self._may_decide():
                    requests = self._agree_on_requests()
                    self._serve_requests(requests)
                    if self._is_over(requests):
                        break
                self.timer.end_iteration()
                if self.window is not None:
                    self.window.end_iteration()
                self._seed_global_generators()
        self._finish(outcome)

    def _seed_global_generators(self) -> None:
        """Seed torch's global generators, from which layers such as Dropout draw, for the next batch: so each
        replica draws numbers of its own, and a resumed run those of one that was not interrupted."""
        seed, device = self._global_seed + self.batches, self.run.device(self.context.rank)
        torch.default_generator.manual_seed(seed)
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)

    def _ends_with(self, batch: Batch) -> bool:
        """Whether training ends before ``batch`` is learned. Synchronous members agree on that once."""
        if not self.before_first_batch:
            return batch.data is None
        self.before_first_batch = False
        stop = self._agree_on_requests()[0]
        self._seed_global_generators()  # inline, the others have seeded them meanwhile
        self.exact = not stop or batch.data is None  # else a batch is lost
        return stop or batch.data is None

    # -- counting and recording ---------------------------------------------------------------------

    def _count(self, batch: Batch) -> None:
        self.env_steps += batch.env_steps
        self.updates = updates_of(self.learner)
        self.episode_means.add(batch.episodes)
        for episode in batch.episodes:
            self.returns.append(episode.episode_return)
            self.unreported.append([episode.episode_return, episode.length])
        self.context.run_state.advance(self.context.rank, self.env_steps, self.updates)
        if (seconds := self.pace.tick()) is not None:
            self.context.run_state.set_pace(self.context.rank, seconds)

    def _alive(self, env_steps: int) -> bool:
        """Send a heartbeat while the source prepares a batch; returns whether to stop now.

        Synchronous members stop together: before the first batch, or at the end of a round.
        """
        run_state = self.context.run_state
        run_state.advance(self.context.rank, self.env_steps + env_steps, self.updates)
        self._record_events()  # filling a replay for the first batch may take long
        self.context.between_steps()
        if self.synchronous:
            return self.before_first_batch and run_state.stop_requested
        planned = self.run.env_steps
        return run_state.stop_requested or (planned is not None and run_state.total_env_steps() >= planned)

    def _record_events(self) -> None:
        for kind, message in self.source.events():
            self.recorder.event(kind, message, member=self.context.rank)

    def _record(self, outcome: Outcome | None, force: bool = False) -> None:
        now = time.monotonic()
        elapsed = now - self._last_record
        if elapsed < self.run.record_every_seconds and not force:
            return
        bound_replicas = list(self.replicator.bound_replicas.values())
        steps = self.env_steps - self._last_steps  # may be 0 in the last record, and 0 would be no speed
        endless = "" if self.returns else endless_warning(self.run, self._last_steps, self.env_steps)
        if endless and self.context.rank == 0:
            self.recorder.event("warning", endless, member=0)
        self.recorder.record(
            {
                "env_steps": self.env_steps,
                "updates": self.updates,
                "total_env_steps": self.context.run_state.total_env_steps(),
                **({"env_steps_per_second": steps / max(elapsed, 1e-9)} if steps or not force else {}),
                "return_mean": sum(self.returns) / len(self.returns) if self.returns else None,
                **self.episode_means.fields(),
                "episode_returns": self.unreported,
                **({} if outcome is None else outcome.read_metrics()),
                "staleness": max(b.last.staleness for b in bound_replicas),
                "staleness_max": max(b.staleness_max for b in bound_replicas),
                "heard": bound_replicas[0].last.heard,
                "rounds": bound_replicas[0].last.round,
                "waiting_seconds": self.timer.waiting_seconds,
                "bytes_exchanged": self.replicator.bytes_exchanged,
                "refused": self.replicator.refused,
                **self.source.fields(),
                **self.probed,
                **self.timer.fields(last=force),
                **({} if self.window is None else self.window.fields()),
            },
            self.replicator.strategy_fields(),
        )
        self.unreported, self.probed = [], {}
        self._last_record, self._last_steps = now, self.env_steps

    # -- agreeing on when to stop and save ----------------------------------------------------------

    def _may_decide(self) -> bool:
        """Whether this member may decide to stop or save. Synchronous members may do so only where all have
        the same clock: at the end of a round, after so many batches, or after the run's last update."""
        if not self.synchronous or self.updates >= (self.run.updates or math.inf):
            return True
        return self.replicator.between_rounds or self.batches % BATCHES_TO_DECISION == 0

    def _agree_on_requests(self) -> tuple[bool, int, int]:
        """(stop?, newest checkpoint request, total env steps), the same on all synchronous members."""
        run_state = self.context.run_state
        stop, requested = run_state.stop_requested, run_state.checkpoint_requested
        if not self.synchronous:
            if self.state_transfer is not None:
                self.state_transfer.serve_request(self._state_to_transfer)
            self.shared_schedules.follow(total := run_state.total_env_steps(), self.updates)
            return stop, requested, total
        own_requests = [stop, requested, self.env_steps, run_state.transfer_request]
        answers = self.barrier.gather(torch.tensor(own_requests, dtype=torch.float64))
        absent = [rank for rank in range(run_state.size) if rank not in answers]
        total = sum(int(a[2]) for a in answers.values()) + sum(run_state.env_steps(r) for r in absent)
        stop = any(bool(a[0]) for a in answers.values())
        requests = stop, min(int(a[1]) for a in answers.values()), total
        self.shared_schedules.follow(total, self.updates)
        transfer = min(int(a[3]) for a in answers.values())
        if (
            self.state_transfer is not None
            and self.replicator.between_rounds
            and requests[1] <= self.saved_request
            and not self._is_over(requests)
        ):
            self.state_transfer.admit_together(transfer, self._meet_at_barrier, self._state_to_transfer)
        return requests

    def _meet_at_barrier(self) -> list[int]:
        """Make one more round of the barrier; returns the ranks that took part."""
        return sorted(self.barrier.gather(torch.zeros(4, dtype=torch.float64)))

    def _state_to_transfer(self) -> dict[str, Any]:
        """The state that a joining replica takes over: parameters, moments, clock, strategy."""
        return {
            "replicas": self.replicator.state(),
            "learner": self.learner.state(),
            "batches": self.batches,
            "schedules": self.shared_schedules.state(),
            "answered": self.saved_request,
        }

    def _join(self, state_transfer: StateTransfer) -> None:
        """Take over a living peer's state. Raises JoinCancelled if the run ends first."""
        with self._sending_heartbeats():
            transferred = state_transfer.receive()
        env_steps = self.context.run_state.env_steps(self.context.rank)
        self._restore(Restored(transferred, env_steps, is_own=False))
        self.saved_request = int(transferred["answered"])
        state_transfer.complete(transferred)

    def _is_over(self, requests: tuple[bool, int, int]) -> bool:
        stop, _, total = requests
        run = self.run
        return (
            stop
            or (run.env_steps is not None and total >= run.env_steps)
            or (run.updates is not None and self.updates >= run.updates)
        )

    def _serve_requests(self, requests: tuple[bool, int, int]) -> None:
        _, requested, _ = requests
        if requested > self.saved_request:
            self.saved_request = requested
            if self.replicator.drain(requested, drain_seconds(self.context.run_state)):
                self._save(str(requested), snapshot=self.context.run_state.is_snapshot(requested))
                self.context.run_state.mark_saved(self.context.rank, requested)
            else:
                self.context.run_state.mark_skipped(self.context.rank, requested)

    def _sending_heartbeats(self) -> contextlib.AbstractContextManager[None]:
        return sending_heartbeats(self.context.run_state, self.context.rank)

    def _save(self, name: str, snapshot: bool = False) -> None:
        with self._sending_heartbeats():  # a state may hold a replay of another process
            state = self._counts_and_parameters() if snapshot else self.state()
            replays = state["source"].pop("replays", {}) if "source" in state else {}
            write_part(staging(self.place.current_path(), name), self.context.rank, state, replays)

    def _finish(self, outcome: Outcome | None) -> None:
        if outcome is not None or self.env_steps > self._last_steps:  # it may have ended before any update
            self._record(outcome, force=True)
        run_state, seconds = self.context.run_state, drain_seconds(self.context.run_state)
        if not self.replicator.drain(FINAL_REQUEST, seconds):
            lost = f"some deltas in flight at the end were not applied within {seconds:g} s"
            message = f"replica {self.context.rank}: {lost}"
            self.recorder.event("unsettled", message, member=self.context.rank)
        self.replicator.publish()
        run_state.mark_finished(self.context.rank)
        deadline = time.monotonic() + seconds
        # all final vectors should be published before the mean of them is taken
        while not self.synchronous and not run_state.have_all_finished() and time.monotonic() < deadline:
            # no such message ever comes: the wait lets time pass, also on a simulated fabric
            self.barrier.wait("finished", 0.002)
        self._save(FINAL)
        run_state.mark_saved(self.context.rank, FINAL_REQUEST)
        try:
            self.source.close()
        except Exception as error:  # of an environment; what was learned is saved
            message = f"replica {self.context.rank} could not close its source: {error!r}"
            self.recorder.event("warning", message, member=self.context.rank)
        self.recorder.event("finished", f"replica {self.context.rank} has finished", member=self.context.rank)
        self.recorder.close()
        if self.parts is not None:
            self.parts.close()
        self.place.close()

    # -- state --------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Everything that resuming needs; a collective operation if the strategy is synchronous."""
        return self._counts_and_parameters() | {
            "waiting_seconds": self.timer.waiting_seconds,
            "learner": self.learner.state(),
            "source": self.source.state(),
            "exact": self.exact and self.source.exact,
            "batches": self.batches,
            "schedules": self.shared_schedules.state(),
            "returns": list(self.returns),
            **self.episode_means.state(),
            "unreported": self.unreported,
            "probed": self.probed,
        }

    def _counts_and_parameters(self) -> dict[str, Any]:
        """What an evaluation needs; a collective operation if the strategy is synchronous."""
        return member_state(self.replicator, self.recorder.seconds) | {
            "env_steps": self.env_steps,
            "updates": self.updates,
        }

    @refusing_misfits("The checkpoint")
    def _restore(self, restored: Restored) -> None:
        state = restored.state
        saved = state["replicas"]
        # loading a peer's state may take long; without heartbeats after it, a reset that hangs is noticed
        heartbeats = contextlib.nullcontext() if restored.is_own else self._sending_heartbeats()
        with heartbeats:
            self.replicator.load(saved if restored.is_own else state_to_load(self.replicator, saved))
            self.learner.load(state["learner"])
        self.env_steps = self._last_steps = restored.env_steps
        self.updates = updates_of(self.learner)
        self.recorder.restore(self.env_steps, self.updates)
        # checkpoints of the first format do not count batches; learners then made one update per batch
        self.batches = int(state.get("batches", self.updates))
        self.shared_schedules.load(state.get("schedules", (0, 0)))
        if restored.is_own:
            self.source.load(state["source"])
            self.returns.extend(state["returns"])
            self.episode_means.load(state)
            self.unreported = [list(pair) for pair in state["unreported"]]
            self.probed = dict(state.get("probed", {}))
            restore_counts(self.replicator, state)
        else:
            self.source.fresh_start(self.batches)
        self.probes.prepare(self.updates, 1)
        self.context.run_state.advance(self.context.rank, self.env_steps, self.updates)
