"""Windows in which a member of a gossip strategy records every update and every vector that it averaged with.

From these records the report computes an upper bound of the distance between replicas, by Proposition 1 of
GALA (Assran et al. 2019; ``window_bound``). The report compares it with a distance that a member measured
once in each window: of its own vector, and the newest ones that its peers had published, from their mean.
Windows begin in all members at the same total of env steps. Outside of windows an update costs one test.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from murmurate.replica.vector import Exchange, Replica
from murmurate.replicator.replicator import BoundReplica

FIRST, GROWTH = 2_000, 1.5  # env steps of all replicas at which windows begin: 2,000, 3,000, 4,500, ...
# Updates that a member makes in a window before its comparison. Each averaging leaves about half (0.7 on a
# ring of four) of the differences from before the window, so hardly any are left then. A window lasts three
# times as many updates, so that slower members can make their comparison in it, too.
UPDATES = 24
_DIGITS = 9  # decimal places of an update's norm


class GossipWindow:
    """Records windows of one member.

    total: returns the env steps of all replicas, by which windows begin. At any time it is nearly the same in
    all members, and on a simulated fabric the same in every repetition.

    The loop calls ``end_iteration()`` at the end of each iteration; ``fields()`` are for the next record. A
    window has one comparison, made while the other members still record the same window.
    """

    def __init__(self, total: Callable[[], float], bound: BoundReplica, updates: int = UPDATES) -> None:
        self._total, self._bound, self._updates = total, bound, updates
        self._due: float | None = None  # set in the first iteration, when a resumed run's total is known
        self._open = False
        self._steps: list[list[Any]] = []
        self._comparison: dict[str, Any] | None = None
        self._ended: dict[str, Any] | None = None
        bound.replica.exchange = self._recorded(bound.replica.exchange)

    def end_iteration(self) -> None:
        """Begin a window, make its comparison or end it, where one of these is due."""
        if self._due is None:
            self._due = _next_window(self._total())
        elif not self._open:
            self._open = self._ended is None and self._total() >= self._due
        elif self._comparison is None:
            if len(self._steps) >= self._updates:
                self._comparison = self._compare()
        elif len(self._steps) >= 3 * self._comparison["steps"]:
            self._ended = {"window": round(self._due), "steps": self._steps, "cut": self._comparison}
            self._steps, self._comparison, self._open = [], None, False
            self._due = _next_window(self._total())

    def fields(self) -> dict[str, Any]:
        """The field ``gossip_window``, if a window has ended."""
        ended, self._ended = self._ended, None
        return {} if ended is None else {"gossip_window": ended}

    def _recorded(self, step: Callable[[Replica], Exchange]) -> Callable[[Replica], Exchange]:
        """``step``, which also records what it does while a window is open."""

        def recorded(replica: Replica) -> Exchange:
            if not self._open:
                return step(replica)
            recording = _RecordingChannel(self._bound.channel)
            self._bound.channel, channel = recording, self._bound.channel
            replica.measure = True
            try:
                exchange = step(replica)
            finally:
                self._bound.channel = channel
            norm = 0.0 if replica.update_norm is None else float(replica.update_norm)
            heard = {str(peer): version for peer, version in sorted(recording.peeked.items())}
            self._steps.append([round(norm, _DIGITS), recording.published, heard])
            return exchange

        return recorded

    def _compare(self) -> dict[str, Any]:
        """The comparison: the distance ||X - mean||_F, where the rows of X are this member's vector and its
        peers' newest published ones; those vectors' versions; and the number of steps recorded so far."""
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


def _next_window(total: float) -> float:
    """The env steps at which the first window after ``total`` begins."""
    due = float(FIRST)
    while due <= total:
        due *= GROWTH
    return due


class _RecordingChannel:
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


def gossip_window(total: Callable[[], float], bound_replicas: list[BoundReplica]) -> GossipWindow | None:
    """The recorder, for a learner of one replica whose strategy averages vectors that it peeks; else None."""
    if len(bound_replicas) != 1:
        return None
    (bound,) = bound_replicas
    if not bound.strategy.averages_published or bound.channel.size < 2:
        return None
    return GossipWindow(total, bound)
