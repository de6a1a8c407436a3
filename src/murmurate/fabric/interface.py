"""The interface between strategies and fabrics: four small protocols, for two kinds of data.

*State* is read from registers: only the newest version of a vector counts, and no call blocks. *Deltas* are
sent as mail: each is delivered once. Every wait has a deadline, and the caller decides what to do when it has
passed. When a peer dies, the values read from it become stale, but no call hangs.
"""

from __future__ import annotations

import contextlib
import enum
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

MOST_TAG_BYTES = 63  # of mail


class Capability(enum.Enum):
    """A protocol that a strategy needs, or a fabric offers."""

    COLLECTIVE = "collective"
    MAIL = "mail"
    REGISTER = "register"
    SHARED_MEMORY = "shared memory"


BETWEEN_HOSTS = frozenset(Capability) - {Capability.SHARED_MEMORY}  # what members on several hosts can have


@dataclass
class Traffic:
    """Counts of one channel at this member: bytes copied in and out, seconds spent waiting, and messages
    refused because their sender or receiver has restarted since they were sent."""

    bytes: int = 0
    waiting_seconds: float = 0.0
    refused: int = 0

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """Count the time spent in the ``with`` block as waiting."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.waiting_seconds += time.monotonic() - start


class Message(NamedTuple):
    """A delta that arrived.

    sender: the sender's rank. x: [N], or shorter if fewer numbers were sent; the receiver may keep it. note:
    a number sent along (the version from which a delta was made, a push-sum weight, a round); integers up to
    2**53 are exact.
    """

    sender: int
    x: Tensor
    note: float = 0.0


# the end of a message about members that missed a deadline
STILL_ALIVE = (
    "They are alive but do not answer: they hang, do something else for longer (a script in which one "
    "replica evaluates alone may give murmurate.run a larger deadline_seconds), or have left their loop "
    "while others go on. Look at their logs or output."
)


class FabricError(RuntimeError):
    """Communication between members failed; the message names the member and the remedy."""


def ranks_within(rank: int, parts: int) -> range:
    """The ranks of the members that form ``rank``'s replica.

    A replica may be split into ``parts``, each a member, with rank = replica * parts + part.
    """
    first = rank - rank % parts
    return range(first, first + parts)


def ranks_across(rank: int, parts: int, size: int) -> range:
    """The ranks that hold the same part as ``rank``, one in each of the size / parts replicas."""
    return range(rank % parts, size, parts)


def checked_group(members: Sequence[int] | None, rank: int, size: int) -> tuple[int, ...]:
    """The ranks of a group of ``members`` that ``rank`` is to be in, on a fabric of ``size``; None means all.

    Raises ValueError for ranks that do not exist, are not ascending, or do not include ``rank``.
    """
    group = tuple(range(size)) if members is None else tuple(members)
    if list(group) != sorted(set(group)) or not set(group) <= set(range(size)):
        raise ValueError(f"{list(group)} is no group: give ascending ranks of 0..{size - 1}, each once.")
    if rank not in group:
        raise ValueError(f"Rank {rank} is not in the group {list(group)}: only its members make the channel.")
    return group


def checked_rank(rank: int, size: int) -> int:
    """``rank`` itself; raises ValueError if it is not a rank of a fabric of ``size``."""
    if not 0 <= rank < size:
        raise ValueError(f"There is no rank {rank} among {size}: use 0..{size - 1}.")
    return rank


def check_shape(channel: str, shape: Sequence[int], x: Tensor) -> None:
    """Raises ValueError if the vector's shape is not the channel's."""
    if x.shape != tuple(shape):
        raise ValueError(
            f"Channel '{channel}' is for {list(shape)}, this is {list(x.shape)}. Make another channel "
            "for it: fabric.channel(name, like); a script's mean and gather take any shape."
        )


def check_message(x: Tensor, count: int, dtype: torch.dtype) -> None:
    """Raise ValueError for a message that does not fit a channel for ``count`` numbers of ``dtype``."""
    if not 0 < x.numel() <= count:
        raise ValueError(f"a message has 1 to {count} numbers, this one {x.numel()}")
    if x.numel() < count and x.dtype != dtype:
        raise ValueError(
            f"a short message is not converted: it must be {dtype}, as its channel; this one is {x.dtype}"
        )


def encoded_tag(tag: str) -> bytes:
    """A message's tag in UTF-8. Raises ValueError if it is longer than ``MOST_TAG_BYTES``."""
    encoded = tag.encode()
    if len(encoded) > MOST_TAG_BYTES:
        raise ValueError(f"a tag has at most {MOST_TAG_BYTES} bytes, '{tag}' has {len(encoded)}")
    return encoded


