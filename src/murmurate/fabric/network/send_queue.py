"""The frames and the state that a connection has to send, and to send again after a reconnect.

All methods must be called with the endpoint's lock held.
"""

from __future__ import annotations

import json
from collections import deque
from typing import Any

from murmurate.fabric.network.frames import Frame, FrameRejected, Kind

# most bytes of JSON in a frame of state (unless a single value has more): far below META_LIMIT_BYTES,
# above which the peer rejects the frame, and would again on each new connection
_STATE_BYTES = 1 << 16


class SendQueue:
    """Keeps numbered frames until the peer has acknowledged them, and the newest values of the state."""

    def __init__(self) -> None:
        self.posted = 0  # number of the last frame
        self._unacknowledged: deque[Frame] = deque()
        self._unsent = 0  # how many at the end of ``_unacknowledged`` were not sent on this connection yet
        self._state: dict[tuple[str, ...], Any] = {}  # newest values, by key
        self._changed: dict[tuple[str, ...], None] = {}  # ordered set: keys of values yet to be sent

    def __len__(self) -> int:
        """The number of frames without an acknowledgement."""
        return len(self._unacknowledged)

    def has_acknowledged(self, number: int) -> bool:
        """Whether the peer has acknowledged the frame of that number."""
        return number <= self.posted - len(self)

    @property
    def has_frames(self) -> bool:
        """Whether frames are yet to be sent on this connection."""
        return self._unsent > 0

    @property
    def is_pending(self) -> bool:
        """Whether anything is yet to be sent on this connection."""
        return self._unsent > 0 or bool(self._changed)

    def keep(self, frame: Frame, sent: bool = False) -> None:
        """Number a frame, and keep it.

        sent: the caller sends it at once, so ``next_frame`` must not; only if nothing ``is_pending``.
        """
        self.posted += 1
        frame.number = self.posted
        self._unacknowledged.append(frame)
        self._unsent += not sent

    def announce(self, key: tuple[str, ...], value: Any) -> None:
        """Set the newest ``value`` (plain JSON) of ``key``; an older one that was not sent yet never is."""
        self._state[key] = value
        self._changed[key] = None

    def next_state(self) -> Frame | None:
        """A frame with values that have changed, as many as fit into it; None if none has changed."""
        items: list[list[Any]] = []
        left = _STATE_BYTES
        for key in list(self._changed):
            item = [*key, self._state[key]]
            left -= len(json.dumps(item))
            if items and left < 0:
                break
            items.append(item)
            del self._changed[key]
        return Frame(Kind.CONTROL, meta={"state": items}) if items else None

    def next_frame(self) -> Frame | None:
        """The oldest frame that was not sent on this connection yet; it counts as sent from now on."""
        if not self._unsent:
            return None
        self._unsent -= 1
        return self._unacknowledged[len(self._unacknowledged) - self._unsent - 1]

    def acknowledge(self, number: int) -> None:
        """Drop all frames up to that number, as the peer has received them."""
        while self._unacknowledged and self._unacknowledged[0].number <= number:
            self._unacknowledged.popleft()
        self._unsent = min(self._unsent, len(self._unacknowledged))

    def resend_all(self) -> None:
        """On a new connection: all state, and all frames without an acknowledgement."""
        self._unsent = len(self._unacknowledged)
        self._changed = dict.fromkeys(self._state)

    def clear(self) -> None:
        """Forget everything: the peer has restarted."""
        self.posted = self._unsent = 0
        self._unacknowledged.clear()
        self._state.clear()
        self._changed.clear()


def state_of(frame: Frame) -> list[tuple[tuple[str, ...], Any]]:
    """The (key, value) pairs in a control frame. Raises FrameRejected if it is malformed."""
    items = frame.meta.get("state", [])
    try:
        pairs = [(tuple(str(part) for part in item[:-1]), item[-1]) for item in items]
        if any(not key for key, _ in pairs):
            raise ValueError
        return pairs
    except (TypeError, ValueError, IndexError, KeyError):
        raise FrameRejected("meta", "a control message that cannot be read") from None
