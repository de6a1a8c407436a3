"""Frames on a connection: a head, a little JSON and a vector, cut into sealed pieces.

Nothing of a frame is believed before its piece has opened, and no memory is taken before somebody has
agreed to the length that its head names.
"""

from __future__ import annotations

import contextlib
import enum
import json
import socket
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from murmurate.buffers import Bytes
from murmurate.fabric.network.crypto import TAG_BYTES, AeadStream, InvalidTag
from murmurate.fabric.network.shm_peer import PLACE, Place, ShmPeer

PIECE_BYTES = 1 << 20  # large enough that Python's part is small, small enough to stay in a core's cache
META_LIMIT_BYTES = 1 << 18
_LENT = 1  # a frame whose payload is not sent, but read in its sender's memory
_READ_BYTES = 1 << 18  # at a time: the kernel's pages come back to the sender while they are in the cache
_MAGIC = b"mu"
_HEAD = struct.Struct("<2sBB8sQ8sQQdIQ")


class Kind(enum.IntEnum):
    """What a frame carries."""

    CONTROL = 1  # newest values of small things: acknowledgements, requests, heartbeats
    REGISTER = 2  # a version of a published vector
    MAIL = 3
    ROUND = 4  # a part of a collective, or its result
    FINISHED = 5  # the sender will take no further part, but answers still


NUMBERED = frozenset({Kind.MAIL, Kind.ROUND, Kind.FINISHED})


class Refused(Exception):
    """A message or a connection that is not taken; ``cause`` is what it is counted under."""

    def __init__(self, cause: str, words: str) -> None:
        super().__init__(words)
        self.cause = cause


class Closed(Exception):
    """The other side ended the connection between two frames, or kept silent for too long."""


class Silence(Closed):
    """Not a byte came for as long as a connection may be silent."""


class Source(Protocol):
    """Where a payload is read before it has been copied (see ``compression.Filling``)."""

    def read(self, start: int, stop: int) -> memoryview: ...
    def upto(self, stop: int) -> None: ...


@dataclass
class Frame:
    """number: in the stream of numbered frames, 0 for others. version: of a register, a round's number.

    payload: anything with a buffer of ``length`` bytes.
    """

    kind: Kind
    channel: bytes = b"\0" * 8
    number: int = 0
    version: int = 0
    note: float = 0.0
    meta: dict[str, Any] = field(default_factory=dict)
    payload: Any = None
    source: Source | None = field(default=None, compare=False, repr=False)  # of a payload not all there yet

    @property
    def length(self) -> int:
        return 0 if self.payload is None else memoryview(self.payload).nbytes


@dataclass(frozen=True)
class Origin:
    """Which run and which epoch of it a connection belongs to; written into every head."""

    run: bytes
    epoch: int


class Sending:
    """A frame on its way. It may stop where the line is full, and go on in another thread."""

    def __init__(self, line: socket.socket, pieces: Iterator[list[Any]]) -> None:
        self._line, self._pieces = line, pieces
        self._left: list[memoryview] = []

    def go(self, wait: bool = True) -> bool:
        """Write on. wait: for room on the line; else False when there is none. Raises OSError."""
        flags = 0 if wait else socket.MSG_DONTWAIT
        while True:
            while self._left:
                try:
                    _drop(self._left, self._line.sendmsg(self._left, [], flags))
                except BlockingIOError:
                    if wait:
                        raise
                    # what they show may change before somebody goes on
                    self._left = [memoryview(bytes(part)) for part in self._left]
                    return False
            parts = next(self._pieces, None)
            if parts is None:
                return True
            self._left = [memoryview(part) for part in parts]


