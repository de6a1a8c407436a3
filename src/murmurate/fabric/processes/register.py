"""One publisher's vectors in memory shared with its readers: newest wins, no call blocks, no vector is torn.

There is one buffer more than could ever be in use: one for each reader, the newest, and the next to be
written. A reader pins the newest buffer and then checks that it still is the newest, so it reads in place: a
publish costs one copy, a peek none.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeVar

from murmurate.fabric.processes.fence import fence

Buffer = TypeVar("Buffer")


class BufferedRegister(Generic[Buffer]):
    """One publisher's register.

    newest: int64[1], version << 8 | buffer, which only the publisher writes; 0 before its first version.
    buffers: at most 256, and two more than there are pins. A pin is an int64 that one reader writes and the
    publisher reads: buffer + 1; 0 for none.
    """

    def __init__(self, newest: memoryview, buffers: Sequence[Buffer]) -> None:
        self._newest, self._buffers = newest, buffers
        self._barrier = threading.Lock()

    @property
    def version(self) -> int:
        """0 before the first is published."""
        return int(self._newest[0]) >> 8

    def publish(self, version: int, pins: Iterable[int], store: Callable[[Buffer], None]) -> None:
        """Have ``store`` write a vector into a free buffer, and make it the newest (one thread at a time)."""
        fence(self._barrier)  # the last version must be visible before the pins are read
        newest = self._newest[0]
        taken = {pin - 1 for pin in pins}
        if newest:
            taken.add(newest & 255)
        buffer = next(i for i in range(len(self._buffers)) if i not in taken)
        store(self._buffers[buffer])
        fence(self._barrier)
        self._newest[0] = version << 8 | buffer

    def peek(self, pins: memoryview, reader: int) -> tuple[Buffer, int] | None:
        """(newest buffer, its version), unchanged until ``pins[reader]`` changes; None before the first."""
        while newest := self._newest[0]:
            pins[reader] = (newest & 255) + 1
            fence(self._barrier)  # the pin must be visible before the check that it was in time
            if self._newest[0] == newest:
                return self._buffers[newest & 255], newest >> 8
        return None
