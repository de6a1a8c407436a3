"""Mail between members: bounded queues, in which each message is delivered once, in the order sent.

Messages to a local peer (a member on the same host) go through shared memory (``shm_channel``), all others
over the connection. Whether a peer is local is decided once for each of its incarnations. Messages sent
before that go over the connection, and must arrive before shared memory is used. If a local peer then cannot
map our memory, the messages in it are sent over the connection.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from murmurate.buffers import Bytes, as_bytes, as_tensor
from murmurate.fabric.interface import Message, Traffic, check_message
from murmurate.fabric.network.compression import Codec, CopyReader, ErrorFeedback, WireCopy, begin_copy
from murmurate.fabric.network.endpoint import Endpoint
from murmurate.fabric.network.frames import Frame, FrameRejected, Kind, Pipe
from murmurate.fabric.network.shm_channel import STREAMS, Lane, ShmChannel
from murmurate.fabric.processes.spsc_ring import encode_tag

_MOST_MESSAGES, _LEAST_MESSAGES, _QUEUE_BYTES = 64, 2, 64 << 20


@dataclass
class _Outgoing:
    """A stream (the messages under one tag to one peer): how many were sent, how many the peer has taken."""

    feedback: ErrorFeedback
    sent: int = 0
    taken: int = 0


@dataclass
class _Incoming:
    """A stream (the messages under one tag from one peer)."""

    waiting: int = 0  # messages that arrived and are unread
    taken: int = 0  # messages read
    announced: int = 0  # the value of ``taken`` that was last reported to the sender at once
    incarnation: int = 0  # counts the sender's incarnations; messages of earlier ones are not counted above
    number: int = STREAMS  # the stream's number in the lane from a local peer


class NetworkMailbox:
    """One channel's mail at one member; all methods but ``send`` need the lock.

    shaped: function that puts a decoded vector into the channel's shape, on the replica's device. like: a
        vector of the channel; a message of fewer numbers is called *short*, and is sent uncompressed.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        identity: bytes,
        codec: Codec,
        traffic: Traffic,
        shaped: Callable[[Tensor], Tensor],
        shm: ShmChannel,
        like: Tensor,
    ) -> None:
        self._endpoint, self._identity, self._codec, self._traffic = endpoint, identity, codec, traffic
        self._shaped, self._shm = shaped, shm
        # sender and receiver may each hold a full queue, so the queue is shorter for large vectors
        self.capacity = max(_LEAST_MESSAGES, min(_MOST_MESSAGES, _QUEUE_BYTES // max(codec.wire_bytes, 1)))
        self._outgoing: dict[tuple[int, str], _Outgoing] = {}
        self._incoming: dict[tuple[int, str], _Incoming] = {}
        self._messages: defaultdict[str, deque[tuple[Message, int]]] = defaultdict(deque)  # by tag
        self._dtype, self._count, self._device = like.dtype, like.numel(), like.device
        self._item_bytes = like.element_size()
        self._tags: dict[str, bytes] = {}
        self._posted: dict[int, int] = {}  # by peer: the frame number of the last message on the connection

    def _stream_to(self, to: int, tag: str) -> _Outgoing:
        return self._outgoing.setdefault((to, tag), _Outgoing(ErrorFeedback(self._codec)))

    # -- sending ------------------------------------------------------------------------------------

    def send(self, to: int, tag: str, x: Tensor, note: float, deadline_seconds: float) -> bool:
        """See ``Mail.send``. To be called without the lock, and by only one thread for each (to, tag)."""
        endpoint = self._endpoint
        encode_tag(self._tags, tag)
        check_message(x, self._count, self._dtype)
        lane: Lane | None = None
        slot: int | None = None
        with endpoint.lock:
            stream = self._stream_to(to, tag)

            def has_room() -> bool:
                nonlocal lane, slot
                lane = self._shm.lanes.get(to)
                if lane is not None:
                    slot = self._free_slot(lane, to, tag, stream)
                    return slot is not None
                return stream.sent - stream.taken < self.capacity

            if not has_room():
                with self._traffic.timed():
                    in_time = endpoint.wait(
                        lambda: has_room() or endpoint.gone(to), deadline_seconds, in_memory=True
                    )
                if not in_time:
                    return False
            if endpoint.gone(to):
                return False
            if lane is not None and slot is not None:
                lane.claimed.add(slot)
        if lane is None or slot is None:
            with self._traffic.timed():
                self._send_on_connection(to, tag, x, note, stream)
        else:
            self._send_in_memory(to, tag, x, note, stream, lane, slot)
        return True

    def _free_slot(self, lane: Lane, to: int, tag: str, stream: _Outgoing) -> int | None:
        """A slot for the next message; None if the message has to wait."""
        number = lane.number(tag)
        if number < STREAMS:
            stream.taken = max(stream.taken, lane.counts[number])
        if stream.sent - stream.taken >= self.capacity:
            return None
        if not self._endpoint.connections[to].queue.has_acknowledged(self._posted.get(to, 0)):
            return None
        return lane.ring.free_slot(lane.claimed)

    def _send_in_memory(
        self, to: int, tag: str, x: Tensor, note: float, stream: _Outgoing, lane: Lane, slot: int
    ) -> None:
        """Write a message into a lane's claimed slot; other threads may write theirs at the same time."""
        short = self._short_bytes(x)
        size = short or self._codec.wire_bytes
        buffer = lane.ring.slots[slot][:size]
        try:
            if short:
                as_tensor(buffer, self._dtype).copy_(x.detach())
            else:
                stream.feedback.encode(x, buffer)
        except BaseException:  # the message is not in the ring yet: give up its slot
            with self._endpoint.lock:
                lane.claimed.discard(slot)
            raise
        with self._endpoint.lock:
            lane.claimed.discard(slot)
            self._traffic.bytes += size
            if self._shm.lanes.get(to) is lane:
                stream.sent += 1
                lane.ring.send(slot, self._tags[tag], note, lane.numbers[tag], short)
            elif lane.withdrawn:
                stream.sent += 1
                self._forward(to, tag, note, buffer, bool(short))

    def _short_bytes(self, x: Tensor) -> int:
        """The size of a short message, in bytes; 0 for any other."""
        return x.numel() * self._item_bytes if x.numel() < self._count else 0

    def _send_on_connection(self, to: int, tag: str, x: Tensor, note: float, stream: _Outgoing) -> None:
        endpoint = self._endpoint
        connection = endpoint.connections.get(to)  # None to this member itself
        record = connection and connection.record
        short = bool(self._short_bytes(x))
        if short:
            copy = WireCopy(as_bytes(x.to("cpu", copy=True)).numpy())
        else:
            copy = begin_copy(stream.feedback, x, endpoint.outgoing_buffers.take(self._codec.wire_bytes))
        frame = self._frame(tag, note, copy.wire, short)
        frame.source = CopyReader(copy)
        pipe: Pipe | None = None
        try:
            with endpoint.lock:
                if connection is not None and connection.record is not record:
                    return  # the message is for an incarnation that has ended meanwhile
                self._traffic.bytes += frame.length
                stream.sent += 1
                pipe = None if connection is None else connection.claim(frame)
                if connection is None:
                    copy.finish()
                    self.deliver(to, frame)
                elif pipe is None:
                    connection.post(frame)
                if connection is not None:
                    self._posted[to] = connection.queue.posted
        finally:  # even after an interrupt: the connection waits for this copy, or until it is sent
            if connection is not None and pipe is not None:
                connection.send_claimed(pipe, frame, copy)
            copy.finish()  # without the lock, as copying megabytes takes long

    def _forward(self, to: int, tag: str, note: float, wire: Bytes, short: bool) -> None:
        """Send a message that is in shared memory over the connection instead."""
        connection = self._endpoint.connections[to]
        connection.post(self._frame(tag, note, wire.copy(), short))
        self._posted[to] = connection.queue.posted

    def _frame(self, tag: str, note: float, payload: Bytes, short: bool) -> Frame:
        meta: dict[str, Any] = {"tag": tag} | ({"short": True} if short else {})
        return Frame(Kind.MAIL, self._identity, note=note, meta=meta, payload=payload)

    # -- reading ------------------------------------------------------------------------------------

    def receive(self, tag: str) -> Message | None:
        if not self.has(tag):
            return None
        message, incarnation = self._messages[tag].popleft()
        stream = self._incoming[message.sender, tag]
        if incarnation == stream.incarnation:
            stream.waiting -= 1
            stream.taken += 1
            self._report_taken(message.sender, tag, stream)
        return message

    def _report_taken(self, sender: int, tag: str, stream: _Incoming) -> None:
        if sender == self._endpoint.rank:
            self._stream_to(sender, tag).taken = stream.taken
        elif stream.number < STREAMS:
            self._shm.mapped[sender][1].counts[stream.number] = stream.taken
        else:
            key = ("taken", self._identity.hex(), tag)
            soon = stream.taken - stream.announced >= min(self.capacity, 4) // 2
            self._endpoint.connections[sender].announce(key, stream.taken, soon)
            stream.announced = stream.taken if soon else stream.announced

    def has(self, tag: str) -> bool:
        self._collect()
        return bool(self._messages.get(tag))

    def _collect(self) -> None:
        """Queue the messages that are in the lanes from local peers."""
        for sender, (_, lane) in self._shm.mapped.items():
            while lane.ring.has_news:
                tag, note, number, x = lane.ring.take(self._decoded)
                if x is not None:
                    stream = self._incoming.setdefault((sender, tag), _Incoming())
                    stream.number = number
                    self._enqueue(sender, tag, stream, x, note)

    def deliver(self, sender: int, frame: Frame) -> None:
        tag = frame.meta.get("tag")
        if not isinstance(tag, str):
            raise FrameRejected("meta", "a message without a tag")
        stream = self._incoming.setdefault((sender, tag), _Incoming())
        if stream.waiting >= self.capacity:
            raise FrameRejected("queue", f"more messages under '{tag}' than the queue holds")
        x = self._decoded(frame.payload, bool(frame.meta.get("short")))
        self._enqueue(sender, tag, stream, x, frame.note)

    def fits(self, length: int, short: bool) -> bool:
        """Whether a message may have a payload of ``length`` bytes."""
        if short:
            return length < self._count * self._item_bytes and length % self._item_bytes == 0
        return length == self._codec.wire_bytes

    def _decoded(self, wire: Bytes, short: bool) -> Tensor:
        if short:
            return as_tensor(wire, self._dtype).to(self._device)
        return self._shaped(self._codec.decode(wire))

    def _enqueue(self, sender: int, tag: str, stream: _Incoming, x: Tensor, note: float) -> None:
        stream.waiting += 1
        if sender != self._endpoint.rank:
            self._traffic.bytes += self._codec.wire_bytes if x.numel() == self._count else x.nbytes
        self._messages[tag].append((Message(sender, x, note), stream.incarnation))

    def receive_announcement(self, sender: int, tag: str, value: Any) -> None:
        """``sender`` reports how many messages under ``tag`` it has read."""
        stream = self._stream_to(sender, tag)
        stream.taken = max(stream.taken, min(int(value), stream.sent))
        self._endpoint.notify()

    # -- local peers --------------------------------------------------------------------------------

    def on_mapping_failed(self, peer: int, lane: Lane) -> None:
        """A local peer could not map ``lane``, and has read nothing there: send its messages by
        connection."""
        is_short = False

        def undecoded(wire: Bytes, short: bool) -> Tensor:
            nonlocal is_short
            is_short = short
            return as_tensor(wire, torch.uint8)

        while lane.ring.has_news:
            tag, note, _, x = lane.ring.take(undecoded)
            if x is not None:
                self._forward(peer, tag, note, x.numpy(), is_short)

    def peer_restarted(self, peer: int) -> None:
        """Empty the queues to ``peer``; messages that it sent before the restart can still be read."""
        self._collect()
        self._posted.pop(peer, None)
        for (to, _), outgoing in self._outgoing.items():
            if to == peer:
                outgoing.sent = outgoing.taken = 0
        for (sender, _), stream in self._incoming.items():
            if sender == peer:
                stream.waiting = stream.taken = stream.announced = 0
                stream.number = STREAMS
                stream.incarnation += 1
