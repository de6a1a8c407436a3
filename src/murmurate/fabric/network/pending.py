"""What came for channels that this member has not made yet."""

from __future__ import annotations

from typing import Any

import numpy as np

from murmurate.fabric.network.frames import Frame, Kind, Refused

_BYTES = 64 << 20  # beyond which no more is taken; each connection may be just bringing something


class PendingMessages:
    """Kept by the identity of the channel, in the order of arrival; called with the endpoint's lock held."""

    def __init__(self, size: int) -> None:
        self.frames: dict[bytes, list[tuple[int, Frame]]] = {}  # with who sent it
        self.announced: dict[tuple[int, tuple[str, ...]], Any] = {}
        self.bytes = 0  # of ``frames``
        self._most_announced = 1000 * size

    def room(self, length: int) -> Any:
        """Where to put a payload; raises Refused. Whether it comes whole is not known yet."""
        if length + self.bytes > _BYTES:
            raise Refused("length", f"{length} bytes for a channel that this member has not made")
        return np.empty(length, dtype=np.uint8)

    def keep(self, peer: int, frame: Frame) -> None:
        if frame.kind is not Kind.REGISTER:  # of a vector there will be a newer version
            self.bytes += frame.length
            self.frames.setdefault(frame.channel, []).append((peer, frame))

    def hear(self, peer: int, key: tuple[str, ...], value: Any) -> None:
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
