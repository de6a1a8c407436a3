"""Messages between samplers and shards of a replay service on one host. Nothing here needs torch.

A shard listens on an abstract socket, which exists in one network namespace, under a name that cannot be
guessed; only processes of its own user are let in. A sampler's first message describes its slots and comes
with the descriptor of their memory; then small messages ask for rows, which the shard writes into that
memory.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import struct
from dataclasses import asdict, dataclass
from typing import NamedTuple

from murmurate.sources.service_slots import BatchSlots, SlotLayout

_ASK, _DONE = struct.Struct("<IIQIdd"), struct.Struct("<IIQ")
ASK_BYTES, DONE_BYTES = _ASK.size, _DONE.size
MESSAGE_BYTES = max(ASK_BYTES, DONE_BYTES)
_HELLO_BYTES = 1 << 14
_CREDENTIALS = struct.Struct("3i")  # of a peer: pid, uid, gid


class Ask(NamedTuple):
    """Draw the rows of ``part`` into ``slot``. has_errors: of the batches whose bit is set, first take the
    errors of the rows that are there, from the former draw of this shard. alpha: negative to keep it."""

    slot: int
    part: int
    number: int
    has_errors: int
    beta: float
    alpha: float

    def pack(self) -> bytes:
        return _ASK.pack(*self)

    @staticmethod
    def read(message: bytes) -> Ask:
        return Ask(*_ASK.unpack(message))


class Done(NamedTuple):
    """The answer: those rows are there."""

    slot: int
    part: int
    number: int

    def pack(self) -> bytes:
        return _DONE.pack(*self)

    @staticmethod
    def read(message: bytes) -> Done:
        return Done(*_DONE.unpack(message))


@dataclass(frozen=True)
class ShardAddress:
    """What a learner tells the others of each of its shards.

    name: of its socket, for the same host. host, port, key: for others; the port is 0 if there are none. All
    of it is secret.
    """

    rank: int
    index: int
    name: str
    host: str = ""
    port: int = 0
    key: str = ""

    def __str__(self) -> str:
        return f"replay shard {self.index} of replica {self.rank}"


@dataclass(frozen=True)
class Stream:
    """The draws of one sampler: its replica's rank, its index, and a token of its slots' memory."""

    rank: int
    index: int
    token: str


def new_name() -> str:
    return f"murmurate-replay-{secrets.token_hex(16)}"


def listen(name: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind("\0" + name)
    listener.listen(128)
    listener.setblocking(False)
    return listener


def dial(address: ShardAddress, stream: Stream, slots: BatchSlots, descriptor: int) -> socket.socket:
    """Raises OSError: ConnectionRefusedError where no such shard is on this host."""
    link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        link.connect("\0" + address.name)
        socket.send_fds(link, [hello(stream, slots.layout)], [descriptor])
    except OSError:
        link.close()
        raise
    link.setblocking(False)
    return link


def hello(stream: Stream, layout: SlotLayout) -> bytes:
    return json.dumps({"stream": asdict(stream), "layout": asdict(layout)}).encode()


def read_hello(message: bytes) -> tuple[Stream, SlotLayout]:
    body = json.loads(message)
    columns = tuple((str(name), int(size)) for name, size in body["layout"].pop("columns"))
    return Stream(**body["stream"]), SlotLayout(**body["layout"], columns=columns)


def accept(link: socket.socket) -> BatchSlots:
    """The slots of a new connection. Raises BlockingIOError before it has greeted, another OSError for a
    process of another user, and one that ends."""
    peer = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    if _CREDENTIALS.unpack(peer)[1] != os.getuid():
        raise PermissionError("a process of another user")
    message, descriptors, _, _ = socket.recv_fds(link, _HELLO_BYTES, 1)
    if not message or len(descriptors) != 1:
        raise ConnectionError("it ended")
    try:
        return BatchSlots.mapped(descriptors[0], read_hello(message)[1])
    except (ValueError, KeyError, TypeError) as problem:
        raise ConnectionError(f"it does not follow the protocol ({problem})") from None
    finally:
        os.close(descriptors[0])
