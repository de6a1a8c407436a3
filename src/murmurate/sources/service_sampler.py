"""A sampler of a replay service: a process that keeps batches ready for its learner.

It requests parts of batches from the shards of all learners, and sends them the errors of batches that were
used. Its whole state is in the slots (``service_slots``), so it can be killed at any time. It does not
import torch unless shards are on other hosts.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import select
import signal
import socket
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any, BinaryIO

from murmurate.sources.service_links import MESSAGE_BYTES, DrawRequest, ShardAddress, Stream, dial
from murmurate.sources.service_slots import DRAWING, NO_OWNER, READY, BatchSlots, SlotLayout

_IDLE_SECONDS = 1.0  # between two heartbeats of a sampler that waits
_DIAL_AGAIN_SECONDS = 0.2
_UNREACHABLE_SECONDS = 30.0  # a shard out of reach for so long is gone, and dialled only this often


@dataclass(frozen=True)
class SamplerSettings:
    """memory: file descriptor of the slots. wake: eventfd to which the learner writes after it has released a
    slot or sent addresses. ready: eventfd to which this process writes when a batch is ready."""

    stream: Stream
    layout: SlotLayout
    memory: int
    wake: int
    ready: int


class _Shard:
    """A shard, and the connection to it if there is one. While ``is_gone``, other shards serve its parts."""

    def __init__(self, address: ShardAddress) -> None:
        self.address = address
        self.link: socket.socket | None = None
        self.is_gone = False
        self._bridge: Any = None
        self._has_ended = False
        self._lost_at = time.monotonic()
        self._dial_at = 0.0

    def connect(self, stream: Stream, slots: BatchSlots, memory: int) -> bool:
        """Connect if necessary; returns whether a connection was made."""
        now = time.monotonic()
        if self.link is not None or self._has_ended or now < self._dial_at:
            return False
        try:
            try:
                self.link = dial(self.address, stream, slots, memory)
            except ConnectionRefusedError:
                if not self.address.port:
                    raise
                from murmurate.sources.service_bridge import dial_bridge  # it needs the package cryptography

                self.link, self._bridge = dial_bridge(self.address, stream, slots)
        except ConnectionRefusedError:
            self._has_ended = self.is_gone = True
            return False
        except Exception as problem:  # the shard may come back
            if now > self._lost_at + _UNREACHABLE_SECONDS:
                self.is_gone = True
                print(f"{self.address} is out of reach: {problem}", file=sys.stderr, flush=True)
            self._dial_at = time.monotonic() + (_UNREACHABLE_SECONDS if self.is_gone else _DIAL_AGAIN_SECONDS)
            return False
        self.is_gone = False
        return True

    def close(self) -> None:
        if self.link is not None:
            self.link.close()
        if self._bridge is not None:
            self._bridge.close()
        self.link, self._bridge = None, None
        self._lost_at, self._dial_at = time.monotonic(), 0.0


class SamplerLoop:
    """The sampler's loop. All learners number the shards alike; part k of a batch is drawn from shard k, or
    from another shard if shard k is gone."""

    def __init__(self, settings: SamplerSettings) -> None:
        self.settings = settings
        self.addresses: queue.SimpleQueue[dict[int, ShardAddress]] = queue.SimpleQueue()
        self._slots = BatchSlots.mapped(settings.memory, settings.layout)
        self._shards: dict[int, _Shard] = {}
        self._by_link: dict[int, int] = {}  # descriptor -> number of the shard
        self._poll = select.epoll()
        self._poll.register(settings.wake, select.EPOLLIN)

    def run(self) -> None:
        slots, layout = self._slots, self._slots.layout
        while True:
            self._connect()
            for slot in range(layout.slots):
                state = slots.state(slot)
                if state == DRAWING:
                    self._finish(slot)
                elif state != READY and self._by_link and self._is_complete:
                    self._begin(slot)
            slots.beat()
            waiting = _IDLE_SECONDS if self._is_complete else _DIAL_AGAIN_SECONDS
            for descriptor, _ in self._poll.poll(waiting):
                if descriptor == self.settings.wake:
                    with contextlib.suppress(BlockingIOError):
                        os.eventfd_read(descriptor)
                elif descriptor in self._by_link:
                    self._receive(self._by_link[descriptor])

    # -- slots ------------------------------------------------------------------------------------------

    def _begin(self, slot: int) -> None:
        """Request the next block of a slot; shards first take the errors of its last block."""
        slots, parts = self._slots, range(self._slots.layout.parts)
        error_bits = slots.error_bits(slot)
        last_owners = [slots.owner(slot, part) for part in parts]
        owners = [self._owner(part) for part in parts]
        for part in parts:
            slots.set_owner(slot, part, owners[part])
        slots.begin(slot)
        for part in parts:
            self._request(slot, part, error_bits if owners[part] == last_owners[part] else 0)

    def _finish(self, slot: int) -> None:
        if self._slots.finish(slot):
            os.eventfd_write(self.settings.ready, 1)

    def _owner(self, part: int) -> int:
        """The shard to draw the part from."""
        if part in self._shards and self._shards[part].link is not None:
            return part
        living = sorted(number for number, shard in self._shards.items() if shard.link is not None)
        return living[part % len(living)] if living else part

    def _request(self, slot: int, part: int, error_bits: int = 0) -> None:
        shard = self._shards.get(self._slots.owner(slot, part))
        if shard is None or shard.link is None:
            return
        request = DrawRequest(slot, part, self._slots.number(slot), error_bits, *self._slots.exponents)
        with contextlib.suppress(OSError):  # the shard ended; the part is requested again later
            shard.link.send(request.pack())

    def _receive(self, number: int) -> None:
        shard = self._shards[number]
        assert shard.link is not None
        try:
            while shard.link.recv(MESSAGE_BYTES):  # replies only wake: the slots say what has been drawn
                pass
        except BlockingIOError:
            return
        except OSError:
            pass
        self._close(number)

    # -- shards -----------------------------------------------------------------------------------------

    @property
    def _is_complete(self) -> bool:
        """Whether there is a connection to each shard that is not gone."""
        return bool(self._shards) and all(s.link is not None or s.is_gone for s in self._shards.values())

    def _connect(self) -> None:
        """Take new addresses, and dial the shards to which there is no connection."""
        while not self.addresses.empty():
            for number, address in self.addresses.get().items():
                if number not in self._shards or self._shards[number].address != address:
                    if number in self._shards:
                        self._close(number)
                        self._disown(number)
                    self._shards[number] = _Shard(address)
        changed = False
        for number, shard in self._shards.items():
            was_gone = shard.is_gone
            if shard.connect(self.settings.stream, self._slots, self.settings.memory):
                assert shard.link is not None
                self._by_link[shard.link.fileno()] = number
                self._poll.register(shard.link.fileno(), select.EPOLLIN)
                changed = True
            changed |= shard.is_gone != was_gone
            self._slots.beat()  # a host that does not answer takes seconds for each of its shards
        if changed:
            self._slots.set_shards(len(self._by_link))
            if self._is_complete:
                self._request_missing()

    def _request_missing(self) -> None:
        """Request the parts that are missing because a connection or shard was lost, or because an earlier
        process of this sampler had requested them."""
        slots = self._slots
        for slot in range(slots.layout.slots):
            if slots.state(slot) != DRAWING:
                continue
            for part in range(slots.layout.parts):
                if slots.is_filled(slot, part):
                    continue
                shard = self._shards.get(slots.owner(slot, part))
                if shard is None or shard.link is None:
                    slots.set_owner(slot, part, self._owner(part))
                self._request(slot, part)

    def _disown(self, number: int) -> None:
        """The shard was replaced by another one, whose rows are not those that were drawn from it: the errors
        of these must not come to its successor."""
        slots = self._slots
        for slot in range(slots.layout.slots):
            for part in range(slots.layout.parts):
                if slots.owner(slot, part) == number:
                    slots.set_owner(slot, part, NO_OWNER)

    def _close(self, number: int) -> None:
        shard = self._shards[number]
        if shard.link is not None:
            self._poll.unregister(shard.link.fileno())
            del self._by_link[shard.link.fileno()]
        shard.close()


def _listen(pipe: BinaryIO, loop: SamplerLoop) -> None:
    """Read addresses from the learner; exit when the learner ends, however it ends."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            loop.addresses.put(pickle.load(pipe))
            os.eventfd_write(loop.settings.wake, 1)
    os._exit(0)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher decides what Ctrl-C means
    sampler = SamplerLoop(pickle.load(sys.stdin.buffer))
    threading.Thread(target=_listen, args=(sys.stdin.buffer, sampler), daemon=True).start()
    sampler.run()
