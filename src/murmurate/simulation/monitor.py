"""Observes a simulated run outside of virtual time: counts, records, admits joiners, calls back and stops."""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from murmurate.errors import RunFailed
from murmurate.fabric.simulated.fabric import SimulatedFabric
from murmurate.record.callbacks import Callbacks, current_watch
from murmurate.record.reader import Tail
from murmurate.record.recorder import Recorder
from murmurate.replicator.replicator import mean_fields
from murmurate.simulation.cluster import Cluster
from murmurate.simulation.member import Costs, SimulatedLearner
from murmurate.spec import Batch
from murmurate.training.divergence import relative_spread
from murmurate.training.episode_means import EpisodeMeans
from murmurate.training.run import Run

MOST_OWN_RECORDS = 16  # with at most so many replicas, each has its own records; else one record combines all
_MOST_RETURNS = 100  # of training episodes, in one record
_PRINT_SECONDS = 10.0


class Monitor:
    """Counts and records what happens in one run, and ends it. Its methods take no virtual time.

    print_line: called with a line of progress, when something is recorded, at most every ten real seconds.
    """

    def __init__(
        self,
        run: Run,
        cluster: Cluster,
        folder: Path,
        fabric: SimulatedFabric,
        print_line: Callable[[str], None],
    ) -> None:
        self.run, self.fabric, self._print_line = run, fabric, print_line
        self._path = folder / "metrics.jsonl"
        self._records_apart = run.replicas <= MOST_OWN_RECORDS
        self.recorder = self._open_recorder(None)
        self.callbacks = Callbacks(current_watch().callbacks)
        self._tail = Tail(self._path)  # what the callbacks have not been called with
        self._recorders: dict[int, Recorder] = {}
        self.learners: dict[int, SimulatedLearner] = {}  # the newest incarnation of each rank
        # of earlier incarnations, which themselves are not kept: each has a replay
        self.former_costs: list[Costs] = []
        self.former_staleness_max = 0
        self.finished: dict[int, float] = {}  # rank -> virtual second
        self.died: dict[int, float] = {}
        self._drained: set[int] = set()
        self.env_steps, self.updates = 0, 0
        self.returns: deque[float] = deque(maxlen=100)
        self.episode_means = EpisodeMeans()
        self.events: list[dict[str, Any]] = []
        self.event_counts: dict[str, int] = {}
        self.interrupted, self.signal = False, 0
        self.stopped_because = ""
        self.failure: RunFailed | None = None
        self._unrecorded: dict[int, list[list[float]]] = {}  # by recorder: returns and lengths of episodes
        self._last_updates: dict[int, int] = {}
        self._stop_at: float = math.inf  # the number of updates at which synchronous members stop
        self._pending_joiners: dict[int, Callable[[SimulatedLearner], None]] = {}
        self._admit_at = math.inf  # the number of updates at which synchronous members admit joiners
        planned = run.planned_updates()
        self._planned_updates = math.inf if planned is None else max(planned, 1) * run.replicas
        self._planned_seconds = math.inf if run.minutes is None else run.minutes * 60
        self._lines = min(cluster.lines, planned or cluster.lines)  # at most one for each update
        self._next_line = 1
        self._recorded_steps = 0  # env steps of all replicas at the newest record
        self._rated: dict[int, tuple[int, float]] = {}  # by recorder: env steps and time of its last record
        self._started = self._printed_at = time.monotonic()

    # -- called by learners ------------------------------------------------------------------------

    def begin(self, learner: SimulatedLearner) -> None:
        if (former := self.learners.get(learner.rank)) is not None:
            self.former_costs.append(former.costs())
            self.former_staleness_max = max(self.former_staleness_max, former.staleness_max)
        self.learners[learner.rank] = learner
        self._last_updates[learner.rank] = learner.updates

    def stepped(self, learner: SimulatedLearner, batch: Batch) -> None:
        self.env_steps += batch.env_steps
        self.updates += learner.updates - self._last_updates[learner.rank]
        self._last_updates[learner.rank] = learner.updates
        if batch.episodes:
            self.returns.extend(episode.episode_return for episode in batch.episodes)
            self.episode_means.add(batch.episodes)
            recorder = learner.rank if self._records_apart else 0
            self._unrecorded.setdefault(recorder, []).extend(
                [episode.episode_return, episode.length] for episode in batch.episodes
            )
        if self._is_record_due():
            self.record()
        self._stop_if_due()

    def _is_record_due(self) -> bool:
        """Whether another of the run's ``--lines`` equal parts is over, by updates or by time: either may end
        the run."""
        parts = max(
            self._lines * self.updates / self._planned_updates,
            self._lines * self.fabric.virtual_seconds / self._planned_seconds,
        )
        if parts < self._next_line:
            return False
        self._next_line = int(parts) + 1
        return True

    def is_over(self, learner: SimulatedLearner) -> bool:
        """Synchronous members all stop after the same number of updates, chosen before any has passed it."""
        if self.run.updates is not None and learner.updates >= self.run.updates:
            return True
        return learner.updates >= self._stop_at if learner.synchronous else bool(self.stopped_because)

    def finish(self, learner: SimulatedLearner) -> None:
        """``learner`` has finished learning: faults no longer affect it."""
        learner.freeze_costs()
        self.finished[learner.rank] = self.fabric.virtual_seconds

    def drained(self, learner: SimulatedLearner) -> None:
        """``learner`` has also drained the messages in flight."""
        self._drained.add(learner.rank)

    def all_drained(self) -> bool:
        return not any(r < self.run.replicas and r not in self._drained for r in self.fabric.living)

    def costs(self) -> list[Costs]:
        """The costs of all incarnations of all learners."""
        return [*self.former_costs, *(learner.costs() for learner in self.learners.values())]

    @property
    def running(self) -> list[int]:
        """Learners that live, have begun, and have not finished."""
        return [r for r in self.fabric.living if r in self.learners and r not in self.finished]

    def stop(self, why: str) -> None:
        if not self.stopped_because:
            self.stopped_because = why
            self._stop_at = 1 + max((self.learners[r].updates for r in self.running), default=0)
            self.event("stopping", f"stopping: {why}")

    def _stop_if_due(self) -> None:
        run = self.run
        if run.env_steps is not None and self.env_steps >= run.env_steps:
            self.stop(f"{run.env_steps:,} env steps were made")
        elif run.minutes is not None and self.fabric.virtual_seconds > run.minutes * 60:
            self.stop(f"{run.minutes:g} virtual minutes have passed")
        elif (goal := run.stop_at_return) is not None and self._return_mean() >= goal:
            if not self.stopped_because and self.env_steps > self._recorded_steps:
                self.record()  # so that a report finds the return, which may fall again before the last line
            self.stop(run.return_reached)

    def _return_mean(self) -> float:
        """The mean return of the last 100 training episodes; -inf before there are 100."""
        return statistics.fmean(self.returns) if len(self.returns) == 100 else -math.inf

    # -- admission of joiners -----------------------------------------------------------------------

    def admit_later(self, rank: int, enter: Callable[[SimulatedLearner], None]) -> None:
        """Call ``enter`` with a donor, the learner whose state the joiner loads, once all members are between
        two rounds."""
        if not self._pending_joiners:  # else some members may wait at the barrier already
            self._admit_at = 1 + max((self.learners[r].updates for r in self.running), default=0)
        self._pending_joiners[rank] = enter

    def joiners_waiting(self, learner: SimulatedLearner) -> bool:
        return learner.updates >= self._admit_at

    def admit_joiners(self, learner: SimulatedLearner) -> None:
        """Called by each learner after the barrier: the first one admits all pending joiners."""
        self._admit_at = math.inf
        pending, self._pending_joiners = self._pending_joiners, {}
        if not self.is_over(learner):  # else no member would take part in their rounds
            for enter in pending.values():
                enter(learner)

    # -- records ------------------------------------------------------------------------------------

    def event(self, name: str, message: str, **fields: Any) -> None:
        now = self.fabric.virtual_seconds
        self.event_counts[name] = self.event_counts.get(name, 0) + 1
        # the summary stays readable; metrics.jsonl has all events
        if len(self.events) < 1000:
            self.events.append({"event": name, "message": message, "time_seconds": round(now, 6), **fields})
        updates = max(self._last_updates.values(), default=0)
        self.recorder.event(name, message, env_steps=self.env_steps, updates=updates, **fields)
        self._call_back()

    def record(self, last: bool = False) -> None:
        """Write a record for each replica if they are few; else one for all of them, and spans of some of
        them in records of kind "member"."""
        living = [r for r in self.fabric.living if r in self.learners]
        if not living:
            return
        spread = {}
        if len(living) > 1:  # as seen from outside, at one instant
            spread["disagreement"] = disagreement([self.learners[r] for r in living])
        for replica, ranks in ({r: [r] for r in living} if self._records_apart else {0: living}).items():
            if replica not in self._recorders:
                self._recorders[replica] = self._open_recorder(replica)
            timings = [self.learners[r].timer.fields(last=last) for r in ranks]
            if len(ranks) > 1:
                self._record_members(ranks, timings)
            timing = _combined_timing(timings)
            if last and not timing and self.env_steps == self._recorded_steps:
                continue  # its record at the run's last step says the same
            learners = [self.learners[r] for r in ranks]
            of_strategy = mean_fields([learner.replicator.strategy_fields() for learner in learners])
            fields = self._combined_record(learners, replica)
            self._recorders[replica].record(fields | timing | spread, of_strategy)
        self._recorded_steps = self.env_steps
        self._call_back()
        if time.monotonic() - self._printed_at > _PRINT_SECONDS:
            self._printed_at = time.monotonic()
            self._print_line(self.progress())

    def _call_back(self) -> None:
        """Call the callbacks with new records; a callback may stop the run."""
        if self.callbacks and (why := self.callbacks.records(self._tail.poll())):
            self.stop(why)

    def _record_members(self, ranks: Sequence[int], timings: Sequence[dict[str, Any]]) -> None:
        for rank, timing in zip(ranks, timings, strict=True):
            if spans := timing.pop("spans", None):
                updates = self.learners[rank].updates
                self.recorder.record({"kind": "member", "member": rank, "updates": updates, "spans": spans})

    def progress(self) -> str:
        mean = f", return {statistics.fmean(self.returns):.2f}" if self.returns else ""
        real, virtual = time.monotonic() - self._started, self.fabric.virtual_seconds
        return (
            f"[{real:.0f} s] {virtual:.3f} virtual s, {self.updates:,} updates, "
            f"{self.env_steps:,} env steps, {len(self.running)} running{mean}"
        )

    def _open_recorder(self, replica: int | None) -> Recorder:
        return Recorder(self._path, replica, 0.0, clock=lambda: self.fabric.virtual_seconds)

    def _combined_record(self, learners: list[SimulatedLearner], replica: int) -> dict[str, Any]:
        """One record for all of ``learners``: sums of env steps and bytes, maxima of staleness, medians of
        updates and rounds, else means."""
        bound_replicas = [b for learner in learners for b in learner.replicator.bound_replicas.values()]
        several = len(learners) > 1
        now = self.fabric.virtual_seconds
        # with those that died: sums that fall would be taken for counts that began anew
        costs = [learner.costs() for learner in learners] if self._records_apart else self.costs()
        replicas = 1 if self._records_apart else self.run.replicas
        env_steps = learners[0].env_steps if self._records_apart else self.env_steps
        episodes = self._unrecorded.pop(replica, [])
        steps_before, seconds_before = self._rated.get(replica, (0, 0.0))
        self._rated[replica] = env_steps, now
        fields: dict[str, Any] = {
            "env_steps": env_steps,
            "updates": int(statistics.median(learner.updates for learner in learners)),
            "total_env_steps": self.env_steps,
            "env_steps_per_second": (env_steps - steps_before) / max(now - seconds_before, 1e-12),
            "return_mean": statistics.fmean(self.returns) if self.returns else None,
            **self.episode_means.fields(),
            "episode_returns": episodes[-_MOST_RETURNS:],
            **mean_fields(
                [learner.outcome.read_metrics() for learner in learners if learner.outcome.metrics]
            ),
            "staleness": max(b.last.staleness for b in bound_replicas),
            "staleness_max": max(learner.staleness_max for learner in learners),
            "heard": statistics.fmean(b.last.heard for b in bound_replicas),
            "rounds": int(statistics.median(b.last.round for b in bound_replicas)),
            "waiting_seconds": sum(cost.waiting_seconds for cost in costs) / replicas,
            "computing_seconds": sum(cost.computing_seconds for cost in costs) / replicas,
            "exchanging_seconds": sum(cost.exchanging_seconds for cost in costs) / replicas,
            "bytes_exchanged": sum(cost.bytes for cost in costs),
        }
        return fields | ({"joined_replicas": len(learners)} if several else {})

    def close(self) -> None:
        for recorder in (self.recorder, *self._recorders.values()):
            recorder.close()


def disagreement(learners: Sequence[SimulatedLearner]) -> float:
    """The relative spread of the learners' present parameters."""
    return relative_spread(torch.stack([_vector(learner) for learner in learners]))


def _vector(learner: SimulatedLearner) -> Tensor:
    """All parameters of a learner as one vector [N], float32."""
    bound_replicas = learner.replicator.bound_replicas
    return torch.cat(
        [bound_replicas[name].replica.values().detach().float().cpu() for name in sorted(bound_replicas)]
    )


def _combined_timing(timings: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One replica's timing; for several replicas, their summed staleness counts. Takes these out of
    ``timings``."""
    counts: Counter[int] = Counter()
    for timing in timings:
        counts.update(timing.pop("staleness_counts", {}))
    other_fields = timings[0] if len(timings) == 1 else {}
    return other_fields | ({"staleness_counts": dict(sorted(counts.items()))} if counts else {})
