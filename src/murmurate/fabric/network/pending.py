"""Frames and announcements that arrived for channels which this member has not made yet."""

from __future__ import annotations

from typing import Any

import numpy as np

from murmurate.fabric.network.frames import Frame, FrameRejected, Kind

_MAX_BYTES = 64 << 20


class PendingMessages:
    """Frames by channel, in the order of arrival, and announcements: newest values that peers have announced
    about channels. All methods must be called with the endpoint's lock held."""

    def __init__(self, members: int) -> None:
        self.frames: dict[bytes, list[tuple[int, Frame]]] = {}  # by channel: (sender, frame)
        self.announcements: dict[tuple[int, tuple[str, ...]], Any] = {}  # by sender and key
        self.bytes = 0  # of ``frames``
        self._max_announcements = 1000 * members

    def has_room(self, length: int) -> bool:
        return length + self.bytes <= _MAX_BYTES

    def allocate_payload(self, length: int) -> Any:
        """A buffer for a payload. Raises FrameRejected if the payloads kept would exceed the limit."""
        if not self.has_room(length):
            raise FrameRejected("length", f"{length} bytes for a channel that this member has not made")
        return np.empty(length, dtype=np.uint8)

    def keep(self, peer: int, frame: Frame) -> None:
        # a version of a register is dropped: the sender will publish a newer one
        if frame.kind is not Kind.REGISTER:
            self.bytes += frame.length
            self.frames.setdefault(frame.channel, []).append((peer, frame))

    def keep_announcement(self, peer: int, key: tuple[str, ...], value: Any) -> None:
        if len(self.announcements) < self._max_announcements:
            self.announcements[peer, key] = value

    def take(self, channel_id: bytes) -> list[tuple[int, Frame]]:
        frames = self.frames.pop(channel_id, [])
        self.bytes -= sum(frame.length for _, frame in frames)
        return frames

    def take_announcements(self, channel_id: bytes) -> list[tuple[int, tuple[str, ...], Any]]:
        keys = [(peer, key) for peer, key in self.announcements if key[1] == channel_id.hex()]
        return [(peer, key, self.announcements.pop((peer, key))) for peer, key in keys]

    def forget_announcements(self, peer: int) -> None:
        for sender, key in list(self.announcements):
            if sender == peer:
                del self.announcements[sender, key]
