"""Follows a simulated run, outside of virtual time: counts, records, admits joiners, ends the run."""

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

from murmurate.fabric.simulated.fabric import SimulatedFabric
from murmurate.record.recorder import Recorder
from murmurate.simulation.cluster import Cluster
from murmurate.simulation.member import Learner
from murmurate.spec import Batch
from murmurate.training.run import Run

ALONE_UP_TO = 16  # replicas that write records of their own
_RETURNS_A_LINE = 100
_PRINT_SECONDS = 10.0


class Monitor:
    """The counts, records and end of one run. Takes no virtual time, and does not affect strategies.

    ``say`` prints a line of progress every ten real seconds.
    """

    def __init__(
        self, run: Run, cluster: Cluster, folder: Path, fabric: SimulatedFabric, say: Callable[[str], None]
    ) -> None:
        self.run, self.fabric, self._say = run, fabric, say
        # virtual time on the clock of the records
        self.recorder = Recorder(
            folder / "metrics.jsonl", None, 0.0, clock=lambda: self.fabric.virtual_seconds
        )
        self._path = folder / "metrics.jsonl"
        self._recorders: dict[int, Recorder] = {}
        self.learners: dict[int, Learner] = {}  # the newest incarnation of each
        self.former: list[Learner] = []
        self.finished: dict[int, float] = {}  # rank -> virtual second
        self.died: dict[int, float] = {}
        self._left: set[int] = set()
        self.env_steps, self.updates = 0, 0
        self.returns: deque[float] = deque(maxlen=100)
        self.events: list[dict[str, Any]] = []
        self.faults: dict[str, int] = {}
        self.stopped_because = ""
        self._fresh: dict[int, list[list[float]]] = {}
        self._last_clock: dict[int, int] = {}
        self._stop_at: float = math.inf  # clock at which synchronous members stop
        self._pending: dict[int, Callable[[Learner], None]] = {}
        self._admit_at = math.inf
        planned = run.planned_updates() or 100
        self._every = max(run.replicas, planned * run.replicas // cluster.lines)
        self._next_line = self._every
        self._started = self._printed_at = time.monotonic()

    # -- called by learners ------------------------------------------------------------------------

    def begin(self, learner: Learner) -> None:
        if learner.rank in self.learners:
            self.former.append(self.learners[learner.rank])
        self.learners[learner.rank] = learner
        self._last_clock[learner.rank] = learner.clock

    def stepped(self, learner: Learner, batch: Batch) -> None:
        self.env_steps += batch.env_steps
        self.updates += learner.clock - self._last_clock[learner.rank]
        self._last_clock[learner.rank] = learner.clock
        if batch.episodes:
            self.returns.extend(episode.episode_return for episode in batch.episodes)
            fresh = self._fresh.setdefault(self._line_of(learner.rank), [])
            fresh.extend([episode.episode_return, episode.length] for episode in batch.episodes)
        if self.updates >= self._next_line:
            self._next_line += self._every
            self.record()
        self._decide()

    def over(self, learner: Learner) -> bool:
        """Synchronous members all stop at the same clock, chosen before any of them has passed it."""
        if self.run.updates is not None and learner.clock >= self.run.updates:
            return True
        return learner.clock >= self._stop_at if learner.synchronous else bool(self.stopped_because)

    def finish(self, learner: Learner) -> None:
        """It has finished learning; faults no longer affect it."""
        learner.end()
        self.finished[learner.rank] = self.fabric.virtual_seconds

    def left(self, learner: Learner) -> None:
        """It has also drained the messages in flight."""
        self._left.add(learner.rank)

    def all_left(self) -> bool:
        return not any(r < self.run.replicas and r not in self._left for r in self.fabric.living)

    @property
    def running(self) -> list[int]:
        """Learners that live, have begun, and have not finished."""
        return [r for r in self.fabric.living if r in self.learners and r not in self.finished]

    def stop(self, why: str) -> None:
        if not self.stopped_because:
            self.stopped_because = why
            self._stop_at = 1 + max((self.learners[r].clock for r in self.running), default=0)
            self.event("stopping", f"stopping: {why}")

    def _decide(self) -> None:
        run = self.run
        if run.env_steps is not None and self.env_steps >= run.env_steps:
            self.stop(f"{run.env_steps:,} env steps were made")
        elif run.minutes is not None and self.fabric.virtual_seconds > run.minutes * 60:
            self.stop(f"{run.minutes:g} virtual minutes have passed")
        elif (goal := run.stop_at_return) is not None and self._return_mean() >= goal:
            self.stop(f"the mean return of the last 100 training episodes reached {goal:g}")

    def _return_mean(self) -> float:
        """Of the last 100 training episodes; -inf before there are so many."""
        return statistics.fmean(self.returns) if len(self.returns) == 100 else -math.inf

    # -- admission of joiners -----------------------------------------------------------------------

    def admit_later(self, rank: int, enter: Callable[[Learner], None]) -> None:
        """Have ``enter`` called with a donor once all synchronous members are between two rounds."""
        if not self._pending:  # else some may wait at the barrier already
            self._admit_at = 1 + max((self.learners[r].clock for r in self.running), default=0)
        self._pending[rank] = enter

    def admission_due(self, learner: Learner) -> bool:
        return learner.clock >= self._admit_at

    def admit(self, learner: Learner) -> None:
        """The first learner to leave the barrier admits them; for the others nothing is left to do."""
        self._admit_at = math.inf
        pending, self._pending = self._pending, {}
        for enter in (
            () if self.over(learner) else pending.values()
        ):  # when the run is over no member would join their rounds
            enter(learner)

    # -- records ------------------------------------------------------------------------------------

    def event(self, name: str, message: str, **fields: Any) -> None:
        now = self.fabric.virtual_seconds
        self.faults[name] = self.faults.get(name, 0) + 1
        # a thousand crashes make a thousand lines, but the summary stays readable
        if len(self.events) < 1000:
            self.events.append({"event": name, "message": message, "time_seconds": round(now, 6), **fields})
        self.recorder.event(name, message, env_steps=self.env_steps, updates=0, **fields)

    def record(self, last: bool = False) -> None:
        """A record for each replica where they are few; else one for all of them, and the spans of some of
        them in records of kind "member"."""
        living = [r for r in self.fabric.living if r in self.learners]
        if not living:
            return
        spread = self._disagreement([self.learners[r] for r in living])
        for line, ranks in self._lines(living).items():
            if line not in self._recorders:
                self._recorders[line] = Recorder(
                    self._path, line, 0.0, clock=lambda: self.fabric.virtual_seconds
                )
            timings = [self.learners[r].timer.fields(last=last) for r in ranks]
            if len(ranks) > 1:
                self._record_members(ranks, timings)
            facts = self._joined([self.learners[r] for r in ranks], line)
            self._recorders[line].record(facts | _summed(timings) | spread)
        if time.monotonic() - self._printed_at > _PRINT_SECONDS:
            self._printed_at = time.monotonic()
            self._say(self.line())

    def _record_members(self, ranks: Sequence[int], timings: Sequence[dict[str, Any]]) -> None:
        for rank, timing in zip(ranks, timings, strict=True):
            if spans := timing.pop("spans", None):
                clock = self.learners[rank].clock
                self.recorder.record({"kind": "member", "member": rank, "updates": clock, "spans": spans})

    def line(self) -> str:
        mean = f", return {statistics.fmean(self.returns):.2f}" if self.returns else ""
        real, virtual = time.monotonic() - self._started, self.fabric.virtual_seconds
        living = len(self.running)
        return (
            f"[{real:.0f} s] {virtual:.3f} virtual s, {self.updates:,} updates, "
            f"{self.env_steps:,} env steps, {living} running{mean}"
        )

    def _line_of(self, rank: int) -> int:
        return rank if self.run.replicas <= ALONE_UP_TO else 0

    def _lines(self, living: list[int]) -> dict[int, list[int]]:
        return {r: [r] for r in living} if self.run.replicas <= ALONE_UP_TO else {0: living}

    def _joined(self, learners: list[Learner], line: int) -> dict[str, Any]:
        """One record for all of them: sums of env steps and bytes, maxima of staleness, else means."""
        bound_replicas = [b for one in learners for b in one.replicator.bound_replicas.values()]
        several = len(learners) > 1
        now = max(self.fabric.virtual_seconds, 1e-12)
        spent = [one.spent() for one in learners]
        mine = self.env_steps if self.run.replicas > ALONE_UP_TO else learners[0].env_steps
        episodes, self._fresh[line] = self._fresh.get(line, []), []
        facts: dict[str, Any] = {
            "env_steps": mine,
            "updates": int(statistics.median(one.clock for one in learners)),
            "total_env_steps": self.env_steps,
            "env_steps_per_second": mine / now,
            "return_mean": statistics.fmean(self.returns) if self.returns else None,
            "episode_returns": episodes[-_RETURNS_A_LINE:],
            **_means([one.outcome.read_metrics() for one in learners if one.outcome.metrics]),
            "staleness": max(b.last.staleness for b in bound_replicas),
            "staleness_max": max(b.staleness_max for b in bound_replicas),
            "heard": statistics.fmean(b.last.heard for b in bound_replicas),
            "rounds": int(statistics.median(b.last.round for b in bound_replicas)),
            "waiting_seconds": statistics.fmean(one.waiting_seconds for one in spent),
            "computing_seconds": statistics.fmean(one.computing_seconds for one in spent),
            "exchanging_seconds": statistics.fmean(one.exchanging_seconds for one in spent),
            "bytes_exchanged": sum(one.bytes for one in spent),
        }
        return facts | ({"joined_replicas": len(learners)} if several else {})

    def _disagreement(self, learners: list[Learner]) -> dict[str, float]:
        """Seen from outside, at one instant: sqrt(mean_i ||x_i - mean||^2) / ||mean||."""
        return {} if len(learners) < 2 else {"disagreement": disagreement(learners)}

    def close(self) -> None:
        for recorder in (self.recorder, *self._recorders.values()):
            recorder.close()


def disagreement(learners: Sequence[Learner]) -> float:
    """sqrt(mean_i ||x_i - mean||^2) / ||mean|| of their parameters as they are."""
    x = torch.stack([vector(one) for one in learners])
    mean = x.mean(0)
    squares = (x - mean).square().sum(1)
    return float(squares.mean().sqrt() / mean.norm().clamp_min(1e-30))


def vector(learner: Learner) -> Tensor:
    """[N]: all parameters of a learner, float32."""
    bound_replicas = learner.replicator.bound_replicas
    return torch.cat(
        [bound_replicas[name].replica.values().detach().float().cpu() for name in sorted(bound_replicas)]
    )


def _summed(timings: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One replica's timing; for several replicas, their summed staleness counts."""
    counts: Counter[int] = Counter()
    for timing in timings:
        counts.update(timing.pop("staleness_counts", {}))
    rest = timings[0] if len(timings) == 1 else {}
    return rest | ({"staleness_counts": dict(sorted(counts.items()))} if counts else {})


def _means(metrics: Sequence[dict[str, Tensor | float]]) -> dict[str, float]:
    if not metrics:
        return {}
    return {key: statistics.fmean(float(m[key]) for m in metrics if key in m) for key in metrics[0]}