class Members(Protocol):
    """The members: this one's rank, their number at the start, and which are alive now."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def living(self) -> Sequence[int]:
        """Ranks not known to be dead, ascending; always contains ``rank``."""
        ...


@runtime_checkable
class Collective(Protocol):
    """Collectives, which all living members call in the same order.

    All raise ``FabricError``, naming the silent members, if a living one does not take part before the
    deadline (which a fabric may renew while that member shows that it works).
    """

    def mean_(self, x: Tensor) -> int:
        """Replace ``x`` [N] by its mean over the living members; return how many took part.

        The result is bitwise the same on every member; with one member, ``x`` stays as it is.
        """
        ...

    def broadcast_(self, x: Tensor, root: int) -> None:
        """Replace ``x`` [N] on every member by the ``x`` of rank ``root``; also raises ``FabricError`` if
        ``root`` has died."""
        ...

    def gather(self, x: Tensor) -> dict[int, Tensor]:
        """A copy of the ``x`` [N] of each member that takes part, by rank."""
        ...


@runtime_checkable
class Mail(Protocol):
    """Deltas: bounded queues. Each message is delivered once, and those of one sender in the order sent."""

    def send(
        self, to: int, tag: str, x: Tensor, note: float = 0.0, deadline_seconds: float | None = None
    ) -> bool:
        """Queue a copy of ``x`` [n], 0 < n <= N; False if the queue stayed full up to the deadline or ``to``
        is dead.

        A message of fewer than N numbers is never compressed, and has the channel's dtype. With None as
        deadline, the fabric's default applies; with 0, the call never waits. Raises ValueError for another
        message, and for a tag of more than 63 bytes.
        """
        ...

    def receive(self, tag: str) -> Message | None:
        """The next message under ``tag``, or None; never waits."""
        ...

    def wait(self, tag: str, deadline_seconds: float) -> Message | None:
        """As ``receive``, but waits up to the deadline."""
        ...


@runtime_checkable
class Register(Protocol):
    """State: one vector for each publisher, of which readers get the newest version, always a whole one;
    neither publishing nor reading blocks."""

    def publish(self, x: Tensor) -> int:
        """Let peers read a copy of ``x`` [N] from now on; return its version (from 1 up)."""
        ...

    def version(self, peer: int) -> int:
        """The number of the newest version that ``peer`` has published; 0 before the first."""
        ...

    def peek(self, peer: int) -> tuple[Tensor, int]:
        """(newest vector of ``peer``, its version), without a copy.

        The tensor must not be written to, and stays unchanged until this member's next ``peek`` of the same
        peer. Raises ``FabricError`` if the peer has published nothing yet.
        """
        ...

    def wait_newer(self, peers: Sequence[int], seen: Sequence[int], deadline_seconds: float) -> bool:
        """Wait until the version of each peer is above the one in ``seen``; False at the deadline. Peers
        that are dead, unreachable or at their end are not waited for."""
        ...


@runtime_checkable
class SharedMemory(Protocol):
    """Memory that all members, on one host, read and write without locks."""

    def shared(self, key: str, like: Tensor) -> Tensor:
        """A tensor shaped like ``like`` that all members share.

        It begins with the values of ``like`` of the lowest living rank, for whose call the others wait;
        raises ``FabricError`` at the deadline.
        """
        ...


class Channel(Members, Collective, Mail, Register, SharedMemory, Protocol):
    """One channel of a fabric, through which the strategies of one replicated vector communicate.

    All ranks in a channel's interface are positions among its members, from 0 to ``size - 1``, so a strategy
    need not know whether these are all members of the fabric or a group.

    A vector of another shape raises ValueError.

    ``capabilities``: which of the four protocols work here; the methods of the others raise ``FabricError``.
    They are compared with ``Strategy.needs`` when a run starts, so strategies need not check them.
    """

    @property
    def capabilities(self) -> frozenset[Capability]: ...
    @property
    def traffic(self) -> Traffic: ...
    def has_lost(self, rank: int) -> bool:
        """Whether ``rank`` is dead, or has been out of reach for longer than the deadline.

        A member whose connection is interrupted is not in ``living``, but is not lost: messages sent to it
        will still arrive.
        """
        ...


class Fabric(Members, Protocol):
    """One member's view of a fabric, on which it makes one channel for each replicated vector."""

    @property
    def capabilities(self) -> frozenset[Capability]: ...
    def channel(self, name: str, like: Tensor, members: Sequence[int] | None = None) -> Channel:
        """A channel for vectors shaped like ``like`` [N], among all members or a group of them.

        members: the group's ranks in this fabric, ascending; None for all. Only the group's members make the
            channel; its ``rank`` and ``size`` are the position in the group and the size of the group.
            Channels of different groups may have the same name.
        Each member must make the channels among all members in the same order; those of groups, in any order.
        Raises ValueError for a group without the caller, or with ranks that do not exist. Between processes
        it raises ``FabricError`` for a second channel of the same name and group.
        """
        ...
