"""Mail over links: bounded queues, and each letter once, in its sender's order."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from murmurate.fabric._compress import Behind, Codec, Feedback
from murmurate.fabric._hub import Hub
from murmurate.fabric._wire import Frame, Kind, Refused
from murmurate.fabric.interface import Letter, Traffic

_MOST_LETTERS, _LEAST_LETTERS, _QUEUE_BYTES = 64, 2, 64 << 20


@dataclass
class _Stream:
    """Letters under one tag to one peer: how many we sent, how many it says were read."""

    feedback: Feedback
    sent: int = 0
    taken: int = 0


@dataclass
class _Inbox:
    """Letters under one tag from one peer that wait to be read, and how many have been."""

    waiting: int = 0
    taken: int = 0
    told: int = 0
    life: int = 0  # which life of the sender they are counted for


@dataclass
class _Box:
    letters: deque[tuple[Letter, int]] = field(default_factory=deque)


class Postbox:
    """One channel's mail at one member; all but ``send`` is called with the lock held."""

    def __init__(
        self, hub: Hub, identity: bytes, codec: Codec, traffic: Traffic, device: torch.device
    ) -> None:
        self._hub, self._identity, self._codec, self._traffic = hub, identity, codec, traffic
        self._device = device
        # both ends hold a queue that is full, so a large vector's is short
        self.capacity = max(_LEAST_LETTERS, min(_MOST_LETTERS, _QUEUE_BYTES // max(codec.wire_bytes, 1)))
        self._streams: dict[tuple[int, str], _Stream] = {}
        self._boxes: dict[str, _Box] = {}
        self._inboxes: dict[tuple[int, str], _Inbox] = {}

    def stream(self, to: int, tag: str) -> _Stream:
        key = to, tag
        if key not in self._streams:
            self._streams[key] = _Stream(Feedback(self._codec))
        return self._streams[key]

    def send(self, to: int, tag: str, x: Tensor, note: float, deadline_seconds: float) -> bool:
        """To be called without the lock, by one thread for each (to, tag)."""
        hub = self._hub
        with hub.lock:
            stream = self.stream(to, tag)

            def room() -> bool:
                return stream.sent - stream.taken < self.capacity or hub.gone(to)

            if not hub.wait(room, deadline_seconds) or hub.gone(to):
                return False
        filling = stream.feedback.begin(x, hub.wires)
        frame = Frame(Kind.MAIL, self._identity, note=note, meta={"tag": tag}, payload=filling.wire)
        frame.source = Behind(filling)
        link = hub.links.get(to)
        with hub.lock:
            self._traffic.bytes += frame.length
            stream.sent += 1
            pipe = None if link is None else link.claim(frame)
            if link is None:
                filling.finish()
                self.deliver(to, frame)
            elif pipe is None:
                link.post(frame)
        if link is not None and pipe is not None:
            link.send_claimed(pipe, frame, filling)
        # a copy of megabytes: nobody else has to wait for it with us
        filling.finish()
        return True

    def receive(self, tag: str) -> Letter | None:
        box = self._boxes.get(tag)
        if box is None or not box.letters:
            return None
        letter, life = box.letters.popleft()
        inbox = self._inboxes[letter.sender, tag]
        if life == inbox.life:
            inbox.waiting -= 1
            inbox.taken += 1
            if letter.sender == self._hub.rank:
                self.stream(letter.sender, tag).taken = inbox.taken
            else:
                key = ("taken", self._identity.hex(), tag)
                soon = inbox.taken - inbox.told >= min(self.capacity, 4) // 2
                self._hub.links[letter.sender].tell(key, inbox.taken, soon)
                inbox.told = inbox.taken if soon else inbox.told
        return letter

    def has(self, tag: str) -> bool:
        box = self._boxes.get(tag)
        return box is not None and bool(box.letters)

    def deliver(self, sender: int, frame: Frame) -> None:
        tag = frame.meta.get("tag")
        if not isinstance(tag, str):
            raise Refused("meta", "a letter without a tag")
        inbox = self._inboxes.setdefault((sender, tag), _Inbox())
        if inbox.waiting >= self.capacity:
            raise Refused("queue", f"more letters under '{tag}' than the queue holds")
        inbox.waiting += 1
        x = self._codec.decode(frame.payload).to(self._device)
        if sender != self._hub.rank:
            self._traffic.bytes += frame.length
        letter = Letter(sender, x, frame.note)
        self._boxes.setdefault(tag, _Box()).letters.append((letter, inbox.life))

    def told(self, sender: int, tag: str, value: Any) -> None:
        stream = self.stream(sender, tag)
        stream.taken = max(stream.taken, min(int(value), stream.sent))
        self._hub.notify()

    def returned(self, peer: int) -> None:
        """A new life of the peer begins with empty queues; what the former one sent can still be read."""
        for (to, _), stream in self._streams.items():
            if to == peer:
                stream.sent = stream.taken = 0
        for (sender, _), inbox in self._inboxes.items():
            if sender == peer:
                inbox.waiting = inbox.taken = inbox.told = 0
                inbox.life += 1
