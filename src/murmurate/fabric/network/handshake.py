"""How two members make sure of each other before the first frame."""

from __future__ import annotations

import hashlib
import os
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from murmurate.fabric.network.crypto import (
    TAG_BYTES,
    AeadStream,
    Identity,
    InvalidTag,
    PeerRecord,
    connection_keys,
)
from murmurate.fabric.network.frames import Closed, Origin, Pipe, Refused, read_whole
from murmurate.fabric.network.shm_peer import ShmOwner, ShmPeer

_HELLO = struct.Struct("<4sB16sQI16s32sQ")
_MAGIC = b"MRM2"
_CIPHER_NUMBERS = {"aes-256-gcm": 1, "chacha20-poly1305": 2}
_PROOF_BYTES = 32
_HOME = struct.Struct("<Ii")  # a process, and the descriptor of the file that it is known by


@dataclass(frozen=True)
class Credentials:
    """What a member says of itself to each peer; all members of a run have the same but rank and keys.

    run: 16 bytes made from the run's id. silence_seconds: a connection that long without a byte is dead.
    """

    rank: int
    run: bytes
    epoch: int
    secret: bytes
    identity: Identity
    encrypt: bool
    cipher: str
    silence_seconds: float
    lender: ShmOwner | None = None  # None: has no neighbours

    @property
    def origin(self) -> Origin:
        return Origin(self.run[:8], self.epoch)

    @property
    def setting(self) -> int:
        return _CIPHER_NUMBERS[self.cipher] if self.encrypt else 0


@dataclass(frozen=True)
class Hello:
    """The first thing said, in clear; what it claims is believed once the keys made from it fit."""

    setting: int
    run: bytes
    epoch: int
    rank: int
    incarnation: bytes
    fresh: bytes
    received: int

    def pack(self) -> bytes:
        return _HELLO.pack(
            _MAGIC,
            self.setting,
            self.run,
            self.epoch,
            self.rank,
            self.incarnation,
            self.fresh,
            self.received,
        )

    @staticmethod
    def read(line: socket.socket, credentials: Credentials) -> Hello:
        text = bytearray(_HELLO.size)
        read_whole(line, [memoryview(text)], first=True)
        magic, *fields = _HELLO.unpack(text)
        hello = Hello(*fields)
        if magic != _MAGIC:
            raise Refused("handshake", "it does not speak as a member does")
        if hello.run != credentials.run:
            raise Refused("run", "a connection of another run")
        if hello.epoch != credentials.epoch:
            raise Refused("epoch", f"a connection of epoch {hello.epoch} in epoch {credentials.epoch}")
        if hello.setting != credentials.setting:
            raise Refused("handshake", "it was started with another encryption: use the same for all members")
        return hello


@dataclass(frozen=True)
class Handshake:
    """A finished handshake. received: how many numbered frames the peer has had of this incarnation."""

    pipe: Pipe
    rank: int
    incarnation: bytes
    received: int


def dial(credentials: Credentials, card: PeerRecord, received: int, seconds: float) -> Handshake:
    """Connect to a peer that listens. Raises OSError, Closed or Refused.

    received: how many numbered frames of this peer's incarnation we have.
    """
    line = socket.create_connection((card.address, card.port), timeout=seconds)
    try:
        prepare(line, seconds)
        fresh = X25519PrivateKey.generate()
        ours = _hello(credentials, fresh, received)
        line.sendall(ours.pack())
        theirs = Hello.read(line, credentials)
        if theirs.rank != card.rank or theirs.incarnation != card.incarnation:
            raise Refused("key", f"rank {theirs.rank} answers at the address of rank {card.rank}")
        return _agree(line, credentials, card, fresh, ours, theirs, dials=True)
    except BaseException:
        line.close()
        raise


def answer(
    credentials: Credentials,
    line: socket.socket,
    card_of: Callable[[int, bytes], PeerRecord | None],
    received_of: Callable[[int, bytes], int],
    seconds: float,
) -> Handshake:
    """The listener's side. card_of, received_of: by rank and incarnation. Raises as ``dial``."""
    prepare(line, seconds)
    theirs = Hello.read(line, credentials)
    card = card_of(theirs.rank, theirs.incarnation)
    if card is None:
        raise Refused("key", f"somebody who calls itself rank {theirs.rank} and is not at the rendezvous")
    fresh = X25519PrivateKey.generate()
    ours = _hello(credentials, fresh, received_of(theirs.rank, theirs.incarnation))
    line.sendall(ours.pack())
    return _agree(line, credentials, card, fresh, ours, theirs, dials=False)


