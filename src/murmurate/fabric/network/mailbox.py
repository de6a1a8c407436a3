"""Mail between members: bounded queues, and each message once, in its sender's order.

To a neighbour messages go through memory (``shm_channel``), to others over the connection. Which of the two
is settled for each incarnation of a peer. Where it is settled late, messages go through memory once those on
the line have arrived; where a neighbour cannot see our memory after all, those that lie there are sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from murmurate.buffers import Bytes, as_tensor
from murmurate.fabric.interface import Message, Traffic
from murmurate.fabric.network.compression import Behind, Codec, Feedback, Filling
from murmurate.fabric.network.endpoint import Endpoint
from murmurate.fabric.network.frames import Frame, Kind, Refused
from murmurate.fabric.network.shm_channel import STREAMS, Into, Lane, ShmChannel
from murmurate.fabric.processes.spsc_ring import check_message, tag_words

_MOST_MESSAGES, _LEAST_MESSAGES, _QUEUE_BYTES = 64, 2, 64 << 20


@dataclass
class _Stream:
    """Messages under one tag to one peer: how many we sent, how many it says were read."""

    feedback: Feedback
    sent: int = 0
    taken: int = 0


@dataclass
class _Inbox:
    """Messages under one tag from one peer that wait to be read, and how many have been."""

    waiting: int = 0
    taken: int = 0
    announced: int = 0
    incarnation: int = 0  # which incarnation of the sender they are counted for
    number: int = STREAMS  # under which a neighbour counts them


@dataclass
class _Box:
    messages: deque[tuple[Message, int]] = field(default_factory=deque)


class NetworkMailbox:
    """One channel's mail at one member; all but ``send`` is called with the lock held.

    shaped: gives a decoded vector the replica's shape, on its device. like: what the channel is for; a
    message
        of fewer numbers is short, and goes as it is.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        identity: bytes,
        codec: Codec,
        traffic: Traffic,
        shaped: Callable[[Tensor], Tensor],
        desk: ShmChannel,
        like: Tensor,
    ) -> None:
        self._endpoint, self._identity, self._codec, self._traffic = endpoint, identity, codec, traffic
        self._shaped, self._shm = shaped, desk
        # both ends hold a queue that is full, so a large vector's is short
        self.capacity = max(_LEAST_MESSAGES, min(_MOST_MESSAGES, _QUEUE_BYTES // max(codec.wire_bytes, 1)))
        self._streams: dict[tuple[int, str], _Stream] = {}
        self._boxes: dict[str, _Box] = {}
        self._inboxes: dict[tuple[int, str], _Inbox] = {}
        self._dtype, self._count, self._device = like.dtype, like.numel(), like.device
        self._item_bytes = like.element_size()
        self._words: dict[str, bytes] = {}
        self._posted: dict[int, int] = {}  # by peer: the number of the last message on the line

    def stream(self, to: int, tag: str) -> _Stream:
        key = to, tag
        if key not in self._streams:
            self._streams[key] = _Stream(Feedback(self._codec))
        return self._streams[key]

    # -- sending ------------------------------------------------------------------------------------

    def send(self, to: int, tag: str, x: Tensor, note: float, deadline_seconds: float) -> bool:
        """To be called without the lock, by one thread for each (to, tag)."""
        endpoint = self._endpoint
        tag_words(self._words, tag)
        check_message(x, self._count, self._dtype)
        lane: Lane | None = None
        slot: int | None = None
        with endpoint.lock:
            stream = self.stream(to, tag)

            def room() -> bool:
                nonlocal lane, slot
                lane = self._shm.lanes.get(to)
                if lane is not None:
                    slot = self._slot(lane, to, tag, stream)
                    return slot is not None
                return stream.sent - stream.taken < self.capacity

            if not room():
                with self._traffic.timed():
                    ended = endpoint.wait(
                        lambda: room() or endpoint.gone(to), deadline_seconds, in_memory=True
                    )
                if not ended:
                    return False
            if endpoint.gone(to):
                return False
            if lane is not None and slot is not None:
                lane.claimed.add(slot)
        if lane is None or slot is None:
            with self._traffic.timed():
                self._post(to, tag, x, note, stream)
        else:
            self._leave(to, tag, x, note, stream, lane, slot)
        return True

    def _slot(self, lane: Lane, to: int, tag: str, stream: _Stream) -> int | None:
        """Where the next message may lie; None if it has to wait."""
        number = lane.number(tag)
        if number < STREAMS:
            stream.taken = max(stream.taken, lane.counts[number])
        if stream.sent - stream.taken >= self.capacity:
            return None
        if not self._endpoint.connections[to].has_had(self._posted.get(to, 0)):
            return None
        return lane.box.free(lane.claimed)

    def _leave(
        self, to: int, tag: str, x: Tensor, note: float, stream: _Stream, lane: Lane, slot: int
    ) -> None:
        """Write a message where a neighbour finds it; others may go on with theirs meanwhile."""
        short = self._short(x)
        try:
            room = lane.box.slots[slot]
            if short:
                as_tensor(room[:short], self._dtype).copy_(x.detach())
            else:
                stream.feedback.encode(x, Into(room[: self._codec.wire_bytes]))
        except BaseException:  # a message of which nobody has heard
            with self._endpoint.lock:
                lane.claimed.discard(slot)
            raise
        with self._endpoint.lock:
            lane.claimed.discard(slot)
            self._traffic.bytes += short or self._codec.wire_bytes
            present = self._shm.lanes.get(to)
            if present is lane:
                stream.sent += 1
                lane.box.send(slot, self._words[tag], note, lane.numbers[tag], short)
            elif lane.withdrawn:
                stream.sent += 1
                size = short or self._codec.wire_bytes
                self._forward(to, tag, note, lane.box.slots[slot][:size], bool(short))

    def _short(self, x: Tensor) -> int:
        """Its bytes, if it is a short message; else 0."""
        return x.numel() * self._item_bytes if x.numel() < self._count else 0

    def _post(self, to: int, tag: str, x: Tensor, note: float, stream: _Stream) -> None:
        endpoint = self._endpoint
        meta: dict[str, Any] = {"tag": tag}
        if self._short(x):
            meta["short"] = True
            filling = Filling(x.detach().to("cpu", copy=True).view(torch.uint8).numpy())
        else:
            filling = stream.feedback.begin(x, endpoint.wires)
        frame = Frame(Kind.MAIL, self._identity, note=note, meta=meta, payload=filling.wire)
        frame.source = Behind(filling)
        connection = endpoint.connections.get(to)
        with endpoint.lock:
            self._traffic.bytes += frame.length
            stream.sent += 1
            pipe = None if connection is None else connection.claim(frame)
            if connection is None:
                filling.finish()
                self.deliver(to, frame)
            elif pipe is None:
                connection.post(frame)
            if connection is not None:
                self._posted[to] = connection.posted
        if connection is not None and pipe is not None:
            connection.send_claimed(pipe, frame, filling)
        # a copy of megabytes: nobody else has to wait for it with us
        filling.finish()

    def _forward(self, to: int, tag: str, note: float, wire: Bytes, short: bool) -> None:
        """Send what lies in memory."""
        connection = self._endpoint.connections[to]
        meta: dict[str, Any] = {"tag": tag} | ({"short": True} if short else {})
        connection.post(Frame(Kind.MAIL, self._identity, note=note, meta=meta, payload=wire.copy()))
        self._posted[to] = connection.posted

    # -- reading ------------------------------------------------------------------------------------

    def receive(self, tag: str) -> Message | None:
        self._collect()
        box = self._boxes.get(tag)
        if box is None or not box.messages:
            return None
        message, incarnation = box.messages.popleft()
        inbox = self._inboxes[message.sender, tag]
        if incarnation == inbox.incarnation:
            inbox.waiting -= 1
            inbox.taken += 1
            self._say_taken(message.sender, tag, inbox)
        return message

    def _say_taken(self, sender: int, tag: str, inbox: _Inbox) -> None:
        if sender == self._endpoint.rank:
            self.stream(sender, tag).taken = inbox.taken
        elif inbox.number < STREAMS:
            self._shm.seen[sender][1].counts[inbox.number] = inbox.taken
        else:
            key = ("taken", self._identity.hex(), tag)
            soon = inbox.taken - inbox.announced >= min(self.capacity, 4) // 2
            self._endpoint.connections[sender].announce(key, inbox.taken, soon)
            inbox.announced = inbox.taken if soon else inbox.announced

    def has(self, tag: str) -> bool:
        self._collect()
        box = self._boxes.get(tag)
        return box is not None and bool(box.messages)

    def _collect(self) -> None:
        """What lies in neighbours' memory for us."""
        for sender, (_, lane) in self._shm.seen.items():
            while lane.box.has_news:
                tag, note, number, x = lane.box.take(self._arrived)
                if x is not None:
                    inbox = self._inboxes.setdefault((sender, tag), _Inbox())
                    inbox.number = number
                    self._keep(sender, tag, inbox, x, note)

    def deliver(self, sender: int, frame: Frame) -> None:
        tag = frame.meta.get("tag")
        if not isinstance(tag, str):
            raise Refused("meta", "a message without a tag")
        inbox = self._inboxes.setdefault((sender, tag), _Inbox())
        if inbox.waiting >= self.capacity:
            raise Refused("queue", f"more messages under '{tag}' than the queue holds")
        self._keep(
            sender, tag, inbox, self._arrived(frame.payload, bool(frame.meta.get("short"))), frame.note
        )

    def fits(self, length: int, short: bool) -> bool:
        """Whether a message may have so many bytes."""
        if short:
            return length < self._count * self._item_bytes and length % self._item_bytes == 0
        return length == self._codec.wire_bytes

    def _arrived(self, wire: Bytes, short: bool) -> Tensor:
        if short:
            return as_tensor(wire, self._dtype).to(self._device)
        return self._shaped(self._codec.decode(wire))

    def _keep(self, sender: int, tag: str, inbox: _Inbox, x: Tensor, note: float) -> None:
        inbox.waiting += 1
        if sender != self._endpoint.rank:
            self._traffic.bytes += self._codec.wire_bytes if x.numel() == self._count else x.nbytes
        self._boxes.setdefault(tag, _Box()).messages.append((Message(sender, x, note), inbox.incarnation))

    def announced(self, sender: int, tag: str, value: Any) -> None:
        stream = self.stream(sender, tag)
        stream.taken = max(stream.taken, min(int(value), stream.sent))
        self._endpoint.notify()

    # -- neighbours ---------------------------------------------------------------------------------

    def unseen(self, peer: int, lane: Lane) -> None:
        """A neighbour cannot see that lane after all, and so has read nothing there: it gets all by line."""
        while lane.box.has_news:
            shorts: list[bool] = []

            def as_it_is(wire: Bytes, short: bool, shorts: list[bool] = shorts) -> Tensor:
                shorts.append(short)
                return as_tensor(wire, torch.uint8)

            tag, note, _, x = lane.box.take(as_it_is)
            if x is not None:
                self._forward(peer, tag, note, x.numpy(), shorts[0])

    def returned(self, peer: int) -> None:
        """The peer was started anew: its queues are empty; what was sent before can still be read."""
        self._collect()
        self._posted.pop(peer, None)
        for (to, _), stream in self._streams.items():
            if to == peer:
                stream.sent = stream.taken = 0
        for (sender, _), inbox in self._inboxes.items():
            if sender == peer:
                inbox.waiting = inbox.taken = inbox.announced = 0
                inbox.number = STREAMS
                inbox.incarnation += 1
