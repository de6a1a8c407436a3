"""A consistent cut through a strategy's mail, so that a checkpoint holds each delta exactly once.

Chandy and Lamport's markers, drained: before a member saves number k it sends a marker k to everybody it
sends deltas to, and takes in what its senders sent before theirs. What they send after it is held back until
the own state is saved. Then nothing is in flight across the cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor

from murmurate.fabric.interface import Channel, Message
from murmurate.strategies.interface import LAST_CUT

_PATIENCE_SECONDS = 0.02
# what taking in a message counts as, so that even an endless stream of them reaches the deadline
_HANDLING_SECONDS = 1e-4


class Cut:
    """All mail under ``tag`` goes through here.

    A delta's note is 0 or more; that of marker k is -k, k >= 1. Deltas after a marker are kept until
    ``drain``, so senders bound how many they have without an answer.
    """

    def __init__(self, tag: str) -> None:
        self.tag = tag
        self._held: list[tuple[int, Message]] = []  # each with the number of the marker it came after
        self._marks: dict[int, int] = {}
        self._ahead = 1  # the first cut that does not lie behind us

    def receive(self, channel: Channel, wait_seconds: float = 0.0) -> Message | None:
        """The next delta from this side of the cut, or None."""
        message, came = self._next(channel, wait_seconds)
        while message is None and came:
            message, came = self._next(channel, 0.0)
        return message

    def has_ended(self, rank: int) -> bool:
        """It has announced its last cut: it takes in what was sent before it knew of ours, and no more."""
        return self._marks.get(rank, 0) >= LAST_CUT

    def forget(self, rank: int) -> None:
        """``rank`` begins another life, which has announced nothing yet."""
        self._marks.pop(rank, None)

    def announce(self, channel: Channel, number: int, to: Iterable[int], like: Tensor) -> bool:
        """Tell them that what comes from here from now on belongs after checkpoint ``number``.

        False if that did not reach everybody: then the checkpoint cannot be whole.
        """
        # a short message is not compressed: what rounding kept back of the deltas stays for the next one
        marker = like.new_zeros(1)
        awaiting = [peer for peer in to if not self.has_ended(peer) or number >= LAST_CUT]
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

        Either way the cut lies behind us afterwards, and what was held is delivered.
        """
        self._ahead = max(self._ahead, number)  # cuts that we were never asked for are no longer waited at
        while (message := self._due()) is not None:
            absorb(message)
        spent, awaited = 0.0, set(senders)
        while spent <= deadline_seconds and self._silent(channel, awaited, number):
            before = channel.traffic.waiting_seconds
            message, came = self._next(channel, _PATIENCE_SECONDS)
            if message is not None:
                absorb(message)
            waited = channel.traffic.waiting_seconds - before + _HANDLING_SECONDS
            spent += waited if came else _PATIENCE_SECONDS
        whole = not self._silent(channel, awaited, number)
        self._ahead = max(self._ahead, number + 1)
        return whole

    def _silent(self, channel: Channel, awaited: set[int], number: int) -> bool:
        return any(self._marks.get(j, 0) < number for j in awaited & set(channel.living()))

    def _next(self, channel: Channel, wait_seconds: float) -> tuple[Message | None, bool]:
        """(a delta from this side of the cut if that is what is next, whether anything came)."""
        message = self._due()
        if message is not None:
            return message, True
        found = channel.wait(self.tag, wait_seconds) if wait_seconds else channel.receive(self.tag)
        if found is None:
            return None, False
        mark = self._marks.get(found.sender, 0)
        if found.note < 0:
            self._marks[found.sender] = max(mark, int(-found.note))
        elif mark < self._ahead:
            return found, True
        else:
            self._held.append((mark, found))
        return None, True

    def _due(self) -> Message | None:
        """The first that was held back and no longer has to be."""
        for index, (mark, message) in enumerate(self._held):
            if mark < self._ahead:
                del self._held[index]
                return message
        return None