class Pipe:
    """One connection after its handshake. One thread sends, one receives.

    lends: the peer reads payloads that lie in shared memory by itself. neighbour: we read the peer's.
    """

    def __init__(
        self,
        line: socket.socket,
        origin: Origin,
        sends: AeadStream,
        receives: AeadStream,
        lends: bool = False,
        neighbour: ShmPeer | None = None,
    ) -> None:
        self._line, self._origin = line, origin
        self._sends, self._receives = sends, receives
        self.lends, self.neighbour = lends, neighbour
        self._sealed = memoryview(bytearray(PIECE_BYTES + TAG_BYTES))
        self._unopened = memoryview(bytearray(PIECE_BYTES + TAG_BYTES))

    def close(self) -> None:
        """Wakes whoever sends or receives; they see an OSError or Closed."""
        with contextlib.suppress(OSError):
            self._line.shutdown(socket.SHUT_RDWR)
        self._line.close()

    # -- out ----------------------------------------------------------------------------------------

    def send(self, frame: Frame, origin: Origin | None = None, length: int | None = None) -> None:
        """``origin`` and ``length`` other than the true ones are for tests. Raises OSError."""
        Sending(self._line, self._pieces(frame, frame.source, origin, length)).go()

    def sending(self, frame: Frame, source: Source | None = None) -> Sending:
        """``source``: of the payload, instead of the frame's own."""
        return Sending(self._line, self._pieces(frame, source or frame.source))

    def _pieces(
        self,
        frame: Frame,
        source: Source | None,
        origin: Origin | None = None,
        length: int | None = None,
    ) -> Iterator[list[Any]]:
        """What to write, piece after piece; each is to be written before the next is asked for."""
        meta = json.dumps(frame.meta, separators=(",", ":")).encode() if frame.meta else b""
        where = origin or self._origin
        # what is still being copied is sent behind the copy
        lent: Place | None = getattr(frame.payload, "place", None) if self.lends and source is None else None
        head = _HEAD.pack(
            _MAGIC,
            frame.kind,
            _LENT if lent else 0,
            where.run,
            where.epoch,
            frame.channel,
            frame.number,
            frame.version,
            frame.note,
            len(meta),
            frame.length if length is None else length,
        )
        # what comes before the vector goes with its first piece: one wake-up less at the other end
        parts = self._sealed_copy(head) + (self._sealed_copy(meta) if meta else [])
        if lent is not None:
            parts += self._sealed_copy(lent.pack())
        if not frame.length or lent is not None:
            yield parts
            return
        payload = memoryview(frame.payload).cast("B")
        for start in range(0, len(payload), PIECE_BYTES):
            stop = min(start + PIECE_BYTES, len(payload))
            piece = payload[start:stop] if source is None else source.read(start, stop)
            yield parts + self._sealed_in_place(piece)
            parts = []
            if source is not None:
                source.upto(stop)

    def _sealed_copy(self, words: bytes) -> list[Any]:
        if not self._sends.encrypt:
            return [words, self._sends.tag(words)]
        sealed = bytearray(len(words) + TAG_BYTES)
        self._sends.close_into(words, sealed)
        return [sealed]

    def _sealed_in_place(self, piece: memoryview) -> list[Any]:
        """To be written before the next piece is sealed."""
        if not self._sends.encrypt:
            return [piece, self._sends.tag(piece)]
        sealed = self._sealed[: len(piece) + TAG_BYTES]
        self._sends.close_into(piece, sealed)
        return [sealed]

    # -- in -----------------------------------------------------------------------------------------

    def receive(self, room: Callable[[Frame, int], Any]) -> Frame:
        """The next frame.

        room: (frame without payload, length) -> a writable buffer of that length; raises Refused.
        Raises Closed, Refused or OSError; the connection is of no use afterwards.
        """
        head = bytearray(_HEAD.size)
        self._take(memoryview(head), first=True)
        (magic, kind, flags, run, epoch, channel, number, version, note, meta_length, length) = _HEAD.unpack(
            head
        )
        if run != self._origin.run:
            raise Refused("run", "a message of another run")
        if epoch != self._origin.epoch:
            raise Refused("epoch", f"a message of epoch {epoch} in epoch {self._origin.epoch}")
        if magic != _MAGIC or kind not in Kind._value2member_map_:
            raise Refused("kind", f"a message of an unknown kind ({kind})")
        if meta_length > META_LIMIT_BYTES:
            raise Refused("length", f"a message whose JSON has {meta_length} bytes")
        frame = Frame(Kind(kind), channel, number, version, note)
        if meta_length:
            meta = bytearray(meta_length)
            self._take(memoryview(meta))
            frame.meta = _parsed(meta)
        lent = self._lent(length) if flags & _LENT else None
        if length:
            frame.payload = room(frame, length)
            payload = memoryview(frame.payload).cast("B")
            if lent is not None:
                np.copyto(np.frombuffer(payload, dtype=np.uint8), lent)
            else:
                for start in range(0, length, PIECE_BYTES):
                    self._take(payload[start : start + PIECE_BYTES])
        elif frame.kind is Kind.MAIL or frame.kind is Kind.REGISTER:
            raise Refused("length", "a vector without numbers")
        return frame

    def _lent(self, length: int) -> Bytes:
        """Where the payload lies in its sender's memory."""
        text = bytearray(PLACE.size)
        self._take(memoryview(text))
        place = Place(*PLACE.unpack(text))
        if self.neighbour is None or place.size_bytes != length:
            raise Refused("meta", "a vector in memory that we were not lent")
        try:
            return self.neighbour.look(place)
        except (OSError, ValueError) as problem:
            raise Refused("memory", f"a vector that cannot be read where it lies ({problem})") from None

    def _take(self, piece: memoryview, first: bool = False) -> None:
        """Fill ``piece`` with what its sealed form opens to."""
        length = len(piece)
        try:
            if self._receives.encrypt:
                sealed = self._unopened[: length + TAG_BYTES]
                read_whole(self._line, [sealed], first)
                self._receives.open_into(sealed, piece)
            else:
                tag = bytearray(TAG_BYTES)
                read_whole(self._line, [piece, memoryview(tag)], first)
                self._receives.check(piece, tag)
        except InvalidTag:
            raise Refused("checksum", "a message that is not as it was sent") from None


def _parsed(meta: bytearray) -> dict[str, Any]:
    try:
        value = json.loads(meta)
    except (ValueError, RecursionError):
        raise Refused("meta", "a message whose JSON cannot be read") from None
    if not isinstance(value, dict):
        raise Refused("meta", "a message whose JSON is no object")
    return value


def read_whole(line: socket.socket, buffers: list[memoryview], first: bool = False) -> None:
    """Fill the buffers; one system call, as a rule. Raises Closed at an end before the ``first`` byte,
    or at a silence; Refused at an end in the middle."""
    begun = not first
    while buffers:
        try:
            if len(buffers[0]) > _READ_BYTES:
                count = line.recv_into(buffers[0][:_READ_BYTES], 0, socket.MSG_WAITALL)
            else:
                count = line.recvmsg_into(buffers, 0, socket.MSG_WAITALL)[0]
        except (BlockingIOError, TimeoutError):
            raise Silence("it was silent for too long") from None
        if count == 0:
            if begun:
                raise Refused("truncated", "a message that ends in its middle")
            raise Closed("it was closed")
        begun = True
        _drop(buffers, count)


def _drop(buffers: list[memoryview], count: int) -> None:
    """Forget the first ``count`` bytes of the buffers."""
    while buffers and count >= len(buffers[0]):
        count -= len(buffers.pop(0))
    if count:
        buffers[0] = buffers[0][count:]
