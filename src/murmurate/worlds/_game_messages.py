"""The messages between simulators and their game server (``_game_server.py``). Imports no torch."""

from __future__ import annotations

import socket
import struct

OPEN, RESET, STEP, SAVE, LOAD = b"o", b"r", b"s", b"g", b"l"  # requests
DONE, REFUSED, FAILED = b"d", b"n", b"f"  # answers
_HEADER = struct.Struct("<cI")  # kind, length of the payload in bytes


def send(connection: socket.socket, kind: bytes, payload: bytes = b"") -> None:
    connection.sendall(_HEADER.pack(kind, len(payload)) + payload)


def receive(connection: socket.socket) -> tuple[bytes, bytes]:
    """(kind, payload). Raises EOFError where the other end is closed."""
    kind, length = _HEADER.unpack(_receive_exactly(connection, _HEADER.size))
    return kind, _receive_exactly(connection, length)


def _receive_exactly(connection: socket.socket, count: int) -> bytes:
    received = bytearray()
    while len(received) < count:
        piece = connection.recv(count - len(received))
        if not piece:
            raise EOFError("the other end is closed")
        received += piece
    return bytes(received)
