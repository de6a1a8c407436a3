"""The handshake that authenticates two members to each other before the first frame."""

from __future__ import annotations

import hashlib
import os
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from murmurate.fabric.network.crypto import (
    TAG_BYTES,
    AeadStream,
    Identity,
    InvalidTag,
    PeerRecord,
    connection_keys,
)
from murmurate.fabric.network.frames import Closed, FrameRejected, Origin, Pipe, read_whole
from murmurate.fabric.network.shm_peer import ShmOwner, ShmPeer

_HELLO = struct.Struct("<4sB16sQI16s32sQ")
_MAGIC = b"MRM2"
_CIPHER_NUMBERS = {"aes-256-gcm": 1, "chacha20-poly1305": 2}
_PROOF_BYTES = 32
_MEMORY = struct.Struct("<Ii")  # a process, and the descriptor of its shared-memory file


@dataclass(frozen=True)
class Credentials:
    """A member's part of every handshake; members of a run differ only in rank, keys and memory.

    run: 16 bytes derived from the run's id. silence_seconds: a connection without a byte for so long is dead.
    shm: this member's shared memory; None if it has no local peers.
    """

    rank: int
    run: bytes
    epoch: int
    secret: bytes
    identity: Identity
    encrypt: bool
    cipher: str
    silence_seconds: float
    shm: ShmOwner | None = None

    @property
    def origin(self) -> Origin:
        return Origin(self.run[:8], self.epoch)

    @property
    def cipher_number(self) -> int:
        """0 without encryption."""
        return _CIPHER_NUMBERS[self.cipher] if self.encrypt else 0


class Hello(NamedTuple):
    """The first message, in clear; its claims are trusted once the keys derived from it are proved.

    received: how many numbered frames of the receiver's incarnation the sender has.
    """

    cipher_number: int
    run: bytes
    epoch: int
    rank: int
    incarnation: bytes
    ephemeral: bytes
    received: int

    def pack(self) -> bytes:
        return _HELLO.pack(_MAGIC, *self)

    @staticmethod
    def read(sock: socket.socket, credentials: Credentials) -> Hello:
        text = bytearray(_HELLO.size)
        read_whole(sock, [memoryview(text)], first=True)
        magic, *fields = _HELLO.unpack(text)
        hello = Hello(*fields)
        if magic != _MAGIC:
            raise FrameRejected("handshake", "it does not follow the protocol of members")
        if hello.run != credentials.run:
            raise FrameRejected("run", "a connection of another run")
        if hello.epoch != credentials.epoch:
            raise FrameRejected("epoch", f"a connection of epoch {hello.epoch} in epoch {credentials.epoch}")
        if hello.cipher_number != credentials.cipher_number:
            raise FrameRejected(
                "handshake", "it was started with another encryption: use the same for all members"
            )
        return hello


@dataclass(frozen=True)
class Handshake:
    """A finished handshake. received: how many of this member's numbered frames the peer has."""

    pipe: Pipe
    rank: int
    incarnation: bytes
    received: int


def dial(credentials: Credentials, record: PeerRecord, received: int, seconds: float) -> Handshake:
    """Connect to a peer that listens. Raises OSError, Closed or FrameRejected.

    received: how many numbered frames of this peer's incarnation we have.
    """
    sock = socket.create_connection((record.address, record.port), timeout=seconds)
    try:
        set_timeouts(sock, seconds)
        ephemeral = X25519PrivateKey.generate()
        ours = _hello(credentials, ephemeral, received)
        sock.sendall(ours.pack())
        theirs = Hello.read(sock, credentials)
        if theirs.rank != record.rank or theirs.incarnation != record.incarnation:
            raise FrameRejected("key", f"rank {theirs.rank} answers at the address of rank {record.rank}")
        return _authenticate(sock, credentials, record, ephemeral, ours, theirs, dials=True)
    except BaseException:
        sock.close()
        raise


def answer(
    credentials: Credentials,
    sock: socket.socket,
    record_of: Callable[[int, bytes], PeerRecord | None],
    received_of: Callable[[int], int],
    seconds: float,
) -> Handshake:
    """The listener's side. record_of: by rank and incarnation. received_of: by rank. Raises as ``dial``."""
    set_timeouts(sock, seconds)
    theirs = Hello.read(sock, credentials)
    record = record_of(theirs.rank, theirs.incarnation)
    if record is None:
        raise FrameRejected(
            "key", f"it claims to be rank {theirs.rank}, and is not registered at the rendezvous"
        )
    ephemeral = X25519PrivateKey.generate()
    ours = _hello(credentials, ephemeral, received_of(theirs.rank))
    sock.sendall(ours.pack())
    return _authenticate(sock, credentials, record, ephemeral, ours, theirs, dials=False)


