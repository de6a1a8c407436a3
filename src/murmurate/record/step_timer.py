"""Timing of a member's loop: the staleness of its steps and, in short bursts, spans of computing and waiting.

Bursts begin at the same times of the run's clock in every member, so that the report can show which member
waited for which. Outside a burst an iteration of the loop costs one clock reading and one count.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from murmurate.fabric.interface import Channel
from murmurate.replica.vector import Exchange, Replica
from murmurate.replicator.replicator import BoundReplica

Kind = Literal["collect", "learn", "exchange", "wait"]
KINDS: tuple[Kind, ...] = ("collect", "learn", "exchange", "wait")
EXACT_STALENESS = 64
_SHORTEST_SECONDS = 1e-6


@dataclass(frozen=True)
class TraceSchedule:
    """Trace schedule: when spans are recorded. Bursts start ``first_seconds`` after the run's beginning,
    ``first_seconds * growth`` after it and so on, but at most ``longest_pause_seconds`` apart.

    A burst lasts ``seconds`` and at least ``least_iterations`` of the loop, but ends after the iteration in
    which it reaches ``most_spans``.
    """

    first_seconds: float = 1.0
    growth: float = 1.5
    longest_pause_seconds: float = 60.0
    seconds: float = 0.25
    least_iterations: int = 3
    most_spans: int = 400

    def after(self, seconds: float) -> float:
        """The start of the first burst after ``seconds``."""
        due = self.first_seconds
        while due <= seconds:
            due += min(due * (self.growth - 1), self.longest_pause_seconds)
        return due


NO_TRACE = TraceSchedule(first_seconds=math.inf)


class StepTimer:
    """Counts the staleness of every step, and in bursts records the spans of one member's loop.

    ``seconds`` is the run's clock, as in ``time_seconds``. ``other_channels`` are further channels
    on which this member may wait. The loop calls ``lap(kind)`` at the end of each activity and
    ``end_iteration()`` at the end of each iteration; ``fields()`` are for the next record.

    Spans cover a burst without gaps, except for activities without a kind (recording, saving). The duration
    of the waiting within an activity is known, but not when it began: it is placed first, as in a collective.
    """

    def __init__(
        self,
        seconds: Callable[[], float],
        bound_replicas: Sequence[BoundReplica],
        other_channels: Sequence[Channel] = (),
        schedule: TraceSchedule | None = None,
    ) -> None:
        self._seconds = seconds
        self._schedule = schedule or TraceSchedule()
        self._replicas = [bound.replica for bound in bound_replicas]
        self._channels = [*(bound.channel for bound in bound_replicas), *other_channels]
        self._due = self._schedule.after(seconds())
        self._recording = False
        self._burst_start = self._lap_start = self._waited_before = 0.0
        self._iterations = 0
        self._counts: dict[int, int] = {}
        self._spans: list[tuple[Kind, float, float]] = []
        for replica in self._replicas:
            replica.exchange = self._timed(replica.exchange)

    def lap(self, kind: Kind | None) -> None:
        """Assign the time since the last lap to ``kind``; None: to no span."""
        if not self._recording:
            return
        now = self._seconds()
        waited = self.waiting_seconds
        wait = min(waited - self._waited_before, now - self._lap_start)
        if wait > _SHORTEST_SECONDS:
            self._add("wait", self._lap_start, wait)
            self._lap_start += wait
        if kind is not None and now - self._lap_start > _SHORTEST_SECONDS:
            self._add(kind, self._lap_start, now - self._lap_start)
        self._lap_start, self._waited_before = now, waited

    def end_iteration(self) -> None:
        """End one iteration of the loop; a burst may begin or end here."""
        if self._recording:
            self.lap(None)
            self._iterations += 1
            long_enough = self._lap_start - self._burst_start >= self._schedule.seconds
            if len(self._spans) >= self._schedule.most_spans or (
                long_enough and self._iterations >= self._schedule.least_iterations
            ):
                self._end()
        elif (now := self._seconds()) >= self._due and not self._spans:
            self._begin(now)

    def fields(self, *, last: bool = False) -> dict[str, Any]:
        """``staleness_counts``, and ``spans`` if a burst has ended. last: first end a burst in progress."""
        counts: dict[int, int] = {}
        for value, count in sorted(self._counts.items()):
            counts[rounded(value)] = counts.get(rounded(value), 0) + count
        self._counts.clear()
        fields: dict[str, Any] = {"staleness_counts": counts} if counts else {}
        if last and self._recording:
            self._end()
        if self._spans and not self._recording:
            spans = [[kind, round(start, 6), round(length, 6)] for kind, start, length in self._spans]
            fields["spans"] = spans
            self._spans.clear()
        return fields

    def _timed(self, step: Callable[[Replica], Exchange]) -> Callable[[Replica], Exchange]:
        """``step``, with its spans recorded and its staleness counted."""
        counts = self._counts

        def timed(replica: Replica) -> Exchange:
            if self._recording:
                self.lap("learn")
            exchange = step(replica)
            if self._recording:
                self.lap("exchange")
            counts[exchange.staleness] = counts.get(exchange.staleness, 0) + 1
            return exchange

        return timed

    def _begin(self, now: float) -> None:
        self._recording = True
        self._iterations = 0
        self._burst_start = self._lap_start = now
        self._waited_before = self.waiting_seconds
        for replica in self._replicas:
            # updates inside the strategy's step count as learning, not as exchange
            vars(replica)["update"] = self._as_learning(replica.update)
            vars(replica)["step_plainly"] = self._as_learning(replica.step_plainly)

    def _end(self) -> None:
        self._recording = False
        self._due = self._schedule.after(self._seconds())
        for replica in self._replicas:
            del vars(replica)["update"], vars(replica)["step_plainly"]

    def _as_learning(self, method: Callable[[], None]) -> Callable[[], None]:
        """``method``, whose time is learning within the exchange that calls it."""

        def lapped() -> None:
            self.lap("exchange")
            method()
            self.lap("learn")

        return lapped

    def _add(self, kind: Kind, start: float, length: float) -> None:
        if self._spans and self._spans[-1][0] == kind:
            _, span_start, span_length = self._spans[-1]
            if start - (span_start + span_length) < _SHORTEST_SECONDS:
                self._spans[-1] = (kind, span_start, start + length - span_start)
                return
        self._spans.append((kind, start, length))

    @property
    def waiting_seconds(self) -> float:
        """Time spent waiting for others so far: in the strategy's steps and on ``other_channels``."""
        return sum(channel.traffic.waiting_seconds for channel in self._channels)


def rounded(staleness: int) -> int:
    """Exact below 64; above, only its four leading binary digits are kept (at most 12.5% less).

    So a record stays short even if a replica hears from no peer for a long time.
    """
    if staleness < EXACT_STALENESS:
        return staleness
    return staleness - staleness % (1 << (staleness.bit_length() - 4))
