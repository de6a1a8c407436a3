"""The register between members: the newest version of each vector, for those who read it.

A neighbour reads it where it lies (``shm_channel``); nothing goes over the line for that.

Over a connection, a reader lets a publisher know which version it has, and gets the next one as soon as there
is one; so at most one version is on its way over an edge, and those in between are never sent. After
``UNREAD_LIMIT`` versions that nobody looked at, the reader asks no more until somebody does: who never reads
costs nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from murmurate.buffers import Bytes
from murmurate.fabric.interface import FabricError, Traffic
from murmurate.fabric.network.compression import Behind, Codec, Filling
from murmurate.fabric.network.endpoint import Endpoint
from murmurate.fabric.network.frames import Frame, Kind
from murmurate.fabric.network.shm_channel import Into, Lane, ShmChannel
from murmurate.fabric.processes.register import BufferedRegister

UNREAD_LIMIT = 8
_ASK_SECONDS = 1.0
_PEEKED, _COPIED = range(2)  # what of our own register is pinned: by our own peek, and to be sent


@dataclass
class _Subscription:
    """What a reader knows of one publisher. Versions count on when the publisher is started anew."""

    x: Tensor | None = None
    received: int = 0
    seen: tuple[BufferedRegister[Bytes], Lane] | None = None  # where a neighbour's lies
    promised: int = 0  # a version that is known to exist, from a collective
    before: int = 0  # versions of the publisher's former lives
    asked: bool = False  # the next newer version will be sent to us
    question: int = 0
    answer: int = 0
    unread: int = 0

    @property
    def version(self) -> int:
        """The newest that can be read."""
        return self.received if self.seen is None else self.seen[0].version + self.before


class NetworkRegister:
    """One channel's register at one member."""

    def __init__(
        self,
        endpoint: Endpoint,
        name: str,
        identity: bytes,
        codec: Codec,
        traffic: Traffic,
        desk: ShmChannel,
        peers: Sequence[int],
    ) -> None:
        self._endpoint, self._name, self._identity, self._codec = endpoint, name, identity, codec
        self._traffic, self._shm = traffic, desk
        self.published = 0
        self._newest: tuple[int, Filling] | None = None  # for the line; may be older than what lies in memory
        self._wanting: dict[int, tuple[int, int]] = {}  # by peer: the version it has, its question
        self._subscriptions = {rank: _Subscription() for rank in peers}
        self._pins = np.zeros(2, dtype=np.int64).data
        self._writing = threading.Lock()  # into the register; whoever has it takes no other

    # -- publishing ---------------------------------------------------------------------------------

    def publish(self, x: Tensor) -> int:
        version = self.published + 1
        register = self._shm.register
        if register is None or len(self._shm.lanes) < len(self._subscriptions):
            filling = self._publish_on_lines(version, x)
            self._publish_in_memory(version, lambda place: np.copyto(place, filling.wire))
        else:
            self._publish_in_memory(version, lambda place: self._codec.encode(x, Into(place)))
            self.published, self._newest = version, None
        return version

    def _publish_in_memory(self, version: int, store: Any) -> None:
        """Unless there is no neighbour, or that version lies there."""
        with self._writing:
            register = self._shm.register
            if register is not None and register.version < version:
                register.publish(version, self._all_pins(), store)
                self._traffic.bytes += self._codec.wire_bytes

    def _all_pins(self) -> Iterator[int]:
        yield from self._pins
        for lane in list(self._shm.lanes.values()):
            yield lane.pin[0]

    def _publish_on_lines(self, version: int, x: Tensor) -> Filling:
        filling = self._codec.begin(x, self._endpoint.wires)
        with self._endpoint.lock:
            frame = Frame(Kind.REGISTER, self._identity, version=version, payload=filling.wire)
            connections = self._endpoint.connections
            self.published, self._newest = version, (version, filling)
            wanting = [peer for peer in self._wanting if peer not in self._shm.lanes]
            # the first who waits, and whose line is free, gets it from this very thread
            first = next(
                ((connections[p], pipe) for p in wanting if (pipe := connections[p].claim(frame))), None
            )
            if first is not None:
                self._hand_over(first[0].peer, filling)
            for peer in wanting:
                connections[peer].nudge()
        if first is not None:
            first[0].send_claimed(first[1], frame, filling)
        filling.finish()
        return filling

    def due(self, peer: int) -> Frame | None:
        if peer in self._shm.lanes or peer not in self._wanting:
            return None
        if self.published <= self._wanting[peer][0]:
            return None
        version, filling = self._filling()
        self._hand_over(peer, filling)
        frame = Frame(Kind.REGISTER, self._identity, version=version, payload=filling.wire)
        frame.source = Behind(filling)
        return frame

    def _filling(self) -> tuple[int, Filling]:
        """The newest, to be sent; copied from memory if it lies only there."""
        newest = self._newest
        if newest is None or newest[0] < self.published:
            newest = self._newest = self._copied()
        return newest

    def _copied(self) -> tuple[int, Filling]:
        register = self._shm.register
        found = None if register is None else register.peek(self._pins, _COPIED)
        if found is None:
            raise RuntimeError("a version that was published lies neither in a wire nor in memory")
        wire = self._endpoint.wires.take(self._codec.wire_bytes)
        np.copyto(wire, found[0])
        self._pins[_COPIED] = 0
        return found[1], Filling(wire)

    def _hand_over(self, peer: int, filling: Filling) -> None:
        del self._wanting[peer]
        self._traffic.bytes += filling.wire.nbytes

    # -- reading ------------------------------------------------------------------------------------

    def version(self, peer: int) -> int:
        if peer == self._endpoint.rank:
            return self.published
        held = self._subscriptions[peer]
        if held.seen is None:
            with self._endpoint.lock:
                self._look(peer)
        return held.version

    def peek(self, peer: int) -> tuple[Tensor, int]:
        found = self._own() if peer == self._endpoint.rank else self._theirs(peer)
        if found is None:
            raise FabricError(f"rank {peer} has published nothing on channel '{self._name}' yet")
        return found

    def _own(self) -> tuple[Tensor, int] | None:
        register, newest = self._shm.register, self._newest
        found = None if register is None else register.peek(self._pins, _PEEKED)
        if found is not None:
            return self._codec.decode(found[0]), found[1]
        return newest and (self._codec.decode(newest[1].wire), newest[0])

    def _theirs(self, peer: int) -> tuple[Tensor, int] | None:
        held = self._subscriptions[peer]
        found = self._seen(held)
        if found is None:
            with self._endpoint.lock:
                self._look(peer)
                found = self._seen(held)
                if found is None and held.x is not None:
                    return held.x, held.received
        return found

    def _seen(self, held: _Subscription) -> tuple[Tensor, int] | None:
        """The newest of a neighbour, where it lies."""
        seen, before = held.seen, held.before
        found = None if seen is None else seen[0].peek(seen[1].pin, 0)
        if found is None:
            return None
        self._traffic.bytes += self._codec.wire_bytes
        return self._codec.decode(found[0]), found[1] + before

    def wait_newer(self, peers: Sequence[int], seen: Sequence[int], deadline_seconds: float) -> bool:
        """With the lock held, as all that follows."""

        def version(peer: int) -> int:
            return self.published if peer == self._endpoint.rank else self._subscriptions[peer].version

        def spoken() -> bool:
            return all(
                version(p) > v
                or self._endpoint.gone(p)
                or (p != self._endpoint.rank and self._endpoint.connections[p].silent)
                for p, v in zip(peers, seen, strict=True)
            )

        for peer in peers:
            if peer != self._endpoint.rank:
                self._subscriptions[peer].unread = 0
                self._ask(peer)
        return self._endpoint.wait(spoken, deadline_seconds, in_memory=True)

    def _look(self, peer: int) -> None:
        """Somebody reads: make sure that the newest will come, and wait for it where that is a must.

        A must is a version published before a collective that is over. For one round trip we wait
        when we had not asked: the first time, and after a while without reading.
        """
        held, endpoint = self._subscriptions[peer], self._endpoint
        held.unread = 0
        asked = held.asked
        self._ask(peer)
        if held.version < held.promised:
            endpoint.wait(
                lambda: held.version >= held.promised or endpoint.dead(peer), endpoint.deadline_seconds
            )
        elif not asked and held.seen is None:
            had, question = held.version, held.question
            endpoint.wait(
                lambda: (
                    held.version > had
                    or held.answer >= question
                    or endpoint.dead(peer)
                    or endpoint.connections[peer].silent
                ),
                min(_ASK_SECONDS, endpoint.deadline_seconds),
            )

    def _ask(self, peer: int) -> None:
        held = self._subscriptions[peer]
        if not held.asked and held.seen is None:
            held.question += 1
            self._request(peer, held, answer=True)

    def _request(self, peer: int, held: _Subscription, answer: bool) -> None:
        held.asked = True
        request = [held.received - held.before, held.question if answer else 0]
        self._endpoint.connections[peer].announce(("want", self._identity.hex()), request)

    def promise(self, peer: int, version: int) -> None:
        """That version exists: from now on no older one is read."""
        if peer != self._endpoint.rank:
            held = self._subscriptions[peer]
            held.promised = max(held.promised, version + held.before)

    # -- what comes ---------------------------------------------------------------------------------

    def deliver(self, sender: int, frame: Frame) -> None:
        held = self._subscriptions[sender]
        version = frame.version + held.before
        self._traffic.bytes += frame.length
        if version > held.received:
            held.x, held.received = self._codec.decode(frame.payload), version
        held.unread += 1
        if held.unread < UNREAD_LIMIT:
            self._request(sender, held, answer=False)
        else:
            held.asked = False

    def announced(self, sender: int, what: str, value: Any) -> None:
        if what == "nothing":
            self._subscriptions[sender].answer = int(value)
            return
        self._wanting[sender] = int(value[0]), int(value[1])
        if sender not in self._shm.lanes:  # who has one looks for itself
            self._answer(sender)

    def _answer(self, peer: int) -> None:
        had, question = self._wanting[peer]
        connection = self._endpoint.connections[peer]
        if self.published > had:
            connection.nudge()
        elif question:
            connection.announce(("nothing", self._identity.hex()), question)

    # -- neighbours ---------------------------------------------------------------------------------

    def showed(self) -> None:
        """There is a register, perhaps since a moment ago: what was published is to lie there."""
        newest = self._newest
        if newest is not None and newest[1].complete:  # else its publisher will look for a register itself
            self._publish_in_memory(newest[0], lambda place: np.copyto(place, newest[1].wire))

    def sees(self, peer: int) -> None:
        """A neighbour's register can be read; that answers what we asked it."""
        held = self._subscriptions[peer]
        held.seen, held.asked, held.answer = self._shm.seen[peer], False, held.question

    def unseen(self, peer: int) -> None:
        """A neighbour cannot see ours after all: it gets the newest over the line."""
        if peer in self._wanting:
            self._answer(peer)

    def returned(self, peer: int) -> None:
        self._wanting.pop(peer, None)
        held = self._subscriptions[peer]
        found = self._seen(held)  # the last of its former incarnation can still be read
        if found is not None:
            held.x, held.received = found
        held.seen = None
        held.before = held.promised = held.received
        if held.asked:
            self._request(peer, held, answer=True)
