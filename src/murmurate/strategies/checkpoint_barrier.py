"""A barrier through a strategy's mail, so that a checkpoint holds each delta exactly once.

Chandy and Lamport's markers (1985): before a member saves checkpoint k it sends a marker k to everybody it
sends deltas to, and takes in what its senders sent before theirs. What they send after it is held back until
the own state is saved. Then nothing is in flight across the checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor

from murmurate.fabric.interface import Channel, Message
from murmurate.strategies.interface import FINAL_DRAIN, MemberEvent

IDLE_SECONDS = 0.002  # that a centre waits for the next message
_PATIENCE_SECONDS = 0.02
# what taking in a message counts as, so that even an endless stream of them reaches the deadline
_HANDLING_SECONDS = 1e-4


class CheckpointBarrier:
    """All mail under ``tag`` is received here.

    A delta's note is 0 or more; that of marker k is -k, k >= 1. Deltas that come after a marker are kept
    until ``drain``, so a sender bounds how many it has without an answer.
    """

    def __init__(self, tag: str) -> None:
        self.tag = tag
        self._held: list[tuple[int, Message]] = []  # each with the number of the marker it came after
        self._markers: dict[int, int] = {}  # the last one of each sender
        self._next_number = 1  # of the first checkpoint that is not behind us

    def receive(self, channel: Channel, wait_seconds: float = 0.0) -> Message | None:
        """The next delta of before the next checkpoint, or None."""
        delta, came = self._next(channel, wait_seconds)
        while delta is None and came:
            delta, came = self._next(channel, 0.0)
        return delta

    def has_ended(self, rank: int) -> bool:
        """It has sent its last marker: it takes in what was sent before it got ours, and no more."""
        return self._markers.get(rank, 0) >= FINAL_DRAIN

    def on_member(self, event: MemberEvent) -> None:
        """One that has joined in the place of another has sent no marker yet."""
        if event.kind == "joined":
            self._markers.pop(event.rank, None)

    def send_markers(self, channel: Channel, number: int, to: Iterable[int], like: Tensor) -> bool:
        """What is sent to them from now on belongs after checkpoint ``number``. like: of the deltas' dtype.

        False if a marker did not reach its receiver: then the checkpoint cannot be whole.
        """
        # a short message is not compressed: what rounding kept back of the deltas stays for the next one
        marker = like.new_zeros(1)
        awaiting = [peer for peer in to if not self.has_ended(peer) or number >= FINAL_DRAIN]
        reached = [channel.send(peer, self.tag, marker, note=-float(number)) for peer in awaiting]
        return all(reached)

    def drain(
        self,
        channel: Channel,
        number: int,
        senders: Iterable[int],
        absorb: Callable[[Message], None],
        deadline_seconds: float,
    ) -> bool:
        """Absorb all that the living among ``senders`` sent before their marker; False at the deadline.

        Either way the checkpoint is behind us afterwards, and what was held back is delivered.
        """
        # of checkpoints that were skipped nothing is held back
        self._next_number = max(self._next_number, number)
        while (delta := self._due()) is not None:
            absorb(delta)
        spent, awaited = 0.0, set(senders)
        while spent <= deadline_seconds and self._silent(channel, awaited, number):
            before = channel.traffic.waiting_seconds
            delta, came = self._next(channel, _PATIENCE_SECONDS)
            if delta is not None:
                absorb(delta)
            waited = channel.traffic.waiting_seconds - before + _HANDLING_SECONDS
            spent += waited if came else _PATIENCE_SECONDS
        whole = not self._silent(channel, awaited, number)
        self._next_number = max(self._next_number, number + 1)
        return whole

    def _silent(self, channel: Channel, awaited: set[int], number: int) -> bool:
        return any(self._markers.get(j, 0) < number for j in awaited & set(channel.living()))

    def _next(self, channel: Channel, wait_seconds: float) -> tuple[Message | None, bool]:
        """(a delta of before the next checkpoint if that is what is next, whether anything came)."""
        delta = self._due()
        if delta is not None:
            return delta, True
        found = channel.wait(self.tag, wait_seconds) if wait_seconds else channel.receive(self.tag)
        if found is None:
            return None, False
        marker = self._markers.get(found.sender, 0)
        if found.note < 0:
            self._markers[found.sender] = max(marker, int(-found.note))
        elif marker < self._next_number:
            return found, True
        else:
            self._held.append((marker, found))
        return None, True

    def _due(self) -> Message | None:
        """The first that was held back and no longer has to be."""
        for index, (marker, delta) in enumerate(self._held):
            if marker < self._next_number:
                del self._held[index]
                return delta
        return None
