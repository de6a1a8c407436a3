"""Mail between processes of one host.

There are slots for each ordered pair, one writer and one reader each, and a ring that says in which slots the
next letters lie. A letter is read where it lies: its slot is lent until the reader forgets the letter. Once
half of a sender's slots are lent, the next letters are copied out, so a reader never stops a sender.
Each letter names the lives of both; if either has been started again since, it is refused and counted.
"""

from __future__ import annotations

import struct
import threading
import weakref
from collections import deque
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from murmurate.fabric.arena import Arena, fence
from murmurate.fabric.interface import Letter, Traffic
from murmurate.fabric.roster import Roster
from murmurate.pool import Pool, as_tensor

_MAIL_SLOTS = 8
_MAIL_LENT = _MAIL_SLOTS // 2
_LIFE_MASK = (1 << 32) - 1
_TAG_BYTES = 64
_HEAD = struct.Struct(f"<{_TAG_BYTES}sdQ")  # a letter's tag, note and stamp, beside its slot


class Letterbox:
    """One channel's mail at one member. store: a vector in a slot. wait: for a condition, so long."""

    def __init__(
        self,
        arena: Arena,
        roster: Roster,
        name: str,
        like: Tensor,
        traffic: Traffic,
        store: Callable[[Tensor, Tensor], None],
        wait: Callable[[Callable[[], bool], float], bool],
    ) -> None:
        rank = self.rank = roster.rank
        self.traffic = traffic
        self._roster, self._store, self._wait = roster, store, wait
        self._bytes = like.numel() * like.element_size()
        self._device, self._dtype = like.device, like.dtype
        self._on_cpu = like.device.type == "cpu"
        n, shape = roster.board.size, (like.numel(),)
        # mail: sent[from, to], taken[from, to]; order[from, to, number % slots] is the slot of that letter;
        # lent[from, to, slot], which only the reader writes, says that it still looks at what lies there
        self._sent = arena.counters(f"{name}.sent", (n, n))
        self._taken = arena.counters(f"{name}.taken", (n, n))
        self._order = arena.counters(f"{name}.order", (n, n, _MAIL_SLOTS))
        self._lent = arena.counters(f"{name}.lent", (n, n, _MAIL_SLOTS))
        self._heads = arena.take(f"{name}.heads", n * n * _MAIL_SLOTS * _HEAD.size)
        fields = np.dtype([("tag", f"S{_TAG_BYTES}"), ("note", "<f8"), ("stamp", "<u8")])
        self._stamps = np.frombuffer(self._heads, fields)["stamp"].reshape(n, n, _MAIL_SLOTS)
        self._size = n
        self._letters = arena.tensors(f"{name}.mail", (n, n, _MAIL_SLOTS, *shape), like.dtype)
        # of who writes to us: each slot as bytes that can be lent, and whether it is
        whole = self._letters.view(torch.uint8).numpy()
        self._lendable = [list(whole[sender, rank]) for sender in range(n)]
        self._lendings = [memoryview(self._lent[sender, rank]) for sender in range(n)]
        self._pool = Pool()
        self._inbox: dict[str, deque[Letter]] = {}
        self._incoming, self._consumed = self._sent[:, rank], self._taken[:, rank]
        self._words: dict[str, bytes] = {}
        self._barrier = threading.Lock()

    def send(self, to: int, tag: str, x: Tensor, note: float, patience_seconds: float) -> bool:
        words = self._words_of(tag)
        here = self.rank, to
        number = int(self._sent[here])
        found: list[int] = []

        def room() -> bool:
            found[:] = self._free_slots(to, number)[:1]
            return bool(found) or not self._roster.is_alive(to)

        stamp = self._stamp(*here)
        if not self._wait(room, patience_seconds) or not self._roster.is_alive(to):
            return False
        slot = found[0]
        _HEAD.pack_into(self._heads, self._head(*here, slot), words, note, stamp)
        self._order[*here, number % _MAIL_SLOTS] = slot
        self._store(self._letters[*here, slot], x)
        fence(self._barrier)
        self._sent[here] = number + 1
        return True

    def _free_slots(self, to: int, number: int) -> list[int]:
        """Neither on their way nor in the hands of the present life of ``to``; the lowest is the warmest."""
        here = self.rank, to
        taken = int(self._taken[here])
        fence(self._barrier)  # what a reader has taken it has marked as lent before
        if number == taken and not self._lent[here].any():
            return [0]
        if number - taken >= _MAIL_SLOTS:
            return []
        under_way = {int(self._order[*here, k % _MAIL_SLOTS]) for k in range(taken, number)}
        life = self._roster.board.life(to) & _LIFE_MASK
        held = (self._lent[here] != 0) & (self._stamps[here] & _LIFE_MASK == life)
        return [slot for slot in range(_MAIL_SLOTS) if slot not in under_way and not held[slot]]

    def _head(self, sender: int, to: int, slot: int) -> int:
        """Where the head of that slot begins."""
        return ((sender * self._size + to) * _MAIL_SLOTS + slot) * _HEAD.size

    def _words_of(self, tag: str) -> bytes:
        """A tag as it lies beside its letter."""
        if tag not in self._words:
            name = tag.encode()
            if len(name) >= _TAG_BYTES:
                raise ValueError(f"a tag has at most {_TAG_BYTES - 1} bytes, '{tag}' has {len(name)}")
            self._words[tag] = name
        return self._words[tag]

    def receive(self, tag: str) -> Letter | None:
        self._empty_letterbox()
        waiting = self._inbox.get(tag)
        return waiting.popleft() if waiting else None

    def wait(self, tag: str, deadline_seconds: float) -> Letter | None:
        def arrived() -> bool:
            self._empty_letterbox()
            return bool(self._inbox.get(tag))

        self._wait(arrived, deadline_seconds)
        return self.receive(tag)

    def _empty_letterbox(self) -> None:
        news = self._incoming != self._consumed
        for sender in np.flatnonzero(news).tolist() if news.any() else ():
            here = sender, self.rank
            stamp = self._stamp(*here)
            number = int(self._taken[here])
            while number < self._sent[here]:
                fence(self._barrier)  # nothing of the letter is read before its number is
                slot = int(self._order[*here, number % _MAIL_SLOTS])
                words, note, written = _HEAD.unpack_from(self._heads, self._head(*here, slot))
                if written == stamp:
                    tag = words.rstrip(b"\0").decode()
                    letter = Letter(sender, self._read(sender, slot), note)
                    self._inbox.setdefault(tag, deque()).append(letter)
                    self.traffic.bytes += self._bytes
                else:
                    self._lent[*here, slot] = 0
                    self.traffic.refused += 1
                number += 1
                fence(self._barrier)
                self._taken[here] = number

    def _read(self, sender: int, slot: int) -> Tensor:
        """[N]: the slot itself, lent until nobody holds the tensor; a copy where too much is lent."""
        lent = self._lendings[sender]
        lent[slot] = 0
        if self._on_cpu and sum(lent) < _MAIL_LENT:
            lent[slot] = 1
            whole = self._lendable[sender][slot][:]
            weakref.finalize(whole, _give_back, lent, slot).atexit = False
            return as_tensor(whole, self._dtype)
        letter = self._letters[sender, self.rank, slot]
        if not self._on_cpu:
            return letter.to(self._device, copy=True)
        return as_tensor(self._pool.take(self._bytes), self._dtype).copy_(letter)

    def _stamp(self, sender: int, to: int) -> int:
        """The lives of both ends of a letter."""
        board = self._roster.board
        return board.life(sender) << 32 | board.life(to)


def _give_back(lent: memoryview, slot: int) -> None:
    """A letter has been forgotten, in whichever thread and at whatever moment: so with a lock of its own."""
    fence(threading.Lock())
    lent[slot] = 0
