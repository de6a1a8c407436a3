"""Windows in which a member of a gossip strategy records every update and every vector that it averaged with.

From them the report computes how far apart Proposition 1 of GALA (Assran et al. 2019) lets the replicas be
(``window_bound``), and compares that with the distance of the very vectors that a member compared: its own
and its peers' newest published ones. Windows begin in all members at the same number of
env steps of all. Outside of them an update costs one test.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from murmurate.replica.vector import Exchange, Replica
from murmurate.replicator.replicator import BoundReplica

FIRST, GROWTH = 2_000, 1.5  # env steps of all replicas at which windows begin: 2,000, 3,000, 4,500, ...
# Own updates up to the comparison, enough to forget what was before: each averaging leaves about half of it,
# on a ring of four 0.7. A window has three times as many, so that slower members have made theirs.
UPDATES = 24
_DIGITS = 9  # of an update's norm


class GossipWindow:
    """Records windows of one member. total: env steps of all replicas, which is the clock of the windows:
    nearly the same in all members at a time, and on a simulated fabric the same in every repetition.

    The loop calls ``end_iteration()`` at the end of each iteration; ``fields()`` are for the next record. The
    comparison is made once, within the window, while the others record theirs.
    """

    def __init__(self, total: Callable[[], float], bound: BoundReplica, updates: int = UPDATES) -> None:
        self._total, self._bound, self._updates = total, bound, updates
        self._due: float | None = None  # until the first iteration: a resumed run's total is known then
        self._open = False
        self._steps: list[list[Any]] = []
        self._cut: dict[str, Any] | None = None
        self._ready: dict[str, Any] | None = None
        bound.replica.exchange = self._around(bound.replica.exchange)

    def end_iteration(self) -> None:
        """A window may begin or end here, or be compared."""
        if self._due is None:
            self._due = _after(self._total())
        elif not self._open:
            self._open = self._ready is None and self._total() >= self._due
        elif self._cut is None:
            if len(self._steps) >= self._updates:
                self._cut = self._compare()
        elif len(self._steps) >= 3 * self._cut["steps"]:
            self._ready = {"window": round(self._due), "steps": self._steps, "cut": self._cut}
            self._steps, self._cut, self._open = [], None, False
            self._due = _after(self._total())

    def fields(self) -> dict[str, Any]:
        """``gossip_window`` if a window has ended."""
        ready, self._ready = self._ready, None
        return {} if ready is None else {"gossip_window": ready}

    def _around(self, step: Callable[[Replica], Exchange]) -> Callable[[Replica], Exchange]:
        def recorded(replica: Replica) -> Exchange:
            if not self._open:
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


def _after(total: float) -> float:
    """The beginning of the first window after so many env steps."""
    due = float(FIRST)
    while due <= total:
        due *= GROWTH
    return due


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


def gossip_window(total: Callable[[], float], bound_replicas: list[BoundReplica]) -> GossipWindow | None:
    """The recorder of a learner of one replica whose strategy averages what it peeks; None for others."""
    if len(bound_replicas) != 1:
        return None
    (bound,) = bound_replicas
    if not bound.strategy.averages_peeked or bound.channel.size < 2:
        return None
    return GossipWindow(total, bound)
