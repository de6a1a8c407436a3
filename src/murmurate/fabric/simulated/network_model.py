"""What surrounds the members of a simulated fabric: links that delay, lose and are cut, and a log."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from murmurate.fabric.simulated.latency import Network
from murmurate.fabric.simulated.scheduler import Scheduler

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
    travels arrives. A collective among members that are cut apart waits. Cut are the ``pairs``, and the
    members of ``island`` from everybody else.
    """

    pairs: tuple[tuple[int, int], ...] = ()
    start_seconds: float = 0.0
    end_seconds: float = math.inf
    island: frozenset[int] = frozenset()

    @staticmethod
    def between(
        some: Iterable[int], others: Iterable[int], start_seconds: float = 0.0, end_seconds: float = math.inf
    ) -> Partition:
        """Two groups that cannot hear each other."""
        far = tuple(others)
        return Partition(tuple((i, j) for i in some for j in far), start_seconds, end_seconds)

    def holds(self, one: int, other: int, time: float) -> bool:
        if not self.start_seconds <= time < self.end_seconds:
            return False
        if (one in self.island) != (other in self.island):
            return True
        return (one, other) in self.pairs or (other, one) in self.pairs

    def divides(self, ranks: set[int], time: float) -> bool:
        """Whether any two of ``ranks`` cannot hear each other."""
        if not self.start_seconds <= time < self.end_seconds:
            return False
        inside = len(ranks & self.island)
        return 0 < inside < len(ranks) or any(i in ranks and j in ranks for i, j in self.pairs)

    @property
    def ranks(self) -> set[int]:
        return {rank for pair in self.pairs for rank in pair} | self.island


@dataclass(eq=False)
class Links:
    """When what leaves now arrives; all draws are from ``generator``.

    ``network`` says what bytes take; without one it is the ``latency`` alone.
    """

    size: int
    generator: np.random.Generator
    latency: Latency = 0.0
    partitions: list[Partition] = field(default_factory=list)
    network: Network | None = None

    def __post_init__(self) -> None:
        # from when on each member's port can send, and receive, the next message
        self._out, self._in = [0.0] * self.size, [0.0] * self.size

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

    def arrival(self, sender: int, receiver: int, leaves: float, size_bytes: int) -> float:
        """When a message that is ready to leave at ``leaves`` is there, behind what the ports carry."""
        network = self.network
        if network is None or sender == receiver:
            return leaves + (self.delay(sender, receiver) if network is None else 0.0)
        delay = float(network.delays(1, size_bytes, self.generator)[0])
        if not network.ports:
            return leaves + delay
        busy = network.transfer_seconds(size_bytes)
        leaves = max(leaves, self._out[sender])
        self._out[sender] = leaves + busy
        there = max(leaves + delay, self._in[receiver] + busy)
        self._in[receiver] = there
        return there

    def arrivals(self, sender: int, now: float, size_bytes: int) -> NDArray[np.float64] | float:
        """When each member sees what ``sender`` publishes now: [n], or one time that holds for all others.

        Infinity where it is lost.
        """
        if any(cut.end_seconds <= now for cut in self.partitions):
            self.partitions[:] = [cut for cut in self.partitions if cut.end_seconds > now]
        cut = any(p.start_seconds <= now and (p.island or sender in p.ranks) for p in self.partitions)
        network = self.network
        if network is not None:
            if network.constant and not cut:
                return now + network.latency_seconds + network.transfer_seconds(size_bytes)
            delays = network.delays(self.size, size_bytes, self.generator)
            if network.loss:
                delays[self.generator.random(self.size) < network.loss] = math.inf
        elif isinstance(self.latency, tuple):
            delays = self.generator.uniform(*self.latency, size=self.size)
        elif callable(self.latency):
            delays = np.array([self.delay(sender, j) if j != sender else 0.0 for j in range(self.size)])
        elif not cut:
            return now + self.delay(sender, sender)
        else:
            delays = np.full(self.size, self.delay(sender, sender))
        if cut:
            delays = delays + (self._departures(sender, now) - now)
        return now + delays

    def _departures(self, sender: int, now: float) -> NDArray[np.float64]:
        """[n]: ``departure`` to everybody."""
        if any(cut.pairs for cut in self.partitions):
            return np.array([self.departure(sender, j, now) for j in range(self.size)])
        times, cuts = np.full(self.size, now), sorted(self.partitions, key=lambda cut: cut.start_seconds)
        for cut in cuts + cuts[::-1] if len(cuts) > 1 else cuts:
            inside = np.zeros(self.size, dtype=bool)
            inside[list(cut.island)] = True
            held = (
                (inside != (sender in cut.island)) & (times >= cut.start_seconds) & (times < cut.end_seconds)
            )
            times[held] = cut.end_seconds
        return times


@dataclass(eq=False)
class World:
    """Everything that the members of one simulated fabric have in common."""

    size: int
    scheduler: Scheduler
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
            now = self.scheduler.now
            self.log.append(Event(now, rank, kind, channel, peer, version, members, detail))
