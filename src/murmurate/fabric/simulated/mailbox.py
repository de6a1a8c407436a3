"""Mail of the simulated fabric: each message arrives once, though packets are lost, doubled and reordered
(unless ``MailFaults.reliable`` is False)."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import defaultdict, deque
from dataclasses import dataclass, field

from torch import Tensor

from murmurate.fabric.interface import Message
from murmurate.fabric.simulated.network_model import FabricState
from murmurate.fabric.simulated.scheduler import Wait


@dataclass(frozen=True)
class MailFaults:
    """The probabilities of faults of each packet of mail, and whether the mailbox hides them.

    With ``reliable``, as ``Mail`` promises, a lost packet is sent again after ``resend_seconds`` (virtual), a
    duplicate is recognized by its number and dropped, and a packet waits for those sent before it.
    ``reliable=False`` breaks that promise on purpose: strategies see the faults, and messages over a link
    that a ``Partition`` cuts are lost instead of late. A reordered packet is late by up to
    ``resend_seconds``.
    Raises ``ValueError`` for an invalid probability or time, and if resending would never succeed.
    """

    loss: float = 0.0
    duplication: float = 0.0
    reordering: float = 0.0
    reliable: bool = True
    resend_seconds: float = 0.1

    def __post_init__(self) -> None:
        for name in ("loss", "duplication", "reordering"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)} is not a probability: give 0 to 1.")
        if not 0 <= self.resend_seconds < math.inf:
            raise ValueError(f"resend_seconds={self.resend_seconds}: give at least 0, and a finite number.")
        if self.reliable and self.loss == 1:
            raise ValueError("With loss=1 sending again never helps: give less, or reliable=False.")


@dataclass(order=True)
class _Packet:
    """A packet of mail. ticket: orders packets that arrive at the same time. number: of the message."""

    arrival: float
    ticket: int
    sender: int = field(compare=False)
    tag: str = field(compare=False)
    number: int = field(compare=False)
    x: Tensor = field(compare=False)
    note: float = field(compare=False)


class SimulatedMailbox:
    """All mail of one channel. Ranks are those of the fabric. A stream is the messages of one (sender,
    receiver, tag); ``capacity`` bounds the unread messages of each stream."""

    def __init__(
        self, state: FabricState, channel: str, faults: MailFaults, capacity: int, deadline_seconds: float
    ) -> None:
        self._state, self._channel, self._faults = state, channel, faults
        self._capacity, self._deadline = capacity, deadline_seconds
        self._tickets = itertools.count()
        self._in_flight: list[list[_Packet]] = [[] for _ in range(state.size)]  # by receiver: a heap
        self._inbox: dict[tuple[int, str], deque[_Packet]] = defaultdict(deque)  # by (receiver, tag)
        # by stream: packets that wait for earlier ones; numbers of the last message sent and delivered;
        # numbers of the messages that are neither read nor lost
        self._out_of_order: dict[tuple[int, int, str], dict[int, _Packet]] = defaultdict(dict)
        self._sent: dict[tuple[int, int, str], int] = defaultdict(int)
        self._delivered: dict[tuple[int, int, str], int] = defaultdict(int)
        self._outstanding: dict[tuple[int, int, str], set[int]] = defaultdict(set)

    def send(
        self, sender: int, to: int, tag: str, x: Tensor, note: float, deadline_seconds: float | None
    ) -> bool:
        scheduler, stream = self._state.scheduler, (sender, to, tag)
        room = Wait(
            topics=((self._channel, "room", sender),),
            ready=lambda: len(self._outstanding[stream]) < self._capacity or to in scheduler.dead,
            describe=lambda: f"room in the queue '{tag}' of rank {to}, full with {self._capacity} messages",
            deadline_seconds=self._deadline if deadline_seconds is None else deadline_seconds,
        )
        if not scheduler.wait(sender, room) or to in scheduler.dead:
            return False
        self._sent[stream] += 1
        number = self._sent[stream]
        self._outstanding[stream].add(number)
        self._state.record(sender, "send", self._channel, to, number, detail=tag)
        arrivals = self._arrival_times(sender, to, x.nbytes)
        for arrival in arrivals:
            packet = _Packet(arrival, next(self._tickets), sender, tag, number, x.detach().clone(), note)
            heapq.heappush(self._in_flight[to], packet)
        if not arrivals:
            self._record_loss(stream, number)
        scheduler.notify((self._channel, "mail", to))
        return True

    def receive(self, receiver: int, tag: str) -> Message | None:
        self._deliver(receiver)
        if not self._inbox[receiver, tag]:
            return None
        packet = self._inbox[receiver, tag].popleft()
        self._outstanding[packet.sender, receiver, tag].discard(packet.number)
        self._state.record(receiver, "receive", self._channel, packet.sender, packet.number, detail=tag)
        self._state.scheduler.notify((self._channel, "room", packet.sender))
        return Message(packet.sender, packet.x, packet.note)

    def wait(self, receiver: int, tag: str, deadline_seconds: float) -> Message | None:
        def arrived() -> bool:
            self._deliver(receiver)
            return bool(self._inbox[receiver, tag])

        def next_arrival() -> float:
            return self._in_flight[receiver][0].arrival if self._in_flight[receiver] else math.inf

        wait = Wait(
            topics=((self._channel, "mail", receiver),),
            ready=arrived,
            describe=lambda: f"mail '{tag}'",
            deadline_seconds=deadline_seconds,
            wake_at=next_arrival,
        )
        return self.receive(receiver, tag) if self._state.scheduler.wait(receiver, wait) else None

    def on_crash(self, rank: int) -> None:
        """Messages to the dead rank, in flight or unread, are lost; messages that it has sent arrive."""
        for stream in sorted(self._outstanding):
            if stream[1] == rank:
                for number in sorted(self._outstanding[stream]):
                    self._record_loss(stream, number)
        self._in_flight[rank].clear()
        for (receiver, _), messages in self._inbox.items():
            if receiver == rank:
                messages.clear()

    def on_revival(self, rank: int) -> None:
        """Expect, in each stream to ``rank``, the message after those lost at its crash."""
        for stream, number in self._sent.items():
            if stream[1] == rank:
                self._delivered[stream] = number
                self._out_of_order[stream].clear()

    def _record_loss(self, stream: tuple[int, int, str], number: int) -> None:
        sender, to, tag = stream
        self._outstanding[stream].discard(number)
        self._state.record(sender, "lost", self._channel, to, number, detail=tag)

    def _arrival_times(self, sender: int, to: int, size_bytes: int) -> list[float]:
        """The times at which a packet arrives: one, two if it is duplicated, or none if it is lost."""
        faults, links = self._faults, self._state.links
        now = self._state.scheduler.now
        departure = links.departure(sender, to, now)
        if faults.reliable:
            while self._happens(faults.loss):
                departure = links.departure(sender, to, departure + faults.resend_seconds)
        elif departure > now or self._happens(faults.loss):
            return []
        copies = 2 if self._happens(faults.duplication) else 1
        is_late = departure > now
        arrivals = [links.arrival(sender, to, departure, size_bytes, is_late) for _ in range(copies)]
        most = faults.resend_seconds
        return [a + self._happens(faults.reordering) * links.generator.uniform(0, most) for a in arrivals]

    def _happens(self, probability: float) -> bool:
        return probability > 0 and bool(self._state.links.generator.random() < probability)

    def _deliver(self, receiver: int) -> None:
        in_flight, now = self._in_flight[receiver], self._state.scheduler.now
        while in_flight and in_flight[0].arrival <= now:
            packet = heapq.heappop(in_flight)
            if not self._faults.reliable:
                self._inbox[receiver, packet.tag].append(packet)
                continue
            stream = (packet.sender, receiver, packet.tag)
            out_of_order = self._out_of_order[stream]
            if packet.number > self._delivered[stream]:
                out_of_order[packet.number] = packet
            while (due := out_of_order.pop(self._delivered[stream] + 1, None)) is not None:
                self._delivered[stream] += 1
                self._inbox[receiver, packet.tag].append(due)