def _hello(credentials: Credentials, fresh: X25519PrivateKey, received: int) -> Hello:
    return Hello(
        credentials.setting,
        credentials.run,
        credentials.epoch,
        credentials.rank,
        credentials.identity.incarnation,
        fresh.public_key().public_bytes_raw(),
        received,
    )


def _agree(
    line: socket.socket,
    credentials: Credentials,
    card: PeerRecord,
    fresh: X25519PrivateKey,
    ours: Hello,
    theirs: Hello,
    dials: bool,
) -> Handshake:
    """Make the keys, and have each side prove that it has them."""
    said = [ours.pack(), theirs.pack()]
    context = b"".join(said if dials else reversed(said))
    try:
        keys = connection_keys(
            credentials.identity.private, fresh, card.key, theirs.fresh, context, credentials.secret, dials
        )
    except ValueError:
        raise Refused("key", "a public key that is none") from None
    sends, receives = (AeadStream(key, credentials.encrypt, credentials.cipher) for key in keys)
    proof = hashlib.sha256(context).digest()
    line.sendall(proof + sends.tag(proof))
    shown = bytearray(_PROOF_BYTES + TAG_BYTES)
    try:
        read_whole(line, [memoryview(shown)], first=True)
    except Closed:
        raise Refused("key", f"rank {card.rank} did not take our proof, or gave none") from None
    try:
        receives.check(memoryview(shown)[:_PROOF_BYTES], memoryview(shown)[_PROOF_BYTES:])
    except InvalidTag:
        raise Refused("key", f"somebody who calls itself rank {theirs.rank} without its keys") from None
    if bytes(shown[:_PROOF_BYTES]) != proof:
        raise Refused("key", f"rank {theirs.rank} proved another exchange than this one")
    neighbour, lends = _look_around(line, credentials, theirs.incarnation, sends, receives)
    prepare(line, credentials.silence_seconds)
    pipe = Pipe(line, credentials.origin, sends, receives, lends, neighbour)
    return Handshake(pipe, theirs.rank, theirs.incarnation, theirs.received)


def _look_around(
    line: socket.socket, credentials: Credentials, incarnation: bytes, sends: AeadStream, receives: AeadStream
) -> tuple[ShmPeer | None, bool]:
    """(the peer, if its memory can be read here, whether it can read ours). The peer has proved who it is."""
    lender = credentials.lender
    home = _HOME.pack(os.getpid(), -1 if lender is None else lender.descriptor)
    pid, descriptor = _HOME.unpack(_exchange(line, home, sends, receives))
    neighbour = None if lender is None else lender.neighbour(pid, descriptor, incarnation)
    reads = _exchange(line, bytes([neighbour is not None]), sends, receives)
    return neighbour, lender is not None and reads == b"\1"


def _exchange(line: socket.socket, words: bytes, sends: AeadStream, receives: AeadStream) -> bytes:
    """What the peer says at the same moment, of the same length."""
    line.sendall(words + sends.tag(words))
    heard = bytearray(len(words) + TAG_BYTES)
    read_whole(line, [memoryview(heard)], first=True)
    try:
        receives.check(memoryview(heard)[: len(words)], memoryview(heard)[len(words) :])
    except InvalidTag:
        raise Refused("key", "a member that lost its keys in the middle of a handshake") from None
    return bytes(heard[: len(words)])


def prepare(line: socket.socket, seconds: float) -> None:
    """Blocking calls (one system call a piece) that give up after ``seconds`` without a byte."""
    line.setblocking(True)
    limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def listens(card: PeerRecord, seconds: float) -> bool | None:
    """Whether somebody listens there: True, False (its host says no), None (no answer)."""
    end = time.monotonic() + seconds
    try:
        socket.create_connection((card.address, card.port), timeout=max(end - time.monotonic(), 0.01)).close()
    except ConnectionRefusedError:
        return False
    except OSError:
        return None
    return True
