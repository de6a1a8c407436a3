"""How a worker's report of its end, which may hold a result of any size, reaches the launcher."""

from __future__ import annotations

import os
import struct
from multiprocessing.connection import Connection

_LENGTH = struct.Struct("!Q")
_READ_BYTES = 1 << 20


def send_report(pipe: Connection, report: bytes) -> None:
    """Write a report, which must be the only one, into the pipe."""
    for part in (_LENGTH.pack(len(report)), report):
        rest = memoryview(part)
        while rest:
            rest = rest[os.write(pipe.fileno(), rest) :]


class ReportReader:
    """Reads a report in pieces, as they arrive.

    ``multiprocessing`` would wait for the rest of one: without end, if its worker was stopped meanwhile.
    """

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._arrived = bytearray()

    def read(self) -> bytearray | None:
        """The report; None while a part of it is missing. Raises EOFError if the pipe was closed before."""
        while not self._is_complete and self._pipe.poll():
            piece = os.read(self._pipe.fileno(), _READ_BYTES)
            if not piece:
                raise EOFError
            self._arrived += piece
        return self._arrived[_LENGTH.size :] if self._is_complete else None

    @property
    def _is_complete(self) -> bool:
        arrived = len(self._arrived)
        return arrived >= _LENGTH.size and arrived == _LENGTH.size + _LENGTH.unpack_from(self._arrived)[0]
