"""Messages between samplers and shards of a replay service on one host. Nothing here needs torch.

A shard listens on an abstract socket, which exists in one network namespace, under a name that cannot be
guessed; it accepts only processes of its own user. A sampler's first message describes its slots and carries
the descriptor of their memory; its further messages request rows, which the shard writes into that memory.
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

_REQUEST, _REPLY = struct.Struct("<IIQIdd"), struct.Struct("<IIQ")
REQUEST_BYTES, REPLY_BYTES = _REQUEST.size, _REPLY.size
MESSAGE_BYTES = max(REQUEST_BYTES, REPLY_BYTES)
_HELLO_BYTES = 1 << 14
_CREDENTIALS = struct.Struct("3i")  # pid, uid and gid of a peer


class DrawRequest(NamedTuple):
    """A request to draw the rows of ``part`` into ``slot``.

    number: number of the slot's draw. error_bits: a bit for each batch of the slot's previous block; if it is
    set, the shard first updates its priorities by the errors of the rows that it drew for that batch. beta,
    alpha: exponents; a negative alpha leaves the shard's alpha unchanged.
    """

    slot: int
    part: int
    number: int
    error_bits: int
    beta: float
    alpha: float

    def pack(self) -> bytes:
        return _REQUEST.pack(*self)

    @staticmethod
    def read(message: bytes) -> DrawRequest:
        return DrawRequest(*_REQUEST.unpack(message))


class DrawReply(NamedTuple):
    """The answer to a ``DrawRequest``: the requested rows have been written."""

    slot: int
    part: int
    number: int

    def pack(self) -> bytes:
        return _REPLY.pack(*self)

    @staticmethod
    def read(message: bytes) -> DrawReply:
        return DrawReply(*_REPLY.unpack(message))


@dataclass(frozen=True)
class ShardAddress:
    """How samplers reach a shard; learners exchange these addresses, which are secret.

    name: name of the shard's socket, for samplers on its host. host, port, key: for samplers on other hosts;
    the port is 0 if there are none.
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
    """Identifies a sampler's slots: rank of its replica, index of the sampler, token of the slots' memory."""

    rank: int
    index: int
    token: str


def new_socket_name() -> str:
    """A name for a shard's socket, which cannot be guessed."""
    return f"murmurate-replay-{secrets.token_hex(16)}"


def listen(name: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind("\0" + name)
    listener.listen(128)
    listener.setblocking(False)
    return listener


def dial(address: ShardAddress, stream: Stream, slots: BatchSlots, descriptor: int) -> socket.socket:
    """Connect to a shard. Raises OSError: ConnectionRefusedError if the shard is not on this host."""
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
    """The slots of a new connection. Raises BlockingIOError before its hello has arrived, and another
    OSError if the sampler has ended, is of another user, or sends anything but a valid hello."""
    peer = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    if _CREDENTIALS.unpack(peer)[1] != os.getuid():
        raise PermissionError("a process of another user")
    message, descriptors, _, _ = socket.recv_fds(link, _HELLO_BYTES, 1)
    if not message or len(descriptors) != 1:
        raise ConnectionError("the sampler ended")
    try:
        return BatchSlots.mapped(descriptors[0], read_hello(message)[1])
    except (ValueError, KeyError, TypeError) as problem:
        raise ConnectionError(f"the sampler does not follow the protocol ({problem})") from None
    finally:
        os.close(descriptors[0])
