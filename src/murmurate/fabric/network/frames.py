"""Frames, the messages on a connection: a header, a little JSON and a vector, in authenticated pieces.

Nothing is trusted before the piece that contains it has been authenticated, and no memory is allocated for a
vector before the receiving channel has accepted the length in the header.
"""

from __future__ import annotations

import contextlib
import enum
import json
import socket
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from murmurate.buffers import Bytes
from murmurate.fabric.network.compression import CopyReader, WireCopy
from murmurate.fabric.network.crypto import TAG_BYTES, AeadStream, InvalidTag
from murmurate.fabric.network.shm_peer import ADDRESS, RegionAddress, ShmPeer

PIECE_BYTES = 1 << 20  # large enough that Python's overhead is small, small enough for a core's cache
META_LIMIT_BYTES = 1 << 18  # longest JSON
_SHARED = 1  # flag of a frame whose payload is not sent, but read from its sender's shared memory
_READ_BYTES = 1 << 18  # read at a time, so that the sender reuses the kernel's pages while they are cached
_TRICKLE_BYTES_PER_SECOND = 1 << 10  # a connection that sends less counts as silent
_MAGIC = b"mu"
_HEADER = struct.Struct("<2sBB8sQ8sQQdIQ")


class Kind(enum.IntEnum):
    """What a frame carries."""

    CONTROL = 1  # newest values of control state: acknowledgements, requests, heartbeats
    REGISTER = 2  # a version of a published vector
    MAIL = 3  # a message of ``Mail``
    ROUND = 4  # a part of a collective, or its result
    FINISHED = 5  # the sender takes no further part, but still answers requests


# these are numbered, acknowledged, and sent again over a new connection (see ``connection``)
NUMBERED = frozenset({Kind.MAIL, Kind.ROUND, Kind.FINISHED})


class FrameRejected(Exception):
    """A peer's message, or a connection, is rejected; rejections are counted by ``cause``."""

    def __init__(self, cause: str, sentence: str) -> None:
        super().__init__(sentence)
        self.cause = cause


class Closed(Exception):
    """The other side ended the connection between two frames, or was silent for too long."""


class SilenceTimeout(Closed):
    """No byte arrived for as long as a connection may be silent."""


PayloadSource = WireCopy | CopyReader  # a payload that is still being copied


@dataclass
class Frame:
    """One message on a connection.

    channel: digest of the channel's name [8]; zeros in frames that belong to no channel. number: sequence
    number of the frame; 0 for frames that are not numbered. version: the version of a register; in frames of
    collectives the number of the round. note: number sent along with a message of ``Mail``.
    payload: any object with a buffer of ``length`` bytes. source: from where the payload is still being
    copied; None if it is complete.
    """

    kind: Kind
    channel: bytes = b"\0" * 8
    number: int = 0
    version: int = 0
    note: float = 0.0
    meta: dict[str, Any] = field(default_factory=dict)
    payload: Any = None
    source: PayloadSource | None = field(default=None, compare=False, repr=False)

    @property
    def length(self) -> int:
        return 0 if self.payload is None else memoryview(self.payload).nbytes


@dataclass(frozen=True)
class Origin:
    """The run (8 bytes of its id) and the epoch that a connection belongs to; written into every header."""

    run: bytes
    epoch: int


class FrameWriter:
    """Writes one frame. It may stop while the socket's buffer is full, and continue in another thread."""

    def __init__(self, sock: socket.socket, pieces: Iterator[list[Any]]) -> None:
        self._socket, self._pieces = sock, pieces
        self._unwritten: list[memoryview] = []

    def write(self, wait: bool = True) -> bool:
        """Write what is left of the frame; returns whether all of it is written.

        wait: whether to wait for room in the socket's buffer, or return False when there is none. Raises
        OSError.
        """
        flags = 0 if wait else socket.MSG_DONTWAIT
        while True:
            while self._unwritten:
                try:
                    _drop(self._unwritten, self._socket.sendmsg(self._unwritten, [], flags))
                except BlockingIOError:
                    if wait:
                        raise
                    # copies, as these buffers may change before another thread continues
                    self._unwritten = [memoryview(bytes(buffer)) for buffer in self._unwritten]
                    return False
            buffers = next(self._pieces, None)
            if buffers is None:
                return True
            self._unwritten = [memoryview(buffer) for buffer in buffers]


