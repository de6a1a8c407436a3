"""Mail in memory shared by one sender and one reader.

Each ordered pair of members has slots for messages, and a ring with the slot numbers of the messages that are
still to be read. A message is read in place: its slot stays in use until the reader drops the message. Once
half of the slots are in use, further messages are copied out of their slots, so a reader that keeps messages
never blocks the sender. A *short* message has fewer numbers than its channel's vectors.
"""

from __future__ import annotations

import struct
import threading
import weakref
from collections.abc import Callable, Container, Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from murmurate.buffers import Bytes, Pool
from murmurate.fabric.interface import MOST_TAG_BYTES, encoded_tag
from murmurate.replica.fence import fence

_TAG_BYTES = MOST_TAG_BYTES + 1  # a zero ends it
# A message's tag, note, mark and size. The mark is chosen by the ring's user: the number of a stream, or the
# incarnations of sender and reader. The size, in bytes, is that of a short message; 0 for any other.
HEADER = struct.Struct(f"<{_TAG_BYTES}sdQQ")


class RingCells(NamedTuple):
    """A ring's memory: int64, except ``headers``. The reader writes ``taken`` and ``in_use``, the sender the
    rest.

    sent, taken: [1], how many messages were sent, and taken by the reader. order: [slots], the slot of
    message k at k % slots. in_use: [slots], whether the reader still holds the message in that slot. headers:
    ``HEADER.size`` bytes for each slot.
    """

    sent: memoryview
    taken: memoryview
    order: memoryview
    in_use: memoryview
    headers: memoryview


class MessageRing:
    """The messages of one member to another.

    slots: buffers of one message each. message_bytes: the size of a message, unless it is a short one. pool:
    buffers for messages that are copied out of their slots.
    """

    def __init__(self, cells: RingCells, slots: Sequence[Bytes], pool: Pool, message_bytes: int) -> None:
        self._sent, self._taken, self._order, self._in_use, self._headers = cells
        self.slots, self._message_bytes = slots, message_bytes
        self._slot_count, self._most_held = len(slots), len(slots) // 2
        self._held: dict[int, weakref.ref[Bytes]] = {}  # by slot: messages that the reader holds
        self._pool = pool
        self._read = int(self._taken[0])  # how many messages the reader has taken
        self._barrier = threading.Lock()

    # -- the sender's side --------------------------------------------------------------------------

    def free_slot(
        self, claimed: Container[int] = (), is_held: Callable[[int], bool] | None = None
    ) -> int | None:
        """The lowest slot (most likely in the cache) that is not pending, in use or ``claimed``; or None.

        is_held: (mark of a message) -> whether its reader may still hold it; False if the reader has died.
        """
        taken, sent = self._taken[0], self._sent[0]
        fence(self._barrier)  # a reader marks a slot as in use before it counts the message as taken
        pending = {self._order[number % self._slot_count] for number in range(taken, sent)}
        for slot in range(self._slot_count):
            if slot in pending or slot in claimed:
                continue
            if not self._in_use[slot] or (is_held is not None and not is_held(self._header(slot)[2])):
                return slot
        return None

    def send(self, slot: int, tag: bytes, note: float, mark: int, short: int = 0) -> None:
        """Append the message in the slot. tag: as encoded. short: the size of a short message, else 0."""
        number = self._sent[0]
        HEADER.pack_into(self._headers, slot * HEADER.size, tag, note, mark, short)
        self._order[number % self._slot_count] = slot
        fence(self._barrier)
        self._sent[0] = number + 1

    # -- the reader's side --------------------------------------------------------------------------

    @property
    def has_news(self) -> bool:
        return bool(self._sent[0] != self._read)

    def take(
        self, decode: Callable[[Bytes, bool], Tensor], mark: int | None = None
    ) -> tuple[str, float, int, Tensor | None]:
        """(tag, note, mark, vector) of the next message, which must exist. If ``mark`` is given and the
        message has another one, None is returned instead of its vector.

        decode: (bytes, whether it is a short message) -> vector. If the vector is a view of the bytes, the
        slot stays in use until the vector is dropped.
        """
        fence(self._barrier)  # no part of the message may be read before the count of messages sent
        slot = self._order[self._read % self._slot_count]
        tag, note, own_mark, short = self._header(slot)
        self._in_use[slot] = 0
        x = decode(self._view(slot, short), short > 0) if mark is None or own_mark == mark else None
        self._read += 1
        fence(self._barrier)
        self._taken[0] = self._read
        return tag.rstrip(b"\0").decode(), note, own_mark, x

    def _header(self, slot: int) -> tuple[bytes, float, int, int]:
        return HEADER.unpack_from(self._headers, slot * HEADER.size)

    def _view(self, slot: int, short: int) -> Bytes:
        """A view of the slot, which stays in use until the view is dropped; a copy if too many are in use."""
        message = self.slots[slot][: short or self._message_bytes]
        if len(self._held) >= self._most_held:
            copy = self._pool.take(message.nbytes) if not short else np.empty(short, dtype=np.uint8)
            np.copyto(copy, message)
            return copy
        in_use, held = self._in_use, self._held

        def release(_: object) -> None:
            """Free the slot. May run in any thread at any time, so its fence needs a lock of its own."""
            del held[slot]
            fence(threading.Lock())
            in_use[slot] = 0

        in_use[slot] = 1
        held[slot] = weakref.ref(message, release)
        return message


def encode_tag(known: dict[str, bytes], tag: str) -> bytes:
    """A tag as it is written into a header, cached in ``known``. Raises ValueError if it is too long."""
    encoded = known.get(tag)
    if encoded is None:
        encoded = known[tag] = encoded_tag(tag)
    return encoded
