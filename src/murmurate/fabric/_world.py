"""What surrounds the members of a simulated fabric: links that delay, lose and are cut, and a log."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from murmurate.fabric._baton import Baton

# Virtual seconds a message takes: always the same, uniform between two, or drawn by a function of
# (sender, receiver, generator).
Latency = float | tuple[float, float] | Callable[[int, int, np.random.Generator], float]


@dataclass(frozen=True)
class Event:
    """One line of the log, in the order in which things happened.

    ``kind`` is ``publish``, ``peek``, ``mean``, ``broadcast``, ``gather``, ``send``, ``receive``,
    ``lost`` (mail that nobody will ever receive), ``crash``, or whatever ``Member.note`` was told.
    ``peer`` is the publisher of a peek, the receiver of a send or loss, the sender of a receive, the
    root of a broadcast. ``version`` is the register's, or the mail's or collective's number, all from 1
    up. ``members`` are those whose vectors a mean or gather joined.
    """

    time_seconds: float
    rank: int
    kind: str
    channel: str = ""
    peer: int | None = None
    version: int | None = None
    members: tuple[int, ...] = ()
    detail: Any = None  # the tag of mail, the value of a note


@dataclass(frozen=True)
class Partition:
    """Links cut, both ways, from ``start_seconds`` up to ``end_seconds`` (virtual).

    What is sent meanwhile leaves when the cut ends, as from a socket that keeps trying; what already
    travels arrives. A collective among members that are cut apart waits.
    """

    pairs: tuple[tuple[int, int], ...]
    start_seconds: float = 0.0
    end_seconds: float = math.inf

    @staticmethod
    def between(
        some: Iterable[int], others: Iterable[int], start_seconds: float = 0.0, end_seconds: float = math.inf
    ) -> Partition:
        """Two groups that cannot hear each other."""
        far = tuple(others)
        return Partition(tuple((i, j) for i in some for j in far), start_seconds, end_seconds)

    def holds(self, one: int, other: int, time: float) -> bool:
        here = self.start_seconds <= time < self.end_seconds
        return here and ((one, other) in self.pairs or (other, one) in self.pairs)


@dataclass(eq=False)
class Links:
    """When what leaves now arrives; all draws are from ``generator``."""

    size: int
    generator: np.random.Generator
    latency: Latency = 0.0
    partitions: Sequence[Partition] = ()

    def departure(self, one: int, other: int, now: float) -> float:
        """The first time from ``now`` on at which the link is not cut."""
        time = now
        while cuts := [p.end_seconds for p in self.partitions if p.holds(one, other, time)]:
            time = max(cuts)
            if math.isinf(time):
                break
        return time

    def delay(self, sender: int, receiver: int) -> float:
        if isinstance(self.latency, tuple):
            return float(self.generator.uniform(*self.latency))
        seconds = self.latency(sender, receiver, self.generator) if callable(self.latency) else self.latency
        if seconds < 0:
            raise ValueError(f"A latency of {seconds} s is in the past: give one of at least 0.")
        return seconds

    def arrivals(self, sender: int, now: float) -> NDArray[np.float64]:
        """[n]: when each member sees what ``sender`` publishes now; the sender itself at once."""
        if isinstance(self.latency, tuple):
            delays = self.generator.uniform(*self.latency, size=self.size)
        elif callable(self.latency):
            delays = np.array([self.delay(sender, j) if j != sender else 0.0 for j in range(self.size)])
        else:
            delays = np.full(self.size, self.delay(sender, sender))
        if self.partitions:
            delays = delays + [self.departure(sender, j, now) - now for j in range(self.size)]
        delays[sender] = 0.0
        return now + delays


@dataclass(eq=False)
class World:
    """Everything that the members of one simulated fabric have in common."""

    size: int
    baton: Baton
    links: Links
    log: list[Event] | None = field(default_factory=list)

    def record(
        self,
        rank: int,
        kind: str,
        channel: str = "",
        peer: int | None = None,
        version: int | None = None,
        members: tuple[int, ...] = (),
        detail: Any = None,
    ) -> None:
        if self.log is not None:
            now = self.baton.now
            self.log.append(Event(now, rank, kind, channel, peer, version, members, detail))
