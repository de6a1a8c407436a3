"""One channel's shared memory among local peers: what a member offers, and what it maps of its peers.

A member offers one register and, for each local peer, a *lane*: cells that only these two use (which buffer
of the register is being read, messages, how many were read), and the slots of its messages. A lane belongs to
one incarnation of the peer: a restarted peer gets a new one, so nothing that the former incarnation wrote, or
did not clear, matters any more.
"""

from __future__ import annotations

import numpy as np

from murmurate.buffers import Bytes, Pool
from murmurate.fabric.network.shm_peer import MemoryRange, ShmOwner, ShmPeer
from murmurate.fabric.processes.register import BufferedRegister
from murmurate.fabric.processes.spsc_ring import HEADER, MessageRing, RingCells

STREAMS = 64  # streams counted in a lane; the counts of further ones are sent over the connection
_MOST_SLOTS, _LEAST_SLOTS, _MAIL_BYTES = 64, 4, 64 << 20
_LINE_BYTES = 64  # a cache line: cells of different writers should not share one
_LINE = _LINE_BYTES // 8
_CELLS = (_LINE, _MOST_SLOTS, _LINE, _MOST_SLOTS, STREAMS)  # sent, order; pin and taken, in use, counts
_CELLS_BYTES = 8 * sum(_CELLS)
_LANE_HEADER_BYTES = _CELLS_BYTES + _MOST_SLOTS * HEADER.size


class Lane:
    """Memory from one member to one local peer.

    pin, counts: int64 [1] and [STREAMS], written by the reader: which buffer of the register it reads, and
    how many messages of each stream it has read.
    claimed: slots into which the sender is copying. numbers: message numbers of the sender's streams, by tag.
    withdrawn: the peer could not map this lane.
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
        """The number of the stream under that tag; a stream from STREAMS up is not counted here."""
        return self.numbers.setdefault(tag, len(self.numbers))


class ShmChannel:
    """One channel's shared memory at one member. All methods need the endpoint's lock.

    register: the register of this member, once it has had a local peer. lanes: lanes to local peers. mapped:
    of local peers, their register and their lane to this member.
    """

    def __init__(
        self, owner: ShmOwner | None, size: int, wire_bytes: int, message_bytes: int, pool: Pool
    ) -> None:
        self._owner, self._pool = owner, pool
        self._message_bytes, self._wire_bytes = message_bytes, wire_bytes
        self._buffers = size + 3  # one for each of size - 1 readers, two of our own, the newest, the next
        self.register: BufferedRegister[Bytes] | None = None
        self.lanes: dict[int, Lane] = {}
        self.mapped: dict[int, tuple[BufferedRegister[Bytes], Lane]] = {}
        self._offered: dict[int, tuple[int, int]] = {}
        self._register_range: MemoryRange | None = None
        self._lane_ranges: dict[int, MemoryRange] = {}

    def offer(self, peer: int) -> tuple[int, int] | None:
        """Make a lane to a local peer; returns where the register and the lane begin, None without memory."""
        if self._owner is None or self._buffers > 256:
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
        """Map what a local peer offers; False if that was tried before. Raises OSError."""
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
