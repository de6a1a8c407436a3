"""A barrier in a strategy's mail, so that a checkpoint contains each delta exactly once.

Chandy and Lamport's markers (1985): before a member saves checkpoint k it sends a marker k to all members
that it sends deltas to, and applies the deltas that others sent it before their markers. Deltas that arrive
after a marker are held back until the state is saved. Then no delta is in flight across the checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor

from murmurate.fabric.interface import Channel, Message
from murmurate.strategies.interface import FINAL_DRAIN, MemberEvent, centre_of

_IDLE_SECONDS = 0.002  # how long a centre waits for the next message
_POLL_SECONDS = 0.02
# charged for each message, so that the deadline passes even if messages never cease to arrive
_HANDLING_SECONDS = 1e-4


class CheckpointBarrier:
    """Receives all mail under ``tag``.

    The note of a delta is 0 or more, and that of marker k is -k, k >= 1. Deltas that arrive after a marker
    are held back until ``drain``, so a sender must limit how many deltas it sends without a reply.
    """

    def __init__(self, tag: str) -> None:
        self.tag = tag
        # (number of its sender's last marker before it, delta)
        self._held: list[tuple[int, Message]] = []
        self._markers: dict[int, int] = {}  # by sender: the number of its last marker
        self._next_number = 1  # number of the next checkpoint

    def receive(self, channel: Channel, wait_seconds: float = 0.0) -> Message | None:
        """The next delta that belongs before the next checkpoint, or None."""
        delta, arrived = self._next(channel, wait_seconds)
        while delta is None and arrived:
            delta, arrived = self._next(channel, 0.0)
        return delta

    def serve(self, channel: Channel, absorb: Callable[[Message], None]) -> bool:
        """At a centre: absorb the next delta, for which it waits a moment; returns whether one came."""
        delta = self.receive(channel, _IDLE_SECONDS)
        if delta is not None:
            absorb(delta)
        return delta is not None

    def has_ended(self, rank: int) -> bool:
        """Whether ``rank`` has sent its final marker. It still takes deltas that precede this member's final
        marker, and none that follow it."""
        return self._markers.get(rank, 0) >= FINAL_DRAIN

    def on_member(self, event: MemberEvent) -> None:
        """Forget the markers of a member that died; and the final one, which others still heed, only once it
        is replaced. No others then, as those of the replacement may have arrived."""
        if event.kind == ("joined" if self.has_ended(event.rank) else "died"):
            self._markers.pop(event.rank, None)

    def send_markers(self, channel: Channel, number: int, to: Iterable[int], like: Tensor) -> bool:
        """Send marker ``number`` to the members ``to``. like: a tensor with the deltas' dtype.

        Returns False if a marker could not be sent: then the checkpoint cannot be complete.
        """
        # so short a message is sent uncompressed: the error feedback of earlier deltas stays for the next one
        marker = like.new_zeros(1)
        receivers = [peer for peer in to if not self.has_ended(peer) or number >= FINAL_DRAIN]
        sent = [channel.send(peer, self.tag, marker, note=-float(number)) for peer in receivers]
        return all(sent)

    def drain(
        self,
        channel: Channel,
        number: int,
        senders: Iterable[int],
        absorb: Callable[[Message], None],
        deadline_seconds: float,
    ) -> bool:
        """Absorb all deltas that ``senders`` which are not lost sent before their marker; False if the
        deadline passed first. It may then be called again with the same number, to go on.

        In both cases, ``receive`` afterwards delivers the deltas that were held back.
        """
        # holds back those after this marker, and none after markers of skipped checkpoints
        self._next_number = number
        while (delta := self._pop_due()) is not None:
            absorb(delta)
        spent_seconds, awaited = 0.0, set(senders)
        while spent_seconds <= deadline_seconds and self._lacks_marker(channel, awaited, number):
            waited_before = channel.traffic.waiting_seconds
            delta, arrived = self._next(channel, _POLL_SECONDS)
            if delta is not None:
                absorb(delta)
            waited = channel.traffic.waiting_seconds - waited_before + _HANDLING_SECONDS
            spent_seconds += waited if arrived else _POLL_SECONDS
        complete = not self._lacks_marker(channel, awaited, number)
        self._next_number = number + 1
        return complete

    def drain_to_centre(
        self,
        channel: Channel,
        number: int,
        absorb: Callable[[Message], None],
        deadline_seconds: float,
        like: Tensor,
    ) -> bool:
        """``drain`` at a centre, to which all others ``send_markers``."""
        centre = centre_of(channel)
        if channel.rank != centre:
            return self.send_markers(channel, number, [centre], like)
        return self.drain(channel, number, range(centre), absorb, deadline_seconds)

    def _lacks_marker(self, channel: Channel, awaited: set[int], number: int) -> bool:
        """Whether a member of ``awaited`` that is not lost has not yet sent marker ``number``. What a member
        whose connection is interrupted has sent will still arrive."""
        return any(self._markers.get(j, 0) < number and not channel.has_lost(j) for j in awaited)

    def _next(self, channel: Channel, wait_seconds: float) -> tuple[Message | None, bool]:
        """(the next message if it is a delta before the next checkpoint, whether any message arrived)."""
        delta = self._pop_due()
        if delta is not None:
            return delta, True
        message = channel.wait(self.tag, wait_seconds) if wait_seconds else channel.receive(self.tag)
        if message is None:
            return None, False
        marker = self._markers.get(message.sender, 0)
        if message.note < 0:
            self._markers[message.sender] = max(marker, int(-message.note))
        elif marker < self._next_number:
            return message, True
        else:
            self._held.append((marker, message))
        return None, True

    def _pop_due(self) -> Message | None:
        """The first delta that need not be held back any longer."""
        for index, (marker, delta) in enumerate(self._held):
            if marker < self._next_number:
                del self._held[index]
                return delta
        return None
