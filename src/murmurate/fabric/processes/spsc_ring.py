"""Mail in memory that its sender and its reader see.

There are slots for each ordered pair, one writer and one reader each, and a ring that says in which slots the
next messages lie. A message is read where it lies: its slot is lent until the reader forgets the message.
Once half of a sender's slots are lent, the next messages are copied out, so a reader never stops a sender.
"""

from __future__ import annotations

import struct
import threading
import weakref
from collections.abc import Callable, Container, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from murmurate.buffers import Bytes, Pool
from murmurate.fabric.processes.shared_memory import fence

_TAG_BYTES = 64
# a message's tag, note and mark, and its bytes if it is a short one (else 0), beside its slot
HEAD = struct.Struct(f"<{_TAG_BYTES}sdQQ")


class RingCells(NamedTuple):
    """A box's memory; all but ``heads`` int64. The reader writes ``taken`` and ``lent``, the sender the rest.

    sent, taken: [1], how many messages. order: [slots], where message number k lies, at k % slots.
    lent: [slots], whether the reader still looks at what lies there. heads: slots times ``HEAD.size`` bytes.
    """

    sent: memoryview
    taken: memoryview
    order: memoryview
    lent: memoryview
    heads: memoryview


class MessageRing:
    """The messages of one member to another. slots: memory for one each, of which it fills ``whole``
    bytes unless it is short."""

    def __init__(self, cells: RingCells, slots: Sequence[Bytes], pool: Pool, whole: int) -> None:
        self._sent, self._taken, self._order, self._lent, self._heads = cells
        self.slots, self._whole = slots, whole
        self._count, self._most_lent = len(slots), len(slots) // 2
        self._letters: dict[int, weakref.ref[Bytes]] = {}  # lent now, by slot
        self._pool = pool
        self._read = int(self._taken[0])
        self._barrier = threading.Lock()

    # -- the sender's side --------------------------------------------------------------------------

    def free(self, claimed: Container[int] = (), counts: Callable[[int], bool] | None = None) -> int | None:
        """A slot for the next message: neither on its way, nor lent, nor among the ``claimed``; None if there
        is none. The lowest is the warmest. counts: whether who was lent a message of that mark still lives.
        """
        taken, sent = self._taken[0], self._sent[0]
        fence(self._barrier)  # what a reader has taken it has marked as lent before
        under_way = {self._order[number % self._count] for number in range(taken, sent)}
        for slot in range(self._count):
            if slot in under_way or slot in claimed:
                continue
            if not self._lent[slot] or (counts is not None and not counts(self._head(slot)[2])):
                return slot
        return None

    def send(self, slot: int, words: bytes, note: float, mark: int, short: int = 0) -> None:
        """What lies in the slot is the next message, under the tag ``words``. short: its bytes, or 0."""
        number = self._sent[0]
        HEAD.pack_into(self._heads, slot * HEAD.size, words, note, mark, short)
        self._order[number % self._count] = slot
        fence(self._barrier)
        self._sent[0] = number + 1

    # -- the reader's side --------------------------------------------------------------------------

    @property
    def has_news(self) -> bool:
        return bool(self._sent[0] != self._read)

    def take(
        self, decode: Callable[[Bytes, bool], Tensor], mark: int | None = None
    ) -> tuple[str, float, int, Tensor | None]:
        """(tag, note, mark, vector) of the next message, where there is one; the vector lies in the slot as
        long as somebody holds it, if ``decode`` (told whether it is a short one) leaves it there. None for
        one of another ``mark``."""
        fence(self._barrier)  # nothing of the message is read before its number is
        slot = self._order[self._read % self._count]
        words, note, written, short = self._head(slot)
        self._lent[slot] = 0
        x = decode(self._lend(slot, short), short > 0) if mark is None or written == mark else None
        self._read += 1
        fence(self._barrier)
        self._taken[0] = self._read
        return words.rstrip(b"\0").decode(), note, written, x

    def _head(self, slot: int) -> tuple[bytes, float, int, int]:
        return HEAD.unpack_from(self._heads, slot * HEAD.size)

    def _lend(self, slot: int, short: int) -> Bytes:
        """The slot itself, lent until nobody holds it; a copy where too much is lent."""
        message = self.slots[slot][: short or self._whole]
        if len(self._letters) >= self._most_lent:
            copy = self._pool.take(message.nbytes) if not short else np.empty(short, dtype=np.uint8)
            np.copyto(copy, message)
            return copy
        lent, messages = self._lent, self._letters

        def give_back(_: object) -> None:
            """In whichever thread and at whatever moment, so with a lock of its own."""
            del messages[slot]
            fence(threading.Lock())
            lent[slot] = 0

        lent[slot] = 1
        messages[slot] = weakref.ref(message, give_back)
        return message


def check_message(x: Tensor, count: int, dtype: torch.dtype) -> None:
    """Raise ValueError for what cannot be a message of a channel for ``count`` numbers of ``dtype``."""
    if not 0 < x.numel() <= count:
        raise ValueError(f"a message has 1 to {count} numbers, this one {x.numel()}")
    if x.numel() < count and x.dtype != dtype:
        raise ValueError(f"a short message goes as it is, in the channel's {dtype}; this one is {x.dtype}")


def tag_words(known: dict[str, bytes], tag: str) -> bytes:
    """A tag as it lies beside its message. Raises ValueError for one that is too long."""
    words = known.get(tag)
    if words is None:
        words = tag.encode()
        if len(words) >= _TAG_BYTES:
            raise ValueError(f"a tag has at most {_TAG_BYTES - 1} bytes, '{tag}' has {len(words)}")
        known[tag] = words
    return words
