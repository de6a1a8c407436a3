"""Connects a sampler and a shard on different hosts; to each of them it behaves like a local socket.

On the shard's host there is a mirror of the sampler's slots, which the shard fills as if they were local. The
shard's end of the bridge sends the rows along with its answer, and the sampler's end writes them into the
slots. The connection is encrypted and authenticated (``fabric.network.handshake``) by a key that the learners
exchange.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import queue
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from murmurate.fabric.network.crypto import Identity, PeerRecord
from murmurate.fabric.network.frames import Closed, Frame, FrameRejected, Kind, Pipe
from murmurate.fabric.network.handshake import Credentials, answer, dial
from murmurate.fabric.network.listener import Listener
from murmurate.sources.service_links import (
    MESSAGE_BYTES,
    REPLY_BYTES,
    REQUEST_BYTES,
    DrawReply,
    DrawRequest,
    ShardAddress,
    Stream,
    hello,
    read_hello,
)
from murmurate.sources.service_slots import BatchSlots

SILENCE_SECONDS = 20.0  # a connection without a byte for so long counts as dead
_DIAL_SECONDS = 5.0
_MAX_HELLO_BYTES, _MAX_PAYLOAD_BYTES = 1 << 16, 1 << 31
_CONNECTIONS = 64  # number of members that the listener allows for; see ``Listener``
_INCARNATION = bytes(16)  # a field of the handshake that bridges do not use
_CONNECTION_ERRORS = (OSError, Closed, FrameRejected)
Convert = Callable[[bytes], bytes]


class Bridge:
    """Carries messages between ``inner``, a local socket, and ``pipe``; when either ends, closes the other.

    to_payload: turns a message from ``inner`` into the payload to send. to_message: turns a received payload
    into the message for ``inner``.
    """

    def __init__(self, pipe: Pipe, inner: socket.socket, to_payload: Convert, to_message: Convert) -> None:
        self._pipe, self._inner, self._to_payload, self._to_message = pipe, inner, to_payload, to_message
        inner.settimeout(SILENCE_SECONDS / 4)
        self._threads = [
            threading.Thread(target=self._until_ended, args=(work,), daemon=True)
            for work in (self._send, self._receive)
        ]
        for thread in self._threads:
            thread.start()

    def _until_ended(self, work: Callable[[], None]) -> None:
        try:
            with contextlib.suppress(*_CONNECTION_ERRORS):
                work()
        finally:  # whatever was raised: else the other thread would keep the connection alive
            self._disconnect()

    def _send(self) -> None:
        while True:
            try:
                message = self._inner.recv(MESSAGE_BYTES)
            except TimeoutError:
                self._pipe.writer(Frame(Kind.CONTROL)).write()  # so that the silence is not taken for death
                continue
            if not message:
                return
            self._pipe.writer(Frame(Kind.MAIL, payload=self._to_payload(message))).write()

    def _receive(self) -> None:
        while True:
            frame = self._pipe.receive(_allocate)
            if frame.kind is Kind.MAIL:
                self._inner.sendall(self._to_message(frame.payload))

    def close(self) -> None:
        """End both sides; afterwards nothing is written to the slots any more."""
        self._disconnect()
        for thread in self._threads:
            thread.join()
        self._inner.close()

    def _disconnect(self) -> None:
        self._pipe.close()
        with contextlib.suppress(OSError):
            self._inner.shutdown(socket.SHUT_RDWR)


def dial_bridge(address: ShardAddress, stream: Stream, slots: BatchSlots) -> tuple[socket.socket, Bridge]:
    """The sampler's socket, and the bridge that serves it. Raises OSError, Closed or FrameRejected."""
    record = PeerRecord(address.rank, address.host, address.port, _identity(address).public, _INCARNATION)
    credentials = _credentials(address, stream.rank)
    pipe = dial(credentials, record, 0, _DIAL_SECONDS).pipe
    pipe.writer(Frame(Kind.MAIL, payload=hello(stream, slots.layout))).write()

    def to_payload(message: bytes) -> bytes:
        request = DrawRequest.read(message)
        if not request.error_bits:
            return message
        return b"".join([message, *_part_rows(slots, ["errors"], request.slot, request.part)])

    def to_message(payload: bytes) -> bytes:
        message = bytes(payload[:REPLY_BYTES])
        reply = DrawReply.read(message)
        if reply.number == slots.number(reply.slot) and not slots.is_filled(reply.slot, reply.part):
            rows = _part_rows(slots, _drawn_columns(slots), reply.slot, reply.part)
            _write(rows, memoryview(payload)[REPLY_BYTES:])
            slots.fill(reply.slot, reply.part, reply.number)
        return message

    outer, inner = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    outer.setblocking(False)
    return outer, Bridge(pipe, inner, to_payload, to_message)


