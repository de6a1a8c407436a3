"""One channel's memory among neighbours: what a member shows of it, and what it sees of theirs.

A member shows one register, and for each neighbour a *lane*: cells for what only these two say to each other
(what of the register is read now, messages, how many were read), and the slots of its messages. A lane
belongs to one incarnation of the neighbour: one that is started anew gets another, so whatever the former one
wrote or did not clear counts no more.
"""

from __future__ import annotations

import numpy as np

from murmurate.buffers import Bytes, Pool
from murmurate.fabric.network.shm_peer import ShmOwner, ShmPeer, Span
from murmurate.fabric.processes.register import BufferedRegister
from murmurate.fabric.processes.spsc_ring import HEAD, MessageRing, RingCells

STREAMS = 64  # whose messages are counted in a lane; how many of further ones were read goes over the line
_MOST_SLOTS, _LEAST_SLOTS, _MAIL_BYTES = 64, 4, 64 << 20
_LINE_BYTES = 64  # of a processor's cache: what one writes and another reads should not share one
_LINE = _LINE_BYTES // 8
_CELLS = (_LINE, _MOST_SLOTS, _LINE, _MOST_SLOTS, STREAMS)  # sent, order; pin and taken, lent, counts
_CELLS_BYTES = 8 * sum(_CELLS)
_LANE_HEAD_BYTES = _CELLS_BYTES + _MOST_SLOTS * HEAD.size


class Lane:
    """What one member shows one neighbour alone.

    pin, counts: int64 [1] and [STREAMS], which the reader writes: what of the register it reads, and how many
    messages of each stream it has read.
    claimed: slots into which the sender is copying. numbers: of its streams, by tag. withdrawn: the neighbour
    could not map it.
    """

    def __init__(self, memory: Bytes, message_bytes: int, wire_bytes: int, pool: Pool) -> None:
        slots = slots_of(message_bytes)
        cells = memory[:_CELLS_BYTES].view(np.int64)
        sent, order, read, lent, counts = (part.data for part in np.split(cells, np.cumsum(_CELLS)[:-1]))
        self.pin, self.counts = read[:1], counts
        heads = memory[_CELLS_BYTES:_LANE_HEAD_BYTES].data
        messages = memory[_LANE_HEAD_BYTES:].reshape(slots, -1)[:, :message_bytes]
        self.box = MessageRing(
            RingCells(sent[:1], read[1:2], order, lent[:slots], heads), list(messages), pool, wire_bytes
        )
        self.claimed: set[int] = set()
        self.numbers: dict[str, int] = {}
        self.withdrawn = False

    def number(self, tag: str) -> int:
        """Of the stream under that tag; from STREAMS up it is not counted here."""
        return self.numbers.setdefault(tag, len(self.numbers))


class ShmChannel:
    """One channel's memory at one member. All with the lock of its endpoint held.

    register: of this member, once it has had a neighbour. lanes: to neighbours. seen: of neighbours, their
    register and their lane to us.
    """

    def __init__(
        self, lender: ShmOwner | None, size: int, wire_bytes: int, message_bytes: int, pool: Pool
    ) -> None:
        self._lender, self._pool, self._letter_bytes = lender, pool, message_bytes
        self._wire_bytes, self._buffers = (
            wire_bytes,
            size + 3,
        )  # a reader, two of our own, the newest, the next
        self.register: BufferedRegister[Bytes] | None = None
        self.lanes: dict[int, Lane] = {}
        self.seen: dict[int, tuple[BufferedRegister[Bytes], Lane]] = {}
        self._shown: dict[int, tuple[int, int]] = {}
        self._span: Span | None = None  # of the register
        self._spans: dict[int, Span] = {}  # of lanes

    def show(self, peer: int) -> tuple[int, int] | None:
        """Make a lane for a neighbour: where it is to look; None if there is no memory for it."""
        if self._lender is None or self._buffers > 256:
            return None
        try:
            if self._span is None:
                memory, self._span = self._lender.take(self._register_bytes)
                self.register = self._register(memory)
            memory, span = self._lender.take(self._lane_bytes)
        except OSError:
            return None
        self.lanes[peer], self._spans[peer] = (
            Lane(memory, self._letter_bytes, self._wire_bytes, self._pool),
            span,
        )
        return self._span.start, span.start

    def look(self, peer: int, neighbour: ShmPeer, shown: tuple[int, int]) -> bool:
        """Map what a neighbour shows; False if that was tried before. Raises OSError."""
        if self._shown.get(peer) == shown:
            return False
        register, lane = self._shown[peer] = shown
        self.seen[peer] = (
            self._register(neighbour.map(Span(register, self._register_bytes))),
            Lane(
                neighbour.map(Span(lane, self._lane_bytes)), self._letter_bytes, self._wire_bytes, self._pool
            ),
        )
        return True

    def forget(self, peer: int) -> None:
        """It was started anew."""
        if self._lender is not None and peer in self._spans:
            self._lender.clear(self._spans.pop(peer))
        self.lanes.pop(peer, None)
        self.seen.pop(peer, None)
        self._shown.pop(peer, None)

    @property
    def _register_bytes(self) -> int:
        return _LINE_BYTES + self._buffers * _padded(self._wire_bytes)

    @property
    def _lane_bytes(self) -> int:
        return _LANE_HEAD_BYTES + slots_of(self._letter_bytes) * _padded(self._letter_bytes)

    def _register(self, memory: Bytes) -> BufferedRegister[Bytes]:
        buffers = memory[_LINE_BYTES:].reshape(self._buffers, -1)[:, : self._wire_bytes]
        return BufferedRegister(memory[:8].view(np.int64).data, list(buffers))


class Into:
    """Where a codec is to write: a place instead of a pool to take one from."""

    def __init__(self, place: Bytes) -> None:
        self._place = place

    def take(self, size_bytes: int) -> Bytes:
        return self._place


def slots_of(wire_bytes: int) -> int:
    """How many messages of that size may lie in a lane."""
    return max(_LEAST_SLOTS, min(_MOST_SLOTS, _MAIL_BYTES // max(wire_bytes, 1)))


def _padded(size_bytes: int) -> int:
    return max(-(-size_bytes // _LINE_BYTES), 1) * _LINE_BYTES