class Pipe:
    """One connection after its handshake. One thread sends, one receives.

    sealer, opener: the streams that seal what is sent, and open what is received. peer_reads: whether the
    peer can read payloads in our shared memory. local_peer: the peer's shared memory, if we can read it.
    """

    def __init__(
        self,
        sock: socket.socket,
        origin: Origin,
        sealer: AeadStream,
        opener: AeadStream,
        peer_reads: bool = False,
        local_peer: ShmPeer | None = None,
    ) -> None:
        self._socket, self._origin = sock, origin
        self._sealer, self._opener = sealer, opener
        self.peer_reads, self.local_peer = peer_reads, local_peer
        # buffers for one sealed piece to be sent, and one received
        self._sealed_piece = memoryview(bytearray(PIECE_BYTES + TAG_BYTES))
        self._unopened = memoryview(bytearray(PIECE_BYTES + TAG_BYTES))

    def close(self) -> None:
        """Close the connection; a blocked send or receive then raises OSError, Closed or FrameRejected."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    # -- sending ------------------------------------------------------------------------------------

    def writer(self, frame: Frame, source: PayloadSource | None = None) -> FrameWriter:
        """A writer of ``frame``. source: replaces the frame's own source."""
        return FrameWriter(self._socket, self._pieces(frame, source or frame.source))

    def _pieces(self, frame: Frame, source: PayloadSource | None) -> Iterator[list[Any]]:
        """The buffers to write, piece by piece; each must be written before the next is generated."""
        meta = json.dumps(frame.meta, separators=(",", ":")).encode() if frame.meta else b""
        address: RegionAddress | None = None
        if self.peer_reads and source is None:  # a payload that is still being copied is always sent
            address = getattr(frame.payload, "address", None)
        header = _HEADER.pack(
            _MAGIC,
            frame.kind,
            _SHARED if address else 0,
            self._origin.run,
            self._origin.epoch,
            frame.channel,
            frame.number,
            frame.version,
            frame.note,
            len(meta),
            frame.length,
        )
        # sent together with the first piece of the vector, so that the receiver wakes up only once for both
        buffers = self._sealed(header) + (self._sealed(meta) if meta else [])
        if address is not None:
            buffers += self._sealed(address.pack())
        if not frame.length or address is not None:
            yield buffers
            return
        payload = memoryview(frame.payload).cast("B")
        for start in range(0, len(payload), PIECE_BYTES):
            stop = min(start + PIECE_BYTES, len(payload))
            piece = payload[start:stop] if source is None else source.read(start, stop)
            yield buffers + self._sealed(piece, self._sealed_piece)
            buffers = []
            if source is not None:
                source.copy_up_to(stop)

    def _sealed(self, piece: bytes | memoryview, buffer: memoryview | None = None) -> list[Any]:
        """Buffers with the sealed piece. Those in ``buffer`` must be written before it is used again."""
        if not self._sealer.encrypt:
            return [piece, self._sealer.tag(piece)]
        size = len(piece) + TAG_BYTES
        sealed = bytearray(size) if buffer is None else buffer[:size]
        self._sealer.seal_into(piece, sealed)
        return [sealed]

    # -- receiving ----------------------------------------------------------------------------------

    def receive(self, allocate: Callable[[Frame, int], Any]) -> Frame:
        """Wait for the next frame.

        allocate: (frame without payload, length) -> a writable buffer of that length; raises FrameRejected.
        Raises Closed, FrameRejected or OSError, after which the connection cannot be used any more.
        """
        header = bytearray(_HEADER.size)
        self._receive_piece(memoryview(header), first=True)
        (magic, kind, flags, run, epoch, channel, number, version, note, meta_length, length) = (
            _HEADER.unpack(header)
        )
        if run != self._origin.run:
            raise FrameRejected("run", "a message of another run")
        if epoch != self._origin.epoch:
            raise FrameRejected("epoch", f"a message of epoch {epoch} in epoch {self._origin.epoch}")
        if magic != _MAGIC or kind not in Kind._value2member_map_:
            raise FrameRejected("kind", f"a message of an unknown kind ({kind})")
        if meta_length > META_LIMIT_BYTES:
            raise FrameRejected("length", f"a message whose JSON has {meta_length} bytes")
        frame = Frame(Kind(kind), channel, number, version, note)
        if meta_length:
            meta = bytearray(meta_length)
            self._receive_piece(memoryview(meta))
            frame.meta = _parsed(meta)
        shared = self._shared_payload(length) if flags & _SHARED else None
        if length:
            frame.payload = allocate(frame, length)
            payload = memoryview(frame.payload).cast("B")
            if shared is not None:
                np.copyto(np.frombuffer(payload, dtype=np.uint8), shared)
            else:
                for start in range(0, length, PIECE_BYTES):
                    self._receive_piece(payload[start : start + PIECE_BYTES])
        elif frame.kind is Kind.MAIL or frame.kind is Kind.REGISTER:
            raise FrameRejected("length", "a vector without numbers")
        return frame

    def _shared_payload(self, length: int) -> Bytes:
        """The payload of a frame, in the shared memory of its sender."""
        packed = bytearray(ADDRESS.size)
        self._receive_piece(memoryview(packed))
        address = RegionAddress(*ADDRESS.unpack(packed))
        if self.local_peer is None or address.size_bytes != length:
            raise FrameRejected("meta", "a vector in memory that is not shared with this member")
        try:
            return self.local_peer.region(address)
        except (OSError, ValueError) as problem:
            raise FrameRejected(
                "memory", f"a vector that cannot be read in shared memory ({problem})"
            ) from None

    def _receive_piece(self, piece: memoryview, first: bool = False) -> None:
        """Receive a sealed piece, authenticate it, and write its content into ``piece``."""
        length = len(piece)
        try:
            if self._opener.encrypt:
                sealed = self._unopened[: length + TAG_BYTES]
                read_whole(self._socket, [sealed], first)
                self._opener.open_into(sealed, piece)
            else:
                tag = bytearray(TAG_BYTES)
                read_whole(self._socket, [piece, memoryview(tag)], first)
                self._opener.check(piece, tag)
        except InvalidTag:
            raise FrameRejected("checksum", "a message that was changed on its way") from None


