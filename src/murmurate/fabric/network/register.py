"""The register between members: each publishes versions of a vector, of which the others read the newest.

A local peer (a member on the same host) reads it in shared memory (``shm_channel``), so nothing is sent.

Over a connection, a reader requests a version newer than the one that it has, and the publisher answers as
soon as there is one. So at most one version is in flight on each connection; versions published meanwhile
are skipped. After ``UNREAD_LIMIT`` versions that were received but not read, the reader requests no more
until the next read: nothing is sent to a member that never reads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from murmurate.buffers import Bytes
from murmurate.fabric.interface import FabricError, Traffic
from murmurate.fabric.network.compression import Codec, CopyReader, WireCopy, begin_copy
from murmurate.fabric.network.connection import PeerConnection
from murmurate.fabric.network.endpoint import Endpoint
from murmurate.fabric.network.frames import Frame, Kind, Pipe
from murmurate.fabric.network.shm_channel import Lane, ShmChannel
from murmurate.fabric.processes.register import BufferedRegister

UNREAD_LIMIT = 8
_REPLY_SECONDS = 1.0  # longest wait for the reply to a request
_PEEKED, _COPIED = range(2)  # our own pins: for the buffer that we peek at, and for one being copied to send


@dataclass
class _Subscription:
    """A reader's view of one publisher. Versions go on from the last one when the publisher restarts."""

    x: Tensor | None = None  # the newest vector received
    received: int = 0  # its version
    # a local peer's register and lane, in shared memory, and ``before``: one value, as it is read without the
    # lock while a restart may change it
    mapped: tuple[BufferedRegister[Bytes], Lane, int] | None = None
    promised: int = 0  # a version that a collective's result reported: older ones must not be read any more
    before: int = 0  # how many versions the publisher's former incarnations had
    requested: bool = False  # whether we have requested the next newer version
    question: int = 0  # number of the last request that asks for a reply
    answered: int = 0  # number of the last request that was replied to
    unread: int = 0  # versions received since the last read

    @property
    def version(self) -> int:
        """The newest version that can be read."""
        mapped = self.mapped
        return self.received if mapped is None else mapped[0].version + mapped[2]


