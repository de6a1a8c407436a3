"""Mail between processes of one host: a ring (``spsc_ring``) for each ordered pair.

Each message is marked with the lives of both its ends; if either has been started again since, it is refused
and counted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from murmurate.buffers import Bytes, Pool, as_tensor
from murmurate.fabric.interface import Message, Traffic
from murmurate.fabric.processes.membership import Group
from murmurate.fabric.processes.shared_memory import SharedMemoryFile
from murmurate.fabric.processes.spsc_ring import HEAD, MessageRing, RingCells, check_message, tag_words

_MAIL_SLOTS = 8
_INCARNATION_MASK = (1 << 32) - 1


class ProcessMailbox:
    """One channel's mail at one member. store: a vector in a slot. wait: for a condition, so long."""

    def __init__(
        self,
        memory_file: SharedMemoryFile,
        group: Group,
        name: str,
        like: Tensor,
        traffic: Traffic,
        store: Callable[[Tensor, Tensor], None],
        wait: Callable[[Callable[[], bool], float], bool],
    ) -> None:
        rank = self.rank = group.rank
        self.traffic = traffic
        self._group, self._store, self._wait = group, store, wait
        self._bytes = like.numel() * like.element_size()
        self._device, self._dtype = like.device, like.dtype
        n, shape = group.size, (like.numel(),)
        # [reader, sender]: what a reader asks for again and again lies side by side
        sent = memory_file.counters(f"{name}.sent", (n, n))
        taken = memory_file.counters(f"{name}.taken", (n, n))
        order = memory_file.counters(f"{name}.order", (n, n, _MAIL_SLOTS))
        lent = memory_file.counters(f"{name}.lent", (n, n, _MAIL_SLOTS))
        heads = memory_file.take(f"{name}.heads", n * n * _MAIL_SLOTS * HEAD.size)
        messages = memory_file.tensors(f"{name}.mail", (n, n, _MAIL_SLOTS, *shape), like.dtype)
        whole = messages.view(torch.uint8).numpy()
        pool = Pool()

        def box(sender: int, to: int) -> MessageRing:
            here, length = (sender, to), _MAIL_SLOTS * HEAD.size
            start = (sender * n + to) * length
            mine = heads[start : start + length]
            counts = sent[to, sender : sender + 1].data, taken[to, sender : sender + 1].data
            cells = RingCells(*counts, order[here].data, lent[here].data, mine)
            return MessageRing(cells, list(whole[here]), pool, self._bytes)

        self._outgoing = [box(rank, to) for to in range(n)]
        self._boxes = [box(sender, rank) for sender in range(n)]
        self._count = like.numel()
        self._slots = [list(slots) for slots in messages[rank]]
        self._sent, self._taken = sent[rank].data, taken[rank].data
        self._inbox: dict[str, deque[Message]] = {}
        self._words: dict[str, bytes] = {}

    def send(self, to: int, tag: str, x: Tensor, note: float, patience_seconds: float) -> bool:
        words = tag_words(self._words, tag)
        check_message(x, self._count, self._dtype)
        box, group = self._outgoing[to], self._group
        mark = self._mark(self.rank, to)
        found: int | None = None

        def room() -> bool:
            nonlocal found
            found = box.free(
                counts=lambda mark: mark & _INCARNATION_MASK == group.incarnation(to) & _INCARNATION_MASK
            )
            return found is not None or not group.is_alive(to)

        if not self._wait(room, patience_seconds) or not group.is_alive(to) or found is None:
            return False
        short = x.numel() < self._count
        slot = self._slots[to][found]
        self._store(slot[: x.numel()] if short else slot, x)
        box.send(found, words, note, mark, x.nbytes if short else 0)
        return True

    def receive(self, tag: str) -> Message | None:
        self._collect()
        waiting = self._inbox.get(tag)
        return waiting.popleft() if waiting else None

    def wait(self, tag: str, deadline_seconds: float) -> Message | None:
        def arrived() -> bool:
            self._collect()
            return bool(self._inbox.get(tag))

        self._wait(arrived, deadline_seconds)
        return self.receive(tag)

    def _collect(self) -> None:
        if self._sent == self._taken:
            return
        for sender, box in enumerate(self._boxes):
            while box.has_news:
                tag, note, _, x = box.take(self._arrived, self._mark(sender, self.rank))
                if x is None:
                    self.traffic.refused += 1
                else:
                    self._inbox.setdefault(tag, deque()).append(Message(sender, x, note))
                    self.traffic.bytes += x.nbytes

    def _arrived(self, whole: Bytes, short: bool) -> Tensor:
        """[N] or fewer, where it lies or in the memory of the replica's device."""
        x = as_tensor(whole, self._dtype)
        return x if self._device.type == "cpu" else x.to(self._device)

    def _mark(self, sender: int, to: int) -> int:
        """The lives of both ends of a message."""
        return self._group.incarnation(sender) << 32 | self._group.incarnation(to)
