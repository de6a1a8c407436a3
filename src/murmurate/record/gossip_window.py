"""Windows in which a member of a gossip strategy records every update and every vector that it averaged with.

From them the report computes how far apart Proposition 1 of GALA (Assran et al. 2019) lets the replicas be
(``window_bound``), and compares that with the distance of the very vectors that a member compared: its own
and its peers' newest published ones. Windows begin at the same times of the run's clock in every member.
Outside of them an update costs one test.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from murmurate.record.step_timer import TraceSchedule
from murmurate.replica.vector import Exchange, Replica
from murmurate.replicator.replicator import BoundReplica

# long enough to forget what was before: each averaging leaves about half, or on a ring of four 0.7, of it.
# Counts are updates up to the comparison, and a window has twice as many.
SCHEDULE = TraceSchedule(first_seconds=2.0, growth=1.6, seconds=0.25, least_iterations=24, most_spans=160)
_DIGITS = 9  # of an update's norm


class GossipWindow:
    """Records windows of one member; ``seconds`` is the run's clock.

    The loop calls ``end_iteration()`` at the end of each iteration; ``fields()`` are for the next record. The
    comparison is made once, in the middle of a window, while the others record theirs.
    """

    def __init__(
        self, seconds: Callable[[], float], bound: BoundReplica, schedule: TraceSchedule | None = None
    ) -> None:
        self._seconds, self._bound, self._schedule = seconds, bound, schedule or SCHEDULE
        self._due = self._schedule.after(seconds())
        self._opened: float | None = None  # the clock at the beginning of an open window
        self._window = 0.0
        self._steps: list[list[Any]] = []
        self._cut: dict[str, Any] | None = None
        self._ready: dict[str, Any] | None = None
        bound.replica.exchange = self._around(bound.replica.exchange)

    def end_iteration(self) -> None:
        """A window may begin or end here, or be compared."""
        if self._opened is None:
            if (now := self._seconds()) >= self._due and self._ready is None:
                self._opened, self._window = now, self._due
            return
        enough = len(self._steps) >= self._schedule.least_iterations
        passed = self._seconds() - self._opened
        full = len(self._steps) >= self._schedule.most_spans
        if self._cut is None and (full or (enough and passed >= self._schedule.seconds)):
            self._cut = self._compare()
        elif self._cut is not None and len(self._steps) >= 2 * self._cut["steps"]:
            self._end()  # by now the others have made their comparisons, unless they are much slower

    def fields(self) -> dict[str, Any]:
        """``gossip_window`` if a window has ended."""
        ready, self._ready = self._ready, None
        return {} if ready is None else {"gossip_window": ready}

    def _end(self) -> None:
        self._ready = {"window": round(self._window, 3), "steps": self._steps, "cut": self._cut}
        self._steps, self._cut, self._opened = [], None, None
        self._due = self._schedule.after(self._seconds())

    def _around(self, step: Callable[[Replica], Exchange]) -> Callable[[Replica], Exchange]:
        def recorded(replica: Replica) -> Exchange:
            if self._opened is None:
                return step(replica)
            listener = _Listener(self._bound.channel)
            self._bound.channel, before = listener, self._bound.channel
            replica.measure = True
            try:
                exchange = step(replica)
            finally:
                self._bound.channel = before
            norm = 0.0 if replica.update_norm is None else float(replica.update_norm)
            heard = {str(peer): version for peer, version in sorted(listener.peeked.items())}
            self._steps.append([round(norm, _DIGITS), listener.published, heard])
            return exchange

        return recorded

    def _compare(self) -> dict[str, Any]:
        """The distance ||X - mean||_F of this member's vector and the newest published ones of the others."""
        channel, versions = self._bound.channel, {}
        rows: list[Tensor] = [self._bound.replica.values()]
        for peer in channel.living():
            if peer != channel.rank and channel.version(peer):
                vector, versions[str(peer)] = channel.peek(peer)
                rows.append(vector.to(rows[0].device))
        with torch.no_grad():
            mean = torch.stack(rows).mean(0)
            squares = [float(torch.linalg.vector_norm(row - mean)) ** 2 for row in rows]
        return {"steps": len(self._steps), "versions": versions, "distance": sum(squares) ** 0.5}


class _Listener:
    """A channel that notes what is published and read through it."""

    def __init__(self, channel: Any) -> None:
        self._channel = channel
        self.published = 0
        self.peeked: dict[int, int] = {}

    def publish(self, x: Tensor) -> int:
        self.published = self._channel.publish(x)
        return self.published

    def peek(self, peer: int) -> tuple[Tensor, int]:
        vector, self.peeked[peer] = self._channel.peek(peer)
        return vector, self.peeked[peer]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)


def gossip_window(seconds: Callable[[], float], bound_replicas: list[BoundReplica]) -> GossipWindow | None:
    """The recorder of a learner of one replica whose strategy averages what it peeks; None for others."""
    if len(bound_replicas) != 1:
        return None
    (bound,) = bound_replicas
    if not bound.strategy.averages_peeked or bound.channel.size < 2:
        return None
    return GossipWindow(seconds, bound)