def _parsed(meta: bytearray) -> dict[str, Any]:
    try:
        value = json.loads(meta)
    except (ValueError, RecursionError):
        raise FrameRejected("meta", "a message whose JSON cannot be read") from None
    if not isinstance(value, dict):
        raise FrameRejected("meta", "a message whose JSON is not an object")
    return value


def read_whole(sock: socket.socket, buffers: list[memoryview], first: bool = False) -> None:
    """Fill the buffers, usually in one system call.

    first: whether a frame begins here. Raises Closed if the connection ends before a frame, FrameRejected if
    it ends within one. Raises SilenceTimeout if nothing arrives for too long, or less than a kilobyte a
    second: if bytes of the frame were lost, the peer's heartbeats would slowly be read as the rest of it.
    """
    begun = not first
    while buffers:
        since = time.monotonic()
        try:
            if len(buffers[0]) > _READ_BYTES:
                count = sock.recv_into(buffers[0][:_READ_BYTES], 0, socket.MSG_WAITALL)
            else:
                count = sock.recvmsg_into(buffers, 0, socket.MSG_WAITALL)[0]
        except (BlockingIOError, TimeoutError):
            raise SilenceTimeout("it was silent for too long") from None
        if count == 0:
            if begun:
                raise FrameRejected("truncated", "an incomplete message")
            raise Closed("it was closed")
        begun = True
        _drop(buffers, count)
        seconds = time.monotonic() - since
        if buffers and seconds > 0.5 and count < _TRICKLE_BYTES_PER_SECOND * seconds:
            raise SilenceTimeout("it sent less than a kilobyte a second")


def _drop(buffers: list[memoryview], count: int) -> None:
    """Remove the first ``count`` bytes from the list of buffers."""
    while buffers and count >= len(buffers[0]):
        count -= len(buffers.pop(0))
    if count:
        buffers[0] = buffers[0][count:]