class Bridges:
    """The shard's side: connections from other hosts, each with a mirror of its sampler's slots.

    Raises Refusal if this host cannot listen at ``address.host``.
    """

    def __init__(self, address: ShardAddress) -> None:
        self._credentials = _credentials(address, address.rank)
        # by (rank, index) of the sampler: its token, and the mirror
        self._mirrors: dict[tuple[int, int], tuple[str, BatchSlots]] = {}
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[tuple[socket.socket, BatchSlots]] = queue.SimpleQueue()
        self.arrived = os.eventfd(0, os.EFD_NONBLOCK)  # readable when ``accept`` has something
        self._listener = Listener(address.host, _CONNECTIONS, self._authenticate, lambda cause, text: None)
        self.port = self._listener.port

    def accept(self) -> list[tuple[socket.socket, BatchSlots]]:
        """New connections: (the shard's socket, the mirror)."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.arrived)
        return [self._queue.get() for _ in range(self._queue.qsize())]

    def _authenticate(self, sock: socket.socket, seconds: float) -> None:
        try:
            pipe = answer(self._credentials, sock, self._peer_record, lambda rank: 0, seconds).pipe
            self._open_bridge(pipe)
        except (*_CONNECTION_ERRORS, ValueError, KeyError, TypeError):
            sock.close()

    def _peer_record(self, rank: int, incarnation: bytes) -> PeerRecord:
        return PeerRecord(rank, "", 0, self._credentials.identity.public, incarnation)

    def _open_bridge(self, pipe: Pipe) -> None:
        stream, layout = read_hello(pipe.receive(_allocate_hello).payload)
        with self._lock:
            token, slots = self._mirrors.get((stream.rank, stream.index), ("", None))
            if slots is None or token != stream.token:
                slots = BatchSlots(memoryview(bytearray(layout.size_bytes)), layout)
                self._mirrors[stream.rank, stream.index] = stream.token, slots

        def to_payload(message: bytes) -> bytes:
            reply = DrawReply.read(message)
            return b"".join([message, *_part_rows(slots, _drawn_columns(slots), reply.slot, reply.part)])

        def to_message(payload: bytes) -> bytes:
            message = bytes(payload[:REQUEST_BYTES])
            request = DrawRequest.read(message)
            if request.error_bits:
                rows = _part_rows(slots, ["errors"], request.slot, request.part)
                _write(rows, memoryview(payload)[REQUEST_BYTES:])
            return message

        outer, inner = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        outer.setblocking(False)
        Bridge(pipe, inner, to_payload, to_message)
        self._queue.put((outer, slots))
        os.eventfd_write(self.arrived, 1)


def _drawn_columns(slots: BatchSlots) -> list[str]:
    """The columns that a shard writes."""
    return [name for name, _ in slots.layout.columns if name != "errors"]


def _part_rows(slots: BatchSlots, columns: Sequence[str], slot: int, part: int) -> list[memoryview]:
    """The rows of a part: for each column, those of each batch of the block."""
    layout = slots.layout
    return [
        slots.bytes_of(column, slot, layout.rows(part, number))
        for column in columns
        for number in range(layout.block)
    ]


def _write(rows: Sequence[memoryview], content: memoryview) -> None:
    """Fill ``rows``, one after another, with ``content``. Raises ValueError if it is too short."""
    start = 0
    for target in rows:
        target[:] = content[start : start + target.nbytes]
        start += target.nbytes


def _identity(address: ShardAddress) -> Identity:
    """The key pair that both ends derive from the shared key: knowing that key authenticates a process."""
    private = hashlib.blake2b(bytes.fromhex(address.key), digest_size=32, person=b"replay service").digest()
    return Identity(X25519PrivateKey.from_private_bytes(private), _INCARNATION)


def _credentials(address: ShardAddress, rank: int) -> Credentials:
    return Credentials(
        rank=rank,
        run=hashlib.blake2b(address.name.encode(), digest_size=16).digest(),
        epoch=0,
        secret=bytes.fromhex(address.key),
        identity=_identity(address),
        encrypt=True,
        cipher="aes-256-gcm",
        silence_seconds=SILENCE_SECONDS,
    )


def _allocate(frame: Frame, length: int) -> Any:
    if length > _MAX_PAYLOAD_BYTES:
        raise FrameRejected("length", f"a message of {length} bytes")
    return bytearray(length)


def _allocate_hello(frame: Frame, length: int) -> Any:
    if length > _MAX_HELLO_BYTES:
        raise FrameRejected("length", f"a greeting of {length} bytes")
    return bytearray(length)
