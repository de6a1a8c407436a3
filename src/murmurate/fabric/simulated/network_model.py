"""The network of a simulated fabric: links with delays, losses and partitions, and a log of events."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from murmurate.fabric.simulated.latency import Network
from murmurate.fabric.simulated.scheduler import Scheduler

# Virtual seconds that a message takes: constant, uniform between two, or drawn by a function of
# (sender, receiver, generator).
Latency = float | tuple[float, float] | Callable[[int, int, np.random.Generator], float]


@dataclass(frozen=True)
class Event:
    """One entry of the log, which is in the order of events.

    kind: ``publish``, ``peek``, ``mean``, ``broadcast``, ``gather``, ``send``, ``receive``, ``lost`` (mail
        that will never be received), ``crash``, ``return``, or the kind given to ``Member.note``.
    peer: the publisher of a peek, the receiver of a message sent or lost, the sender of a message received,
        the root of a broadcast. version: the register's version, or the number of the message or collective,
        all from 1 up.
    members: those whose vectors a mean or gather contains. detail: the tag of mail, the value of a note.
    """

    time_seconds: float
    rank: int
    kind: str
    channel: str = ""
    peer: int | None = None
    version: int | None = None
    members: tuple[int, ...] = ()
    detail: Any = None


@dataclass(frozen=True)
class Partition:
    """Links that are cut, in both directions, from ``start_seconds`` up to ``end_seconds`` (virtual).

    These are the links between ``pairs`` of members, and those between the members of ``island`` and all
    others. Messages sent meanwhile leave when the cut ends, as from a socket that retries (mail is lost if
    ``MailFaults.reliable`` is False); messages in flight at its start arrive. A collective among separated
    members waits.
    """

    pairs: tuple[tuple[int, int], ...] = ()
    start_seconds: float = 0.0
    end_seconds: float = math.inf
    island: frozenset[int] = frozenset()

    def cuts(self, one: int, other: int, time: float) -> bool:
        """Whether the link between two ranks is cut at ``time``."""
        if not self.start_seconds <= time < self.end_seconds:
            return False
        if (one in self.island) != (other in self.island):
            return True
        return (one, other) in self.pairs or (other, one) in self.pairs

    def divides(self, ranks: set[int], time: float) -> bool:
        """Whether a link between any two of ``ranks`` is cut at ``time``."""
        if not self.start_seconds <= time < self.end_seconds:
            return False
        inside = len(ranks & self.island)
        return 0 < inside < len(ranks) or any(i in ranks and j in ranks for i, j in self.pairs)

    @property
    def ranks(self) -> set[int]:
        """All ranks that it names."""
        return {rank for pair in self.pairs for rank in pair} | self.island


@dataclass(eq=False)
class Links:
    """The links between ``size`` members: when messages arrive over them. All random draws are from
    ``generator``.

    network: how long messages take by their size; without it, they take the ``latency`` alone. Raises
    ValueError for a range of latencies that begins below 0 or ends before it begins.
    """

    size: int
    generator: np.random.Generator
    latency: Latency = 0.0
    partitions: list[Partition] = field(default_factory=list)
    network: Network | None = None

    def __post_init__(self) -> None:
        if isinstance(self.latency, tuple) and not 0 <= self.latency[0] <= self.latency[1]:
            raise ValueError(f"A latency from {self.latency[0]} to {self.latency[1]} s: give 0 <= a <= b.")
        # when each member's port is free to send, and to receive, the next message
        self._can_send_at, self._can_receive_at = [0.0] * self.size, [0.0] * self.size

    def departure(self, one: int, other: int, now: float) -> float:
        """The first time from ``now`` on at which the link between two ranks is not cut."""
        time = now
        while ends := [p.end_seconds for p in self.partitions if p.cuts(one, other, time)]:
            time = max(ends)
            if math.isinf(time):
                break
        return time

    def delay(self, sender: int, receiver: int) -> float:
        """A draw of ``latency``, in seconds. Raises ValueError for one below 0."""
        if isinstance(self.latency, tuple):
            return float(self.generator.uniform(*self.latency))
        seconds = self.latency(sender, receiver, self.generator) if callable(self.latency) else self.latency
        if not seconds >= 0:
            raise ValueError(f"A latency of {seconds} s is in the past, or no number: it must be at least 0.")
        return seconds

    def arrival(
        self, sender: int, receiver: int, departure: float, size_bytes: int, is_late: bool = False
    ) -> float:
        """When a message ready at ``departure`` arrives. It queues behind earlier ones at both ports, but not
        behind their random delays, nor behind those that leave later than they are sent (``is_late``)."""
        network = self.network
        if network is None or sender == receiver:
            return departure + (self.delay(sender, receiver) if network is None else 0.0)
        delay = float(network.delays(1, size_bytes, self.generator)[0])
        if is_late or not network.ports:
            return departure + delay
        busy_seconds = network.transfer_seconds(size_bytes)
        departure = max(departure, self._can_send_at[sender])
        self._can_send_at[sender] = departure + busy_seconds
        begins = departure + min(delay - busy_seconds, network.latency_seconds)
        self._can_receive_at[receiver] = max(begins, self._can_receive_at[receiver]) + busy_seconds
        return max(departure + delay, self._can_receive_at[receiver])

    def arrivals(self, sender: int, now: float, size_bytes: int) -> NDArray[np.float64] | float:
        """The times at which members see a vector that ``sender`` publishes now: [n], or one time for all.

        The time is infinite for a member that never sees it, as the message is lost.
        """
        if any(cut.end_seconds <= now for cut in self.partitions):
            self.partitions[:] = [cut for cut in self.partitions if cut.end_seconds > now]
        is_cut = any(p.start_seconds <= now and (p.island or sender in p.ranks) for p in self.partitions)
        network = self.network
        if network is not None:
            if network.constant and not is_cut:
                return now + network.latency_seconds + network.transfer_seconds(size_bytes)
            delays = network.delays(self.size, size_bytes, self.generator)
            if network.loss:
                delays[self.generator.random(self.size) < network.loss] = math.inf
        elif isinstance(self.latency, tuple):
            delays = self.generator.uniform(*self.latency, size=self.size)
        elif callable(self.latency):
            delays = np.array([self.delay(sender, j) if j != sender else 0.0 for j in range(self.size)])
        elif not is_cut:
            return now + self.delay(sender, sender)
        else:
            delays = np.full(self.size, self.delay(sender, sender))
        if is_cut:
            delays = delays + (self._departures(sender, now) - now)
        return now + delays

    def _departures(self, sender: int, now: float) -> NDArray[np.float64]:
        """The result of ``departure`` for the link to each member, [n]."""
        if any(cut.pairs for cut in self.partitions):
            return np.array([self.departure(sender, j, now) for j in range(self.size)])
        # one pass by start is enough: times only grow, and a message that leaves before a cut starts leaves
        # before all later ones
        times = np.full(self.size, now)
        for cut in sorted(self.partitions, key=lambda cut: cut.start_seconds):
            inside = np.zeros(self.size, dtype=bool)
            inside[list(cut.island)] = True
            delayed = (
                (inside != (sender in cut.island)) & (times >= cut.start_seconds) & (times < cut.end_seconds)
            )
            times[delayed] = cut.end_seconds
        return times


@dataclass(eq=False)
class FabricState:
    """The state that all members of one simulated fabric share."""

    size: int
    scheduler: Scheduler
    links: Links
    log: list[Event] | None = field(default_factory=list)
    has_finished: Callable[[int], bool] = lambda rank: False

    def record(self, *fields: Any, **more_fields: Any) -> None:
        """Add an ``Event`` to the log. fields: its fields after the time."""
        if self.log is not None:
            self.log.append(Event(self.scheduler.now, *fields, **more_fields))
