"""Frames and state that arrived for channels that this member has not made yet."""

from __future__ import annotations

from typing import Any

import numpy as np

from murmurate.fabric.network.frames import Frame, Kind, Refused

_MOST_BYTES = 64 << 20


class PendingMessages:
    """By channel, in the order of arrival. All methods need the endpoint's lock."""

    def __init__(self, size: int) -> None:
        self.frames: dict[bytes, list[tuple[int, Frame]]] = {}  # with the sender
        self.announced: dict[tuple[int, tuple[str, ...]], Any] = {}
        self.bytes = 0  # of ``frames``
        self._most_announced = 1000 * size

    def room(self, length: int) -> Any:
        """A buffer for a payload. Raises Refused beyond the limit."""
        if length + self.bytes > _MOST_BYTES:
            raise Refused("length", f"{length} bytes for a channel that this member has not made")
        return np.empty(length, dtype=np.uint8)

    def keep(self, peer: int, frame: Frame) -> None:
        if frame.kind is not Kind.REGISTER:  # a newer version of that will come
            self.bytes += frame.length
            self.frames.setdefault(frame.channel, []).append((peer, frame))

    def keep_announced(self, peer: int, key: tuple[str, ...], value: Any) -> None:
        if len(self.announced) < self._most_announced:
            self.announced[peer, key] = value

    def take(self, identity: bytes) -> list[tuple[int, Frame]]:
        frames = self.frames.pop(identity, [])
        self.bytes -= sum(frame.length for _, frame in frames)
        return frames

    def take_announced(self, identity: bytes) -> list[tuple[int, tuple[str, ...], Any]]:
        keys = [item for item in self.announced if item[1][1] == identity.hex()]
        return [(peer, key, self.announced.pop((peer, key))) for peer, key in keys]

    def forget_announced(self, peer: int) -> None:
        for stale in [key for key in self.announced if key[0] == peer]:
            del self.announced[stale]
