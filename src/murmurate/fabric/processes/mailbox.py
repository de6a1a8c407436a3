"""Mail between processes of one host: a ring of messages (``spsc_ring``) for each ordered pair of members.

Each message carries the incarnations of its sender and its reader; if either has restarted since, the message
is refused and counted.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable

import torch
from torch import Tensor

from murmurate.buffers import Bytes, Pool, as_tensor
from murmurate.fabric.interface import Message, Traffic, check_message
from murmurate.fabric.processes.membership import ChannelMembership
from murmurate.fabric.processes.shared_memory import SharedMemoryFile
from murmurate.fabric.processes.spsc_ring import HEADER, MessageRing, RingCells, encode_tag

_MAIL_SLOTS = 8  # of each ring
_INCARNATION_MASK = (1 << 32) - 1


class ProcessMailbox:
    """One channel's mail at one member.

    store: function that copies a vector (second argument) into a slot (first). wait: function that waits for
    a condition, for at most the given number of seconds; returns whether it was met.
    """

    def __init__(
        self,
        memory_file: SharedMemoryFile,
        membership: ChannelMembership,
        name: str,
        like: Tensor,
        traffic: Traffic,
        store: Callable[[Tensor, Tensor], None],
        wait: Callable[[Callable[[], bool], float], bool],
    ) -> None:
        rank = self.rank = membership.rank
        self.traffic = traffic
        self._membership, self._store, self._wait = membership, store, wait
        self._device, self._dtype = like.device, like.dtype
        n, shape = membership.size, (like.numel(),)
        # counters are indexed [reader, sender], so that the cells that one reader polls are adjacent
        sent = memory_file.counters(f"{name}.sent", (n, n))
        taken = memory_file.counters(f"{name}.taken", (n, n))
        order = memory_file.counters(f"{name}.order", (n, n, _MAIL_SLOTS))
        in_use = memory_file.counters(f"{name}.in_use", (n, n, _MAIL_SLOTS))
        headers = memory_file.take(f"{name}.headers", n * n * _MAIL_SLOTS * HEADER.size)
        messages = memory_file.tensors(f"{name}.mail", (n, n, _MAIL_SLOTS, *shape), like.dtype)
        as_bytes = messages.view(torch.uint8).numpy()
        pool = Pool()

        def make_ring(sender: int, to: int) -> MessageRing:
            pair, length = (sender, to), _MAIL_SLOTS * HEADER.size
            start = (sender * n + to) * length
            ring_headers = headers[start : start + length]
            counts = sent[to, sender : sender + 1].data, taken[to, sender : sender + 1].data
            cells = RingCells(*counts, order[pair].data, in_use[pair].data, ring_headers)
            return MessageRing(cells, list(as_bytes[pair]), pool, like.nbytes)

        self._outgoing = [make_ring(rank, to) for to in range(n)]
        self._incoming = [make_ring(sender, rank) for sender in range(n)]
        self._count = like.numel()
        self._slots = [list(slots) for slots in messages[rank]]
        self._sent, self._taken = sent[rank].data, taken[rank].data
        self._messages: defaultdict[str, deque[Message]] = defaultdict(deque)  # by tag
        self._tags: dict[str, bytes] = {}

    def send(self, to: int, tag: str, x: Tensor, note: float, deadline_seconds: float) -> bool:
        encoded = encode_tag(self._tags, tag)
        check_message(x, self._count, self._dtype)
        ring, membership = self._outgoing[to], self._membership
        slot: int | None = None

        def reader_lives(mark: int) -> bool:
            return mark & _INCARNATION_MASK == membership.incarnation(to) & _INCARNATION_MASK

        def has_room() -> bool:
            nonlocal slot
            slot = ring.free_slot(is_held=reader_lives)
            return slot is not None or not membership.is_alive(to)

        if not self._wait(has_room, deadline_seconds):
            return False
        mark = self._incarnations(self.rank, to)  # of the reader that is alive now: it may restart meanwhile
        if slot is None or not membership.is_alive(to):
            return False
        short = x.numel() < self._count
        buffer = self._slots[to][slot]
        self._store(buffer[: x.numel()] if short else buffer, x)
        ring.send(slot, encoded, note, mark, x.nbytes if short else 0)
        return True

    def receive(self, tag: str) -> Message | None:
        return self._messages[tag].popleft() if self._has(tag) else None

    def wait(self, tag: str, deadline_seconds: float) -> Message | None:
        self._wait(lambda: self._has(tag), deadline_seconds)
        return self.receive(tag)

    def _has(self, tag: str) -> bool:
        """Whether there is a message under ``tag``. Only if none was taken before are more taken out of the
        slots: else a sender that is faster than its reader would never find them full."""
        if not self._messages.get(tag):
            self._collect()
        return bool(self._messages.get(tag))

    def _collect(self) -> None:
        if self._sent == self._taken:
            return
        for sender, ring in enumerate(self._incoming):
            while ring.has_news:
                tag, note, _, x = ring.take(self._decoded, self._incarnations(sender, self.rank))
                if x is None:
                    self.traffic.refused += 1
                else:
                    self._messages[tag].append(Message(sender, x, note))
                    self.traffic.bytes += x.nbytes

    def _decoded(self, wire: Bytes, short: bool) -> Tensor:
        """The vector of a message: a view of ``wire``, or a copy in the memory of the replica's GPU."""
        x = as_tensor(wire, self._dtype)
        return x if self._device.type == "cpu" else x.to(self._device)

    def _incarnations(self, sender: int, to: int) -> int:
        """The mark of a message: the incarnations of its sender and of its reader."""
        return self._membership.incarnation(sender) << 32 | self._membership.incarnation(to)
