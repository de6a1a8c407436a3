"""One channel's shared memory among local peers (members on the same host).

A member offers one register and, for each local peer, a *lane*: memory that only these two use, with the
slots of its messages to the peer, and with cells that say which buffer of the register the peer is reading,
which messages there are, and how many the peer has read. A lane belongs to one incarnation of the peer: a
restarted peer gets a new one, so what the former incarnation wrote, or did not clear, does not matter.
"""

from __future__ import annotations

import numpy as np

from murmurate.buffers import Bytes, Pool
from murmurate.fabric.network.shm_peer import MemoryRange, ShmOwner, ShmPeer
from murmurate.fabric.processes.register import BufferedRegister
from murmurate.fabric.processes.spsc_ring import HEADER, MessageRing, RingCells

STREAMS = 64  # streams whose messages are counted in a lane; counts of others are sent over the connection
_MOST_SLOTS, _LEAST_SLOTS, _MAIL_BYTES = 64, 4, 64 << 20
_LINE_BYTES = 64  # a cache line: cells of different writers should not share one
_LINE = _LINE_BYTES // 8  # cells in a cache line
_MOST_BUFFERS = 256  # of a register, which stores the index of its newest buffer in 8 bits
# Numbers of cells in the parts of a lane: ``sent`` and ``order``, which the sender writes; then the pin and
# ``taken`` (in one line), ``in_use`` and ``counts``, which the reader writes.
_CELLS = (_LINE, _MOST_SLOTS, _LINE, _MOST_SLOTS, STREAMS)
_CELLS_BYTES = 8 * sum(_CELLS)
_LANE_HEADER_BYTES = _CELLS_BYTES + _MOST_SLOTS * HEADER.size


class Lane:
    """The memory through which one member sends to one local peer.

    pin, counts: int64 [1] and [STREAMS], written by the reader: which buffer of the register it reads, and
    how many messages of each stream it has read.
    claimed: slots into which the sender is copying. numbers: the number of each of the sender's streams, by
    tag. withdrawn: whether the peer could not map this lane.
    """

    def __init__(self, memory: Bytes, message_bytes: int, wire_bytes: int, pool: Pool) -> None:
        slots = _slot_count(message_bytes)
        cells = memory[:_CELLS_BYTES].view(np.int64)
        sent, order, read, in_use, counts = (part.data for part in np.split(cells, np.cumsum(_CELLS)[:-1]))
        self.pin, self.counts = read[:1], counts
        headers = memory[_CELLS_BYTES:_LANE_HEADER_BYTES].data
        messages = memory[_LANE_HEADER_BYTES:].reshape(slots, -1)[:, :message_bytes]
        self.ring = MessageRing(
            RingCells(sent[:1], read[1:2], order, in_use[:slots], headers), list(messages), pool, wire_bytes
        )
        self.claimed: set[int] = set()
        self.numbers: dict[str, int] = {}
        self.withdrawn = False

    def number(self, tag: str) -> int:
        """The number of the stream with that tag; if it is STREAMS or more, ``counts`` has no cell for it."""
        return self.numbers.setdefault(tag, len(self.numbers))


class ShmChannel:
    """One channel's shared memory at one member. All methods must be called with the endpoint's lock held.

    register: this member's own register; None before it has a local peer. lanes: lanes to local peers.
    mapped: by local peer, the peer's register and its lane to this member.
    """

    def __init__(
        self, owner: ShmOwner | None, size: int, wire_bytes: int, message_bytes: int, pool: Pool
    ) -> None:
        self._owner, self._pool = owner, pool
        self._message_bytes, self._wire_bytes = message_bytes, wire_bytes
        # buffers of a register: one for each of size - 1 readers, two for our own pins, the newest, the next
        self._buffers = size + 3
        self.register: BufferedRegister[Bytes] | None = None
        self.lanes: dict[int, Lane] = {}
        self.mapped: dict[int, tuple[BufferedRegister[Bytes], Lane]] = {}
        self._offered: dict[int, tuple[int, int]] = {}  # by peer: where its register and its lane begin
        self._register_range: MemoryRange | None = None
        self._lane_ranges: dict[int, MemoryRange] = {}

    def offer(self, peer: int) -> tuple[int, int] | None:
        """Make a lane to a local peer; returns where in the shared memory the register and the lane begin;
        None if there is no memory for them, or if the channel has too many members for a register."""
        if self._owner is None or self._buffers > _MOST_BUFFERS:
            return None
        try:
            if self._register_range is None:
                memory, self._register_range = self._owner.allocate(self._register_bytes)
                self.register = self._register_in(memory)
            memory, where = self._owner.allocate(self._lane_bytes)
        except OSError:
            return None
        self.lanes[peer], self._lane_ranges[peer] = self._lane_in(memory), where
        return self._register_range.start, where.start

    def map(self, peer: int, memory: ShmPeer, offered: tuple[int, int]) -> bool:
        """Map the register and the lane that a local peer offers; False if that was tried before. Raises
        OSError."""
        if self._offered.get(peer) == offered:
            return False
        register, lane = self._offered[peer] = offered
        self.mapped[peer] = (
            self._register_in(memory.map(MemoryRange(register, self._register_bytes))),
            self._lane_in(memory.map(MemoryRange(lane, self._lane_bytes))),
        )
        return True

    def forget(self, peer: int) -> None:
        """Drop the memory shared with the former incarnation of a restarted peer."""
        if self._owner is not None and peer in self._lane_ranges:
            self._owner.release(self._lane_ranges.pop(peer))
        self.lanes.pop(peer, None)
        self.mapped.pop(peer, None)
        self._offered.pop(peer, None)

    @property
    def _register_bytes(self) -> int:
        return _LINE_BYTES + self._buffers * _padded(self._wire_bytes)

    @property
    def _lane_bytes(self) -> int:
        return _LANE_HEADER_BYTES + _slot_count(self._message_bytes) * _padded(self._message_bytes)

    def _register_in(self, memory: Bytes) -> BufferedRegister[Bytes]:
        buffers = memory[_LINE_BYTES:].reshape(self._buffers, -1)[:, : self._wire_bytes]
        return BufferedRegister(memory[:8].view(np.int64).data, list(buffers))

    def _lane_in(self, memory: Bytes) -> Lane:
        return Lane(memory, self._message_bytes, self._wire_bytes, self._pool)


def _slot_count(message_bytes: int) -> int:
    """How many messages of that size a lane holds."""
    return max(_LEAST_SLOTS, min(_MOST_SLOTS, _MAIL_BYTES // max(message_bytes, 1)))


def _padded(size_bytes: int) -> int:
    return max(-(-size_bytes // _LINE_BYTES), 1) * _LINE_BYTES
