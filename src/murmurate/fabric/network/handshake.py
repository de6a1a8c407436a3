"""The handshake that authenticates two members to each other before the first frame."""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from murmurate.fabric.network.crypto import (
    TAG_BYTES,
    AeadStream,
    Identity,
    InvalidTag,
    PeerRecord,
)
from murmurate.fabric.network.frames import FrameRejected, Origin, Pipe, read_whole
from murmurate.fabric.network.noise import Noise, message_bytes
from murmurate.fabric.network.shm_peer import ShmOwner, ShmPeer

_HELLO = struct.Struct("<4sB16sQI16s")
_MAGIC = b"MRM3"
_CIPHER_NUMBERS = {"aes-256-gcm": 1, "chacha20-poly1305": 2}
_COUNT = struct.Struct("<Q")  # how many numbered frames of the receiver have arrived at the sender
_ANSWER = struct.Struct("<QIi")  # the same count; pid and descriptor of the sender's shared-memory file
_LOCAL = struct.Struct("<Ii?")  # that pid and descriptor; whether the sender can read the receiver's memory


@dataclass(frozen=True)
class Credentials:
    """What a member needs for every handshake. Members of a run differ only in rank, keys and shared memory.

    run: 16 bytes derived from the run's id. silence_seconds: a connection on which no byte arrives for so
    long is dead. shm: this member's shared memory; None if it is not to have local peers.
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
    def handshake_cipher(self) -> str:
        """The cipher of the handshake, and of the tags of pieces that are not encrypted."""
        return self.cipher if self.encrypt else "aes-256-gcm"

    @property
    def cipher_number(self) -> int:
        """The number of the cipher in messages; 0 without encryption."""
        return _CIPHER_NUMBERS[self.cipher] if self.encrypt else 0


class Hello(NamedTuple):
    """What the dialling side sends first, unencrypted. It is also the prologue of the Noise handshake, whose
    first message authenticates it.
    """

    cipher_number: int
    run: bytes
    epoch: int
    rank: int
    incarnation: bytes

    def pack(self) -> bytes:
        return _HELLO.pack(_MAGIC, *self)

    @staticmethod
    def read(sock: socket.socket, credentials: Credentials) -> Hello:
        """Receive it. Raises FrameRejected unless run, epoch and encryption are ours; OSError or Closed."""
        magic, *fields = _HELLO.unpack(_received(sock, _HELLO.size))
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
    """A finished handshake with member ``rank``. received: how many of our numbered frames the peer has
    received."""

    pipe: Pipe
    rank: int
    incarnation: bytes
    received: int


def dial(credentials: Credentials, record: PeerRecord, received: int, seconds: float) -> Handshake:
    """Connect to a peer that listens. Raises OSError, Closed or FrameRejected.

    received: how many numbered frames of the peer's present incarnation have arrived here. seconds: longest
    time to connect, and then without a byte in the handshake.
    """
    sock = socket.create_connection((record.address, record.port), timeout=seconds)
    try:
        set_timeouts(sock, seconds)
        hello = Hello(
            credentials.cipher_number,
            credentials.run,
            credentials.epoch,
            credentials.rank,
            credentials.identity.incarnation,
        ).pack()
        with _refusing(f"rank {record.rank} does not have its keys, or the run's secret"):
            noise = _noise(credentials, hello, record, initiates=True)
            sock.sendall(hello + noise.write(_COUNT.pack(received)))
            answer = noise.read(_received(sock, message_bytes(_ANSWER.size)))
        peer_received, *peer_memory = _ANSWER.unpack(answer)
        sealer, opener = _streams(credentials, noise)
        local_peer = _local_peer(credentials, peer_memory, record)
        # without this message, the listener could not exclude that the handshake was a replayed one
        _send(sock, sealer, _LOCAL.pack(*_own_memory(credentials), local_peer is not None))
        (peer_reads,) = struct.unpack("?", _read(sock, opener, 1))
        return _finished(sock, credentials, record, peer_received, sealer, opener, local_peer, peer_reads)
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
    """The listener's side of ``dial``, on the accepted ``sock``. Raises the same exceptions, after which the
    caller has to close ``sock``.

    record_of: returns the record of a member, by rank and incarnation, or None. received_of: returns how many
    numbered frames of a member have arrived, by rank.
    """
    set_timeouts(sock, seconds)
    theirs = Hello.read(sock, credentials)
    record = record_of(theirs.rank, theirs.incarnation)
    if record is None:
        raise FrameRejected(
            "key", f"it claims to be rank {theirs.rank}, and is not registered at the rendezvous"
        )
    with _refusing(f"it claims to be rank {theirs.rank}, and does not have its keys, or the run's secret"):
        noise = _noise(credentials, theirs.pack(), record, initiates=False)
        (peer_received,) = _COUNT.unpack(noise.read(_received(sock, message_bytes(_COUNT.size))))
        received = received_of(theirs.rank)
        sock.sendall(noise.write(_ANSWER.pack(received, *_own_memory(credentials))))
    sealer, opener = _streams(credentials, noise)
    *peer_memory, peer_reads = _LOCAL.unpack(_read(sock, opener, _LOCAL.size))
    local_peer = _local_peer(credentials, peer_memory, record)
    _send(sock, sealer, bytes([local_peer is not None]))
    return _finished(sock, credentials, record, peer_received, sealer, opener, local_peer, peer_reads)


@contextlib.contextmanager
def _refusing(sentence: str) -> Iterator[None]:
    try:
        yield
    except (InvalidTag, ValueError):  # ValueError is raised for a public key of small order
        raise FrameRejected("key", sentence) from None


def _noise(credentials: Credentials, hello: bytes, record: PeerRecord, initiates: bool) -> Noise:
    psk = hashlib.blake2b(credentials.secret, digest_size=32, person=b"murmurate noise").digest()
    return Noise(
        initiates, credentials.handshake_cipher, psk, hello, credentials.identity.private, record.key
    )


def _streams(credentials: Credentials, noise: Noise) -> tuple[AeadStream, AeadStream]:
    """(sealer, opener): see ``Pipe``"""
    sealer, opener = (
        AeadStream(key, credentials.encrypt, credentials.handshake_cipher) for key in noise.split()
    )
    return sealer, opener


def _own_memory(credentials: Credentials) -> tuple[int, int]:
    """The pid of our process, and the descriptor of its shared-memory file (-1 if it has none)."""
    return os.getpid(), -1 if credentials.shm is None else credentials.shm.descriptor


def _local_peer(credentials: Credentials, peer_memory: list[int], record: PeerRecord) -> ShmPeer | None:
    """The shared memory of the authenticated peer; None if it cannot be read here."""
    pid, descriptor = peer_memory
    shm = credentials.shm
    return None if shm is None else shm.open_peer(pid, descriptor, record.incarnation)


def _finished(
    sock: socket.socket,
    credentials: Credentials,
    record: PeerRecord,
    peer_received: int,
    sealer: AeadStream,
    opener: AeadStream,
    local_peer: ShmPeer | None,
    peer_reads: bool,
) -> Handshake:
    set_timeouts(sock, credentials.silence_seconds)
    peer_reads = peer_reads and credentials.shm is not None
    pipe = Pipe(sock, credentials.origin, sealer, opener, peer_reads, local_peer)
    return Handshake(pipe, record.rank, record.incarnation, peer_received)


def _send(sock: socket.socket, sealer: AeadStream, text: bytes) -> None:
    sock.sendall(text + sealer.tag(text))


def _read(sock: socket.socket, opener: AeadStream, length: int) -> bytes:
    """Receive and authenticate the first message under the new keys."""
    text = _received(sock, length + TAG_BYTES)
    with _refusing("a message in the handshake was changed on its way, or it does not have the keys"):
        opener.check(text[:length], text[length:])
    return text[:length]


def _received(sock: socket.socket, length: int) -> bytes:
    text = bytearray(length)
    read_whole(sock, [memoryview(text)], first=True)
    return bytes(text)


def set_timeouts(sock: socket.socket, seconds: float) -> None:
    """Make the socket's calls blocking (one system call for each piece), with a timeout of ``seconds``
    without a byte."""
    sock.setblocking(True)
    limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def may_listen(record: PeerRecord, seconds: float) -> bool:
    """Whether a process may listen at the record's address; False if its host says that none does."""
    try:
        socket.create_connection((record.address, record.port), timeout=seconds).close()
    except OSError as problem:
        return not isinstance(problem, ConnectionRefusedError)
    return True
