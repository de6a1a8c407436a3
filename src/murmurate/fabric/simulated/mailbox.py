"""Mail of the simulated fabric: packets that get lost, doubled and overtaken, and what mends that."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import defaultdict, deque
from dataclasses import dataclass, field

from torch import Tensor

from murmurate.fabric.interface import Message
from murmurate.fabric.simulated.network_model import World
from murmurate.fabric.simulated.scheduler import Wait


@dataclass(frozen=True)
class Faults:
    """What the wire does to each packet of mail, by probabilities, and whether the mailbox mends it.

    Mended, as ``Mail`` promises: a lost packet is sent again after ``resend_seconds``, a doubled one
    is dropped by its number, an overtaken one waits for those before it. ``mend=False`` breaks that
    promise on purpose and lets the faults through to the strategy. A reordered packet is late by up to
    ``resend_seconds``. Raises ``ValueError`` for what is no probability, or mail that no resending saves.
    """

    loss: float = 0.0
    duplication: float = 0.0
    reordering: float = 0.0
    mend: bool = True
    resend_seconds: float = 0.1

    def __post_init__(self) -> None:
        for name in ("loss", "duplication", "reordering"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)} is no probability: give 0 to 1.")
        if self.mend and self.loss == 1:
            raise ValueError("With loss=1 sending again never helps: give less, or mend=False.")


@dataclass(order=True)
class _Packet:
    arrival: float
    ticket: int
    sender: int = field(compare=False)
    tag: str = field(compare=False)
    number: int = field(compare=False)
    x: Tensor = field(compare=False)
    note: float = field(compare=False)


class SimulatedMailbox:
    """All mail of one channel. A stream is one (sender, receiver, tag); each has its own bound."""

    def __init__(
        self, world: World, channel: str, faults: Faults, capacity: int, deadline_seconds: float
    ) -> None:
        self._world, self._channel, self._faults = world, channel, faults
        self._capacity, self._deadline = capacity, deadline_seconds
        self._tickets = itertools.count()
        self._flying: list[list[_Packet]] = [[] for _ in range(world.size)]
        self._inbox: dict[tuple[int, str], deque[_Packet]] = defaultdict(deque)
        self._early: dict[tuple[int, int, str], dict[int, _Packet]] = defaultdict(dict)
        self._sent: dict[tuple[int, int, str], int] = defaultdict(int)
        self._taken: dict[tuple[int, int, str], int] = defaultdict(int)
        self._outstanding: dict[tuple[int, int, str], set[int]] = defaultdict(set)

    def send(
        self, sender: int, to: int, tag: str, x: Tensor, note: float, deadline_seconds: float | None
    ) -> bool:
        scheduler, stream = self._world.scheduler, (sender, to, tag)
        room = Wait(
            topics=((self._channel, "room", sender),),
            ready=lambda: len(self._outstanding[stream]) < self._capacity or to in scheduler.dead,
            words=lambda: f"room in the queue '{tag}' of rank {to}, full with {self._capacity} messages",
            deadline_seconds=self._deadline if deadline_seconds is None else deadline_seconds,
        )
        if not scheduler.wait(sender, room) or to in scheduler.dead:
            return False
        self._sent[stream] += 1
        number = self._sent[stream]
        self._outstanding[stream].add(number)
        self._world.record(sender, "send", self._channel, to, number, detail=tag)
        journeys = self._journeys(sender, to, x.nbytes)
        for arrival in journeys:
            packet = _Packet(arrival, next(self._tickets), sender, tag, number, x.detach().clone(), note)
            heapq.heappush(self._flying[to], packet)
        if not journeys:
            self._lose(stream, number)
        scheduler.touch((self._channel, "mail", to))
        return True

    def receive(self, receiver: int, tag: str) -> Message | None:
        self._deliver(receiver)
        if not self._inbox[receiver, tag]:
            return None
        packet = self._inbox[receiver, tag].popleft()
        self._outstanding[packet.sender, receiver, tag].discard(packet.number)
        self._world.record(receiver, "receive", self._channel, packet.sender, packet.number, detail=tag)
        self._world.scheduler.touch((self._channel, "room", packet.sender))
        return Message(packet.sender, packet.x, packet.note)

    def wait(self, receiver: int, tag: str, deadline_seconds: float) -> Message | None:
        def arrived() -> bool:
            self._deliver(receiver)
            return bool(self._inbox[receiver, tag])

        def next_arrival() -> float:
            return self._flying[receiver][0].arrival if self._flying[receiver] else math.inf

        wait = Wait(
            topics=((self._channel, "mail", receiver),),
            ready=arrived,
            words=lambda: f"mail '{tag}'",
            deadline_seconds=deadline_seconds,
            wake_at=next_arrival,
        )
        return self.receive(receiver, tag) if self._world.scheduler.wait(receiver, wait) else None

    def on_crash(self, rank: int) -> None:
        """What was on its way to the dead, or lay unread, is lost; what the dead had sent arrives."""
        for stream in sorted(self._outstanding):
            if stream[1] == rank:
                for number in sorted(self._outstanding[stream]):
                    self._lose(stream, number)
        self._flying[rank].clear()
        for (receiver, _), messages in self._inbox.items():
            if receiver == rank:
                messages.clear()

    def on_return(self, rank: int) -> None:
        """The numbering of what is sent to ``rank`` goes on after what was lost."""
        for stream, number in self._sent.items():
            if stream[1] == rank:
                self._taken[stream] = number
                self._early[stream].clear()

    def _lose(self, stream: tuple[int, int, str], number: int) -> None:
        sender, to, tag = stream
        self._outstanding[stream].discard(number)
        self._world.record(sender, "lost", self._channel, to, number, detail=tag)

    def _journeys(self, sender: int, to: int, size_bytes: int) -> list[float]:
        """When the packet arrives: once, more often if doubled, never if lost for good."""
        faults, links = self._faults, self._world.links
        now = self._world.scheduler.now
        leaves = links.departure(sender, to, now)
        if faults.mend:
            while self._happens(faults.loss):
                leaves = links.departure(sender, to, leaves + faults.resend_seconds)
        elif leaves > now or self._happens(faults.loss):
            return []
        copies = 2 if self._happens(faults.duplication) else 1
        arrivals = [links.arrival(sender, to, leaves, size_bytes) for _ in range(copies)]
        late = faults.resend_seconds
        return [a + self._happens(faults.reordering) * links.generator.uniform(0, late) for a in arrivals]

    def _happens(self, probability: float) -> bool:
        return probability > 0 and bool(self._world.links.generator.random() < probability)

    def _deliver(self, receiver: int) -> None:
        flying, now = self._flying[receiver], self._world.scheduler.now
        while flying and flying[0].arrival <= now:
            packet = heapq.heappop(flying)
            if not self._faults.mend:
                self._inbox[receiver, packet.tag].append(packet)
                continue
            stream = (packet.sender, receiver, packet.tag)
            early = self._early[stream]
            if packet.number > self._taken[stream]:
                early[packet.number] = packet
            while (due := early.pop(self._taken[stream] + 1, None)) is not None:
                self._taken[stream] += 1
                self._inbox[receiver, packet.tag].append(due)
