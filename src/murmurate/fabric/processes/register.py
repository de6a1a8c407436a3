"""One publisher's vectors in memory shared with its readers, who get the newest version, always a whole one;
neither publishing nor reading blocks.

There are enough buffers that one is always free: one for each reader to pin, one for the newest version, and
one for the next. A reader pins the newest buffer and then checks that it is still the newest, so it can read
in place: a publish costs one copy, a peek none.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeVar

from murmurate.replica.fence import fence

Buffer = TypeVar("Buffer")


class BufferedRegister(Generic[Buffer]):
    """One publisher's register.

    newest: int64[1], the version number and the index of its buffer, as version << 8 | buffer; 0 before the
    first version. Only the publisher writes it. buffers: at most 256, and two more than there are pins.

    A pin is an int64 that one reader writes and the publisher reads: the index of the buffer being read plus
    1; 0 for none.
    """

    def __init__(self, newest: memoryview, buffers: Sequence[Buffer]) -> None:
        self._newest, self._buffers = newest, buffers
        self._barrier = threading.Lock()

    @property
    def version(self) -> int:
        """The newest version; 0 before the first."""
        return int(self._newest[0]) >> 8

    def publish(self, version: int, pins: Iterable[int], store: Callable[[Buffer], None]) -> None:
        """Let ``store`` write into a free buffer, and make that the newest. For one thread at a time."""
        fence(self._barrier)  # readers must see the previous version before the pins are read here
        newest = self._newest[0]
        taken = {pin - 1 for pin in pins}
        if newest:
            taken.add(newest & 255)
        buffer = next(i for i in range(len(self._buffers)) if i not in taken)
        store(self._buffers[buffer])
        fence(self._barrier)
        self._newest[0] = version << 8 | buffer

    def peek(self, pins: memoryview, reader: int) -> tuple[Buffer, int] | None:
        """(newest buffer, its version); None before the first version. The buffer stays unchanged until
        ``pins[reader]`` changes."""
        while newest := self._newest[0]:
            pins[reader] = (newest & 255) + 1
            fence(self._barrier)  # the publisher must see the pin before the check below
            if self._newest[0] == newest:
                return self._buffers[newest & 255], newest >> 8
        return None
