"""The interface between strategies and fabrics: four small protocols, two kinds of message.

*State* (a register) is newest-wins and never blocks; each *delta* (mail) is delivered once. Every wait has a
deadline, and every deadline an outcome that the caller chooses. With a dead peer, values become stale, and no
call hangs.
"""

from __future__ import annotations

import contextlib
import enum
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor


class Capability(enum.Enum):
    """A protocol that a strategy needs, or a fabric offers."""

    COLLECTIVE = "collective"
    MAIL = "mail"
    REGISTER = "register"
    SHARED_MEMORY = "shared memory"


@dataclass
class Traffic:
    """Counts of one channel at this member: bytes copied in and out, seconds spent waiting, and messages
    refused because their sender or receiver had restarted since."""

    bytes: int = 0
    waiting_seconds: float = 0.0
    refused: int = 0

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """Count the time spent within as waiting."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.waiting_seconds += time.monotonic() - start


class Message(NamedTuple):
    """A delta that arrived.

    sender: its rank. x: [N], or fewer if fewer were sent; the receiver may keep it. note: a number sent with
    it: the version that a delta was made from, a push-sum weight, a round. Integers up to 2**53 are exact.
    """

    sender: int
    x: Tensor
    note: float = 0.0


class FabricError(RuntimeError):
    """Communication between members failed; the message names the member and the remedy."""


def ranks_within(rank: int, parts: int) -> range:
    """The ranks of the parts of ``rank``'s replica.

    A replica that spans several members has ``parts`` of them, with rank = replica * parts + part.
    """
    first = rank - rank % parts
    return range(first, first + parts)


def ranks_across(rank: int, parts: int, size: int) -> range:
    """The ranks of the same part as ``rank``'s, in each of the size / parts replicas."""
    return range(rank % parts, size, parts)


def checked_group(members: Sequence[int] | None, rank: int, size: int) -> tuple[int, ...]:
    """The ranks that share a channel of ``rank``, in a fabric of ``size``; None stands for all.

    Raises ValueError for ranks that do not exist, are not ascending, or do not include ``rank``.
    """
    group = tuple(range(size)) if members is None else tuple(members)
    if list(group) != sorted(set(group)) or not set(group) <= set(range(size)):
        raise ValueError(f"{list(group)} is no group: give ascending ranks of 0..{size - 1}, each once.")
    if rank not in group:
        raise ValueError(f"Rank {rank} is not in the group {list(group)}: only its members make the channel.")
    return group


def checked_rank(rank: int, size: int) -> int:
    """``rank`` itself; raises ValueError if it is not a rank among ``size``."""
    if not 0 <= rank < size:
        raise ValueError(f"There is no rank {rank} among {size}: use 0..{size - 1}.")
    return rank


def check_shape(channel: str, shape: Sequence[int], x: Tensor) -> None:
    """Raises ValueError for a vector of another shape than the channel's."""
    if x.shape != tuple(shape):
        raise ValueError(
            f"Channel '{channel}' is for {list(shape)}, this is {list(x.shape)}. Make another channel "
            "for it: fabric.channel(name, like); a script's mean and gather take any shape."
        )


class Members(Protocol):
    """The members: own rank, number at the start, and which are alive now."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def living(self) -> Sequence[int]:
        """Ranks not known to be dead, ascending; always contains ``rank``."""
        ...


@runtime_checkable
class Collective(Protocol):
    """Matched calls by all living members. A dead member is left out, and means are over the rest."""

    def mean_(self, x: Tensor) -> int:
        """Replace ``x`` [N] by its mean over the living members; return how many took part.

        The same bits on every member, and the identity with one. Raises ``FabricError`` naming the silent
        members when a living one does not take part before the deadline.
        """
        ...

    def broadcast_(self, x: Tensor, root: int) -> None:
        """Replace ``x`` [N] on every member by that of ``root``."""
        ...

    def gather(self, x: Tensor) -> dict[int, Tensor]:
        """Each contributor's copy of ``x`` [N], by rank."""
        ...


@runtime_checkable
class Mail(Protocol):
    """Deltas: each message once, in the order sent by its sender, bounded queues."""

    def send(
        self, to: int, tag: str, x: Tensor, note: float = 0.0, deadline_seconds: float | None = None
    ) -> bool:
        """Queue a copy of ``x`` [n], n <= N; False if the queue stayed full up to the deadline or ``to`` is
        dead.

        A message of fewer than N numbers is never compressed. Without a deadline the fabric's own applies; 0
        never waits.
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
    """State: one slot for each publisher; the newest version wins, no call blocks, no vector is torn."""

    def publish(self, x: Tensor) -> int:
        """Show peers a copy of ``x`` [N] from now on; return its version (from 1 up)."""
        ...

    def version(self, peer: int) -> int:
        """The newest version ``peer`` has published; 0 before its first."""
        ...

    def peek(self, peer: int) -> tuple[Tensor, int]:
        """(newest vector of ``peer``, its version), without a copy.

        The tensor must not be written to, and stays unchanged until this member's next ``peek`` of the same
        peer. Raises ``FabricError`` if the peer has published nothing yet.
        """
        ...

    def wait_newer(self, peers: Sequence[int], seen: Sequence[int], deadline_seconds: float) -> bool:
        """Wait until all living ``peers`` have versions above those ``seen``; False at the deadline."""
        ...


@runtime_checkable
class SharedMemory(Protocol):
    """Memory that all members, on one host, read and write without locks."""

    def shared(self, key: str, like: Tensor) -> Tensor:
        """A tensor shaped like ``like`` that all members share.

        It starts with the values of the lowest living rank's ``like``; the others wait for that rank's call.
        """
        ...


class Channel(Members, Collective, Mail, Register, SharedMemory, Protocol):
    """One channel of a fabric, through which the strategies of one replicated vector communicate.

    All ranks in a channel's interface are positions among its members, from 0 to ``size - 1``, whether these
    are all members of the fabric or a group: a strategy need not know.

    ``capabilities``: which of the four protocols work here; the methods of the others raise ``FabricError``.
    The start of a run compares them with ``Strategy.needs``, so a strategy never has to.
    """

    @property
    def capabilities(self) -> frozenset[Capability]: ...
    @property
    def traffic(self) -> Traffic: ...
    def has_lost(self, rank: int) -> bool:
        """Whether ``rank`` is dead, or out of reach for longer than any deadline.

        A member whose connection is cut is not in ``living``, but messages sent to it will still arrive.
        """
        ...


class Fabric(Members, Protocol):
    """One member's view of a fabric; makes one channel for each replicated vector."""

    @property
    def capabilities(self) -> frozenset[Capability]: ...
    def channel(self, name: str, like: Tensor, members: Sequence[int] | None = None) -> Channel:
        """A channel for vectors shaped like ``like`` [N], among all members or a group of them.

        members: the group's ranks in this fabric, ascending; None for all. Only they make the channel, at any
            time; its ``rank`` and ``size`` are the position in the group and the size of the group. Channels
            of different groups may have the same name.
        All members make the channels of the whole fabric in the same order.
        Raises ValueError for a group without the caller, or with ranks that do not exist.
        """
        ...
