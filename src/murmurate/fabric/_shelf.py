"""The register over links: the newest version of each vector, sent to those who read it.

A reader tells a publisher which version it has, and gets the next one as soon as there is one; so at most
one version is on its way over an edge, and those in between are never sent. After ``UNREAD_LIMIT``
versions that nobody looked at, the reader asks no more until somebody does: who never reads costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from murmurate.fabric._compress import Behind, Codec, Filling
from murmurate.fabric._hub import Hub
from murmurate.fabric._wire import Frame, Kind
from murmurate.fabric.interface import FabricError, Traffic
from murmurate.pool import Bytes

UNREAD_LIMIT = 8
_ASK_SECONDS = 1.0


@dataclass
class _Subscription:
    """What a reader knows of one publisher. Versions count on when the publisher is started anew."""

    x: Tensor | None = None
    version: int = 0
    promised: int = 0  # a version that is known to exist, from a collective
    before: int = 0  # versions of the publisher's former lives
    asked: bool = False  # the next newer version will be sent to us
    question: int = 0
    answer: int = 0
    unread: int = 0


class Shelf:
    """One channel's register at one member."""

    def __init__(self, hub: Hub, name: str, identity: bytes, codec: Codec, traffic: Traffic) -> None:
        self._hub, self._name, self._identity, self._codec = hub, name, identity, codec
        self._traffic = traffic
        self._newest: tuple[int, Filling] | None = None
        self._wanting: dict[int, int] = {}  # by peer: the version it has
        self._lent: dict[int, Bytes] = {}  # by peer: what it may be reading in our memory; it asks when done
        self._subscriptions = {rank: _Subscription() for rank in hub.links}

    # -- publishing ---------------------------------------------------------------------------------

    @property
    def published(self) -> int:
        return self._newest[0] if self._newest else 0

    def publish(self, x: Tensor) -> int:
        filling = self._codec.begin(x, self._hub.wires)
        with self._hub.lock:
            version = self.published + 1
            frame = Frame(Kind.REGISTER, self._identity, version=version, payload=filling.wire)
            links = self._hub.links
            self._newest = version, filling
            # the first who waits, and whose line is free, gets it from this very thread
            first = next(((links[p], pipe) for p in self._wanting if (pipe := links[p].claim(frame))), None)
            if first is not None:
                self._hand_over(first[0].peer, filling)
            for peer in self._wanting:
                links[peer].nudge()
        if first is not None:
            first[0].send_claimed(first[1], frame, filling)
        filling.finish()
        return version

    def due(self, peer: int) -> Frame | None:
        if self._newest is None or peer not in self._wanting or self._newest[0] <= self._wanting[peer]:
            return None
        version, filling = self._newest
        self._hand_over(peer, filling)
        frame = Frame(Kind.REGISTER, self._identity, version=version, payload=filling.wire)
        frame.source = Behind(filling)
        return frame

    def _hand_over(self, peer: int, filling: Filling) -> None:
        del self._wanting[peer]
        self._traffic.bytes += filling.wire.nbytes
        if self._hub.links[peer].lends:
            self._lent[peer] = filling.wire

    # -- reading (all with the lock held) -----------------------------------------------------------

    def version(self, peer: int) -> int:
        if peer == self._hub.rank:
            return self.published
        self._look(peer)
        return self._subscriptions[peer].version

    def peek(self, peer: int) -> tuple[Tensor, int]:
        if peer == self._hub.rank and self._newest is not None:
            version, filling = self._newest
            return self._codec.decode(filling.wire), version
        if peer != self._hub.rank:
            self._look(peer)
            held = self._subscriptions[peer]
            if held.x is not None:
                return held.x, held.version
        raise FabricError(f"rank {peer} has published nothing on channel '{self._name}' yet")

    def wait_newer(self, peers: Sequence[int], seen: Sequence[int], deadline_seconds: float) -> bool:
        def version(peer: int) -> int:
            return self.published if peer == self._hub.rank else self._subscriptions[peer].version

        def spoken() -> bool:
            return all(
                version(p) > v or self._hub.gone(p) or (p != self._hub.rank and self._hub.links[p].silent)
                for p, v in zip(peers, seen, strict=True)
            )

        for peer in peers:
            if peer != self._hub.rank:
                self._subscriptions[peer].unread = 0
                self._ask(peer)
        return self._hub.wait(spoken, deadline_seconds)

    def _look(self, peer: int) -> None:
        """Somebody reads: make sure that the newest will come, and wait for it where that is a must.

        A must is a version published before a collective that is over. For one round trip we wait
        when we had not asked: the first time, and after a while without reading.
        """
        held, hub = self._subscriptions[peer], self._hub
        held.unread = 0
        asked = held.asked
        self._ask(peer)
        if held.version < held.promised:
            hub.wait(lambda: held.version >= held.promised or hub.dead(peer), hub.deadline_seconds)
        elif not asked:
            had, question = held.version, held.question
            hub.wait(
                lambda: (
                    held.version > had or held.answer >= question or hub.dead(peer) or hub.links[peer].silent
                ),
                min(_ASK_SECONDS, hub.deadline_seconds),
            )

    def _ask(self, peer: int) -> None:
        held = self._subscriptions[peer]
        if not held.asked:
            held.question += 1
            self._wish(peer, held, answer=True)

    def _wish(self, peer: int, held: _Subscription, answer: bool) -> None:
        held.asked = True
        wish = [held.version - held.before, held.question if answer else 0]
        self._hub.links[peer].tell(("want", self._identity.hex()), wish)

    def promise(self, peer: int, version: int) -> None:
        """That version exists: from now on no older one is read."""
        if peer != self._hub.rank:
            held = self._subscriptions[peer]
            held.promised = max(held.promised, version + held.before)

    # -- what comes (with the lock held) ------------------------------------------------------------

    def deliver(self, sender: int, frame: Frame) -> None:
        held = self._subscriptions[sender]
        version = frame.version + held.before
        self._traffic.bytes += frame.length
        if version > held.version:
            held.x, held.version = self._codec.decode(frame.payload), version
        held.unread += 1
        if held.unread < UNREAD_LIMIT:
            self._wish(sender, held, answer=False)
        else:
            held.asked = False

    def told(self, sender: int, what: str, value: Any) -> None:
        if what == "nothing":
            self._subscriptions[sender].answer = int(value)
            return
        had, question = int(value[0]), int(value[1])
        self._wanting[sender] = had
        link = self._hub.links[sender]
        if self.published > had:
            link.nudge()
        elif question:
            link.tell(("nothing", self._identity.hex()), question)

    def returned(self, peer: int) -> None:
        self._wanting.pop(peer, None)
        self._lent.pop(peer, None)
        held = self._subscriptions[peer]
        held.before = held.promised = held.version
        if held.asked:
            self._wish(peer, held, answer=True)
