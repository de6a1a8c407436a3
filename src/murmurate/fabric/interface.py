"""What strategies may ask of a fabric: four small protocols, two kinds of message.

*State* (a register) is newest-wins and never blocks; a *delta* (mail) is delivered once each. Every
wait has a deadline, and every deadline an outcome that the caller names. A dead peer means "stale",
never "hang".
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
    """What a strategy may need, and a fabric may offer."""

    COLLECTIVE = "collective"
    MAIL = "mail"
    REGISTER = "register"
    SHARED_MEMORY = "shared memory"


@dataclass
class Traffic:
    """What went through a channel at this member: bytes copied in and out, seconds spent waiting, and
    messages of or to a incarnation that is over, which were not taken."""

    bytes: int = 0
    waiting_seconds: float = 0.0
    refused: int = 0

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """Count the time that is spent within as waiting."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.waiting_seconds += time.monotonic() - start


class Message(NamedTuple):
    """One delta as it arrived.

    sender: its rank. x: [N], or as many as were sent; the receiver's to keep. note: a number that travels
    with it: the version that a delta was made from, a push-sum weight, a round. Whole numbers up to 2**53
    arrive exactly.
    """

    sender: int
    x: Tensor
    note: float = 0.0


class FabricError(RuntimeError):
    """Something between replicas went wrong; the message names the culprit and the remedy."""


def ranks_within(rank: int, parts: int) -> range:
    """The ranks of the parts of ``rank``'s replica.

    A replica that spans several members has ``parts`` of them, with rank = replica * parts + part.
    """
    first = rank - rank % parts
    return range(first, first + parts)


def ranks_across(rank: int, parts: int, size: int) -> range:
    """The ranks that hold the same part as ``rank`` does, in each of the size / parts replicas."""
    return range(rank % parts, size, parts)


def checked_group(members: Sequence[int] | None, rank: int, size: int) -> tuple[int, ...]:
    """The ranks of a fabric of ``size`` that share a channel of ``rank``; None stands for all.

    Raises ValueError for ranks that there are not, that are not ascending, or without ``rank``.
    """
    group = tuple(range(size)) if members is None else tuple(members)
    if list(group) != sorted(set(group)) or not set(group) <= set(range(size)):
        raise ValueError(f"{list(group)} is no group: give ascending ranks of 0..{size - 1}, each once.")
    if rank not in group:
        raise ValueError(f"Rank {rank} is not in the group {list(group)}: only its members make the channel.")
    return group


def checked_rank(rank: int, size: int) -> int:
    """Raises ValueError for a rank that no member of a channel of ``size`` has."""
    if not 0 <= rank < size:
        raise ValueError(f"There is no rank {rank} among {size}: use 0..{size - 1}.")
    return rank


def check_shape(channel: str, shape: Sequence[int], x: Tensor) -> None:
    """Raises ValueError for a vector that a channel for ``shape`` does not carry."""
    if x.shape != tuple(shape):
        raise ValueError(
            f"Channel '{channel}' is for {list(shape)}, this is {list(x.shape)}. Make a channel of its own "
            "for it: fabric.channel(name, like); a script's mean and gather take any shape."
        )


class Members(Protocol):
    """Who takes part: rank, size at the start, and who is alive now."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def living(self) -> Sequence[int]:
        """Ranks not known to be dead, ascending; always contains ``rank``."""
        ...


@runtime_checkable
class Collective(Protocol):
    """Matched calls by all living members. A member that dies is left out and the rest re-weighted."""

    def mean_(self, x: Tensor) -> int:
        """Replace ``x`` [N] by its mean over the living; return how many took part.

        Bitwise the same on every member, and the identity with one. Raises ``FabricError`` naming
        the silent members when a living one does not come before the deadline.
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

        A shorter message arrives as it is: it is not compressed, as nobody knows what its numbers are.
        Without a deadline the fabric's own holds; 0 never waits.
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
    """State: one slot a publisher, newest wins, nobody ever waits, nobody ever sees a torn vector."""

    def publish(self, x: Tensor) -> int:
        """Make a copy of ``x`` [N] what peers see from now on; return its version (from 1 up)."""
        ...

    def version(self, peer: int) -> int:
        """The newest version ``peer`` has published; 0 before its first."""
        ...

    def peek(self, peer: int) -> tuple[Tensor, int]:
        """(newest vector of ``peer``, its version), a whole one, without copying.

        The tensor is read-only by contract and stays unchanged until this member's next ``peek`` of
        the same peer. Raises ``FabricError`` if the peer has published nothing yet.
        """
        ...

    def wait_newer(self, peers: Sequence[int], seen: Sequence[int], deadline_seconds: float) -> bool:
        """Wait until every living one of ``peers`` has a version above ``seen``; False at the deadline."""
        ...


@runtime_checkable
class SharedMemory(Protocol):
    """One host: memory that all members see at once, without any locking."""

    def shared(self, key: str, like: Tensor) -> Tensor:
        """A tensor shaped like ``like`` that all members share.

        It starts with the lowest living rank's ``like``; that member must not be the last to call.
        """
        ...


class Channel(Members, Collective, Mail, Register, SharedMemory, Protocol):
    """One channel of a fabric: what one replica's strategy talks through.

    All ranks that go in or out of a channel are positions among its members, from 0 to ``size - 1``: of the
    channel of a group as of one of everybody. So a strategy need not know which of the two it has.

    ``capabilities`` says which of the four protocols really work here; the verbs of the others raise
    ``FabricError``. The start of a run compares it with ``Strategy.needs``, so a strategy never has to.
    """

    @property
    def capabilities(self) -> frozenset[Capability]: ...
    @property
    def traffic(self) -> Traffic: ...
    def has_lost(self, rank: int) -> bool:
        """Whether there is no hope of ``rank``: dead, or out of reach for longer than any deadline.

        A member behind a cut link is not among the living, but what was sent to it will still arrive.
        """
        ...


class Fabric(Protocol):
    """What one member sees of a fabric; makes one channel per replicated vector."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def living(self) -> Sequence[int]: ...
    @property
    def capabilities(self) -> frozenset[Capability]: ...
    def channel(self, name: str, like: Tensor, members: Sequence[int] | None = None) -> Channel:
        """A channel for vectors shaped like ``like`` [N], among all members or a group of them.

        members: the group's ranks in this fabric, ascending; None for everybody. Only they make the channel,
            whenever they like; its ``rank`` and ``size`` are the position in the group and how many these
            are. Channels of different groups may bear one name.
        All members make the channels of everybody in one order.
        Raises ValueError for a group that the caller is not in, or of ranks that there are not.
        """
        ...