class NetworkRegister:
    """One channel's register at one member (see ``Register``). All ranks here are ranks of the fabric.

    identity: the channel's, in frames. codec: the form in which vectors are sent and stored. peers: the other
    members of the channel. published: the number of versions that this member has published.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        name: str,
        identity: bytes,
        codec: Codec,
        traffic: Traffic,
        shm: ShmChannel,
        peers: Sequence[int],
    ) -> None:
        self._endpoint, self._name, self._identity, self._codec = endpoint, name, identity, codec
        self._traffic, self._shm = traffic, shm
        self.published = 0
        # the newest version to be sent over connections; shared memory may hold a newer one
        self._newest: tuple[int, WireCopy] | None = None
        self._requests: dict[int, tuple[int, int]] = {}  # by peer: the version that it has, its ``question``
        self._subscriptions = {rank: _Subscription() for rank in peers}
        self._pins = np.zeros(2, dtype=np.int64).data
        # held while the register in shared memory is written; a thread that holds it takes no other lock
        self._writing = threading.Lock()

    # -- publishing ---------------------------------------------------------------------------------

    def publish(self, x: Tensor) -> int:
        version = self.published + 1
        register = self._shm.register
        if register is None or len(self._shm.lanes) < len(self._subscriptions):
            copy = self._publish_on_connections(version, x)
            self._publish_in_memory(version, lambda buffer: np.copyto(buffer, copy.wire))
        else:
            self._publish_in_memory(version, lambda buffer: self._codec.encode(x, buffer))
            self.published, self._newest = version, None
        return version

    def _publish_in_memory(self, version: int, write: Callable[[Bytes], None]) -> None:
        """Write that version into shared memory, unless there is no local peer or it was written already."""
        with self._writing:
            register = self._shm.register
            if register is not None and register.version < version:
                register.publish(version, self._all_pins(), write)
                self._traffic.bytes += self._codec.wire_bytes

    def _all_pins(self) -> Iterator[int]:
        yield from self._pins
        for lane in list(self._shm.lanes.values()):
            yield lane.pin[0]

    def _publish_on_connections(self, version: int, x: Tensor) -> WireCopy:
        copy = begin_copy(self._codec, x, self._endpoint.outgoing_buffers.take(self._codec.wire_bytes))
        frame = Frame(Kind.REGISTER, self._identity, version=version, payload=copy.wire)
        connections = self._endpoint.connections
        first: tuple[PeerConnection, Pipe] | None = None
        try:
            with self._endpoint.lock:
                self.published, self._newest = version, (version, copy)
                waiting = [peer for peer in self._requests if peer not in self._shm.lanes]
                # this thread itself sends to the first waiting peer whose connection is idle
                first = next(
                    ((connections[p], pipe) for p in waiting if (pipe := connections[p].claim(frame))), None
                )
                if first is not None:
                    self._note_sent(first[0].peer, copy)
                    waiting.remove(first[0].peer)
                for peer in waiting:
                    connections[peer].nudge()
        finally:  # even after an interrupt: connections wait for this copy, and one until it is sent
            if first is not None:
                first[0].send_claimed(first[1], frame, copy)
            copy.finish()
        return copy

    def next_register_frame(self, peer: int) -> Frame | None:
        """A frame with the newest version, if ``peer`` has requested a newer one than it has; else None.

        To be called with the lock held, as the two methods below.
        """
        if peer in self._shm.lanes or peer not in self._requests:
            return None
        if self.published <= self._requests[peer][0]:
            return None
        newest = self._newest
        if newest is None or newest[0] < self.published:
            newest = self._newest = self._copied_from_memory()
        version, copy = newest
        self._note_sent(peer, copy)
        frame = Frame(Kind.REGISTER, self._identity, version=version, payload=copy.wire)
        frame.source = CopyReader(copy)
        return frame

    def _copied_from_memory(self) -> tuple[int, WireCopy]:
        """(version, copy) of the newest vector in shared memory, as peers without it need it."""
        register = self._shm.register
        newest = None if register is None else register.peek(self._pins, _COPIED)
        if newest is None:
            raise RuntimeError("a published version is neither in a buffer nor in shared memory")
        wire = self._endpoint.outgoing_buffers.take(self._codec.wire_bytes)
        np.copyto(wire, newest[0])
        self._pins[_COPIED] = 0
        return newest[1], WireCopy(wire)

    def _note_sent(self, peer: int, copy: WireCopy) -> None:
        """Count ``copy`` as sent to ``peer``, and remove the request that it answers."""
        del self._requests[peer]
        self._traffic.bytes += copy.wire.nbytes

    # -- reading ------------------------------------------------------------------------------------

    def version(self, peer: int) -> int:
        if peer == self._endpoint.rank:
            return self.published
        subscription = self._subscriptions[peer]
        if subscription.mapped is None:
            with self._endpoint.lock:
                self._refresh(peer)
        return subscription.version

    def peek(self, peer: int) -> tuple[Tensor, int]:
        newest = self._peek_own() if peer == self._endpoint.rank else self._peek_peer(peer)
        if newest is None:
            raise FabricError(f"rank {peer} has published nothing on channel '{self._name}' yet")
        return newest

    def _peek_own(self) -> tuple[Tensor, int] | None:
        """(newest vector, version) of this member itself; None before the first."""
        register, newest = self._shm.register, self._newest
        in_memory = None if register is None else register.peek(self._pins, _PEEKED)
        if in_memory is not None:
            return self._codec.decode(in_memory[0]), in_memory[1]
        return newest and (self._codec.decode(newest[1].wire), newest[0])

    def _peek_peer(self, peer: int) -> tuple[Tensor, int] | None:
        subscription = self._subscriptions[peer]
        newest = self._peek_mapped(subscription)
        if newest is None:
            with self._endpoint.lock:
                self._refresh(peer)
                newest = self._peek_mapped(subscription)
                if newest is None and subscription.x is not None:
                    return subscription.x, subscription.received
        return newest

    def _peek_mapped(self, subscription: _Subscription) -> tuple[Tensor, int] | None:
        """(newest vector, version) of a local peer, from shared memory; None if there is none."""
        mapped = subscription.mapped
        newest = None if mapped is None else mapped[0].peek(mapped[1].pin, 0)
        if mapped is None or newest is None:
            return None
        self._traffic.bytes += self._codec.wire_bytes
        return self._codec.decode(newest[0]), newest[1] + mapped[2]

    # All methods below must be called with the endpoint's lock held.

    def wait_newer(self, peers: Sequence[int], seen: Sequence[int], deadline_seconds: float) -> bool:
        def version(peer: int) -> int:
            return self.published if peer == self._endpoint.rank else self._subscriptions[peer].version

        def all_newer() -> bool:
            return all(
                version(p) > v
                or self._endpoint.gone(p)
                or self._endpoint.has_finished(p)
                or (p != self._endpoint.rank and self._endpoint.connections[p].silent)
                for p, v in zip(peers, seen, strict=True)
            )

        for peer in peers:
            if peer != self._endpoint.rank:
                self._subscriptions[peer].unread = 0
                self._request_with_reply(peer)
        return self._endpoint.wait(all_newer, deadline_seconds, in_memory=True)

    def _refresh(self, peer: int) -> None:
        """Before a read: request the newest version.

        Waits for a promised version. Else, if no request was pending (before the first read, and after a
        while without reads), waits for the reply to this one.
        """
        subscription, endpoint = self._subscriptions[peer], self._endpoint
        subscription.unread = 0
        was_requested = subscription.requested
        self._request_with_reply(peer)
        if subscription.version < subscription.promised:
            endpoint.wait(
                lambda: subscription.version >= subscription.promised or endpoint.dead(peer),
                endpoint.deadline_seconds,
            )
        elif not was_requested and subscription.mapped is None:
            had, question = subscription.version, subscription.question
            endpoint.wait(
                lambda: (
                    subscription.version > had
                    or subscription.answered >= question
                    or endpoint.dead(peer)
                    or endpoint.connections[peer].silent
                ),
                min(_REPLY_SECONDS, endpoint.deadline_seconds),
            )

    def _request_with_reply(self, peer: int) -> None:
        """Request the next version, unless that was done; if there is none yet, the peer is to reply so."""
        subscription = self._subscriptions[peer]
        if not subscription.requested and subscription.mapped is None:
            subscription.question += 1
            self._request(peer, subscription, subscription.question)

    def _request(self, peer: int, subscription: _Subscription, question: int = 0) -> None:
        """Request a version newer than the one received. question: see ``_Subscription``; 0 for no reply."""
        subscription.requested = True
        request = [subscription.received - subscription.before, question]
        self._endpoint.connections[peer].announce(("want", self._identity.hex()), request)

    def promise(self, peer: int, version: int) -> None:
        """``peer`` has published that version: from now on, no older one must be read."""
        if peer != self._endpoint.rank:
            subscription = self._subscriptions[peer]
            subscription.promised = max(subscription.promised, version + subscription.before)

    # -- incoming -----------------------------------------------------------------------------------

    def deliver(self, sender: int, frame: Frame) -> None:
        subscription = self._subscriptions[sender]
        version = frame.version + subscription.before
        self._traffic.bytes += frame.length
        if version > subscription.received:
            subscription.x, subscription.received = self._codec.decode(frame.payload), version
        subscription.unread += 1
        if subscription.unread < UNREAD_LIMIT:
            self._request(sender, subscription)
        else:
            subscription.requested = False

    def receive_announcement(self, sender: int, key: str, value: Any) -> None:
        if key == "nothing":
            self._subscriptions[sender].answered = int(value)
            return
        self._requests[sender] = int(value[0]), int(value[1])
        if sender not in self._shm.lanes:  # a local peer reads shared memory by itself
            self._serve_request(sender)

    def _serve_request(self, peer: int) -> None:
        """Send ``peer`` a newer version than it has, or reply that there is none yet."""
        had, question = self._requests[peer]
        connection = self._endpoint.connections[peer]
        if self.published > had:
            connection.nudge()
        elif question:
            connection.announce(("nothing", self._identity.hex()), question)

    # -- local peers --------------------------------------------------------------------------------

    def on_register_offered(self) -> None:
        """A local peer was offered the register in shared memory: write the newest version into it."""
        newest = self._newest
        if newest is not None and newest[1].complete:  # else the publishing thread will write it there
            self._publish_in_memory(newest[0], lambda buffer: np.copyto(buffer, newest[1].wire))

    def on_peer_mapped(self, peer: int) -> None:
        """A local peer's register can be read in shared memory now, so it need not answer our requests."""
        subscription = self._subscriptions[peer]
        subscription.mapped = *self._shm.mapped[peer], subscription.before
        subscription.requested = False
        subscription.answered = subscription.question

    def on_mapping_failed(self, peer: int) -> None:
        """A local peer could not map our memory after all: serve it over the connection."""
        if peer in self._requests:
            self._serve_request(peer)

    def peer_restarted(self, peer: int) -> None:
        self._requests.pop(peer, None)
        subscription = self._subscriptions[peer]
        # the last vector of the peer's former incarnation stays readable
        newest = self._peek_mapped(subscription)
        if newest is not None:
            subscription.x, subscription.received = newest
        subscription.mapped = None
        subscription.before = subscription.promised = subscription.received
        if subscription.requested:
            self._request(peer, subscription, subscription.question)