def _hello(credentials: Credentials, ephemeral: X25519PrivateKey, received: int) -> Hello:
    return Hello(
        credentials.cipher_number,
        credentials.run,
        credentials.epoch,
        credentials.rank,
        credentials.identity.incarnation,
        ephemeral.public_key().public_bytes_raw(),
        received,
    )


def _authenticate(
    sock: socket.socket,
    credentials: Credentials,
    record: PeerRecord,
    ephemeral: X25519PrivateKey,
    ours: Hello,
    theirs: Hello,
    dials: bool,
) -> Handshake:
    """Derive the keys, and have each side prove that it has them."""
    hellos = [ours.pack(), theirs.pack()]
    context = b"".join(hellos if dials else reversed(hellos))
    try:
        keys = connection_keys(
            credentials.identity.private,
            ephemeral,
            record.key,
            theirs.ephemeral,
            context,
            credentials.secret,
            dials,
        )
    except ValueError:
        raise FrameRejected("key", "its public key is invalid") from None
    sends, receives = (AeadStream(key, credentials.encrypt, credentials.cipher) for key in keys)
    proof = hashlib.sha256(context).digest()
    sock.sendall(proof + sends.tag(proof))
    answer = bytearray(_PROOF_BYTES + TAG_BYTES)
    try:
        read_whole(sock, [memoryview(answer)], first=True)
    except Closed:
        raise FrameRejected("key", f"rank {record.rank} did not accept our proof, or sent none") from None
    try:
        receives.check(memoryview(answer)[:_PROOF_BYTES], memoryview(answer)[_PROOF_BYTES:])
    except InvalidTag:
        raise FrameRejected("key", f"it claims to be rank {theirs.rank} and does not have its keys") from None
    if bytes(answer[:_PROOF_BYTES]) != proof:
        raise FrameRejected("key", f"rank {theirs.rank} proved another exchange than this one")
    local_peer, peer_reads = _find_local_peer(sock, credentials, theirs.incarnation, sends, receives)
    set_timeouts(sock, credentials.silence_seconds)
    pipe = Pipe(sock, credentials.origin, sends, receives, peer_reads, local_peer)
    return Handshake(pipe, theirs.rank, theirs.incarnation, theirs.received)


def _find_local_peer(
    sock: socket.socket, credentials: Credentials, incarnation: bytes, sends: AeadStream, receives: AeadStream
) -> tuple[ShmPeer | None, bool]:
    """(the authenticated peer's memory, if it can be read here, whether the peer can read ours)."""
    shm = credentials.shm
    ours = _MEMORY.pack(os.getpid(), -1 if shm is None else shm.descriptor)
    pid, descriptor = _MEMORY.unpack(_exchange(sock, ours, sends, receives))
    local_peer = None if shm is None else shm.open_peer(pid, descriptor, incarnation)
    reads = _exchange(sock, bytes([local_peer is not None]), sends, receives)
    return local_peer, shm is not None and reads == b"\1"


def _exchange(sock: socket.socket, text: bytes, sends: AeadStream, receives: AeadStream) -> bytes:
    """Send ``text``, and receive the peer's of the same length."""
    sock.sendall(text + sends.tag(text))
    received = bytearray(len(text) + TAG_BYTES)
    read_whole(sock, [memoryview(received)], first=True)
    try:
        receives.check(memoryview(received)[: len(text)], memoryview(received)[len(text) :])
    except InvalidTag:
        raise FrameRejected("key", "a message in the handshake was changed on its way") from None
    return bytes(received[: len(text)])


def set_timeouts(sock: socket.socket, seconds: float) -> None:
    """Make calls blocking (one system call a piece), with a timeout of ``seconds`` without a byte."""
    sock.setblocking(True)
    limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def is_listening(record: PeerRecord, seconds: float) -> bool | None:
    """Whether a process listens at that address: True, False (its host says no), None (no answer)."""
    try:
        socket.create_connection((record.address, record.port), timeout=seconds).close()
    except ConnectionRefusedError:
        return False
    except OSError:
        return None
    return True
