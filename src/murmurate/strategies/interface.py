"""A strategy is the step: it decides when, where and whether a replica updates (design, section 1)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from murmurate.fabric.interface import Capability, Channel
from murmurate.replica.vector import Exchange, Replica

LAST_CUT = 1 << 40  # the number of the ``settle`` after which a member sends no more


@dataclass(frozen=True)
class MemberEvent:
    """A member died or joined."""

    kind: str  # "died" or "joined"
    rank: int


@dataclass
class Strategy:
    """Base of all strategies: a dataclass whose fields are its hyper-parameters.

    A strategy object serves one replica: the replicator copies it before ``attach``. Private,
    non-init fields hold what it remembers between steps; whatever of it must survive a restart is
    returned by ``state`` (tensors and plain values only) and taken back by ``load``.
    """

    name: ClassVar[str] = ""
    summary: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    needs: ClassVar[frozenset[Capability]] = frozenset()
    # Synchronous: all members pass the same rounds, so the clock at a round is the same everywhere.
    synchronous: ClassVar[bool] = False
    # Whether schedules follow the updates of all replicas instead of the own ones.
    counts_all: ClassVar[bool] = False
    # Whether one more member, the last rank, keeps a centre: it learns nothing and runs ``serve``.
    centre: ClassVar[bool] = False
    # The options that say after how many updates the centre hears of them.
    hears_every: ClassVar[str] = "--strategy.period"
    # Whether it reads and writes ``scale * params``, so that a gradient of a few rows costs those rows
    # (``Replica.follow``); for all others it is made dense.
    keeps_scale: ClassVar[bool] = False
    # What one may do on a channel without shared memory, for the error that one gets there.
    remedy: ClassVar[str] = ""
    # What ``list strategies`` prints: whether lost messages are harmless (state) or missed (deltas), what
    # bounds how old they are, and what is done about a peer that dies, is slow, or joins.
    carries: ClassVar[str] = "nothing"
    bounded_by: ClassVar[str] = ""
    on_death: ClassVar[str] = ""
    on_slow: ClassVar[str] = ""
    on_join: ClassVar[str] = ""

    # deltas that this member refused or had refused (too old), or for which there was no room
    refused: int = field(default=0, init=False, repr=False, compare=False)

    def needed(self) -> frozenset[Capability]:
        """What this one needs of a channel: ``needs``, or less with some hyper-parameters."""
        return self.needs

    def check_shrinking(self, eta: float, replicas: int) -> None:
        """Raise Refusal if parameters of which each update takes away a share ``eta``, and which must stay
        above 0, could become less by an agreement. A mean, or an update after the other, cannot."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled and copied by its hyper-parameters alone: what it remembers is one replica's."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.init}
        return functools.partial(type(self), **fields), ()

    def attach(self, replica: Replica, channel: Channel) -> None:
        """Called once before the first step, on every member, in the same order."""

    def step(self, replica: Replica, channel: Channel) -> Exchange:
        """Turn the gradient in ``replica.grad`` into an update and, perhaps, an agreement."""
        raise TypeError(f"{type(self).__name__} has no step")

    def serve(self, replica: Replica, channel: Channel) -> bool:
        """One turn of the centre, where there is one: take one message in; False if none came."""
        raise TypeError(f"{type(self).__name__} has no centre")

    def consensus(self, replica: Replica, channel: Channel) -> Tensor:
        """The vector [N] that stands for all: evaluated, saved as best, exported. A copy."""
        return replica.values().detach().clone()

    def settle(self, replica: Replica, channel: Channel, number: int, deadline_seconds: float) -> bool:
        """Before checkpoint ``number``: take in the deltas that would otherwise be in flight across it.

        ``LAST_CUT`` is the number of the last, after which this member takes no further part.
        False if that was not done by the deadline; then the checkpoint is skipped.
        """
        return True

    def state(self) -> dict[str, Any]:
        return {}

    def load(self, state: dict[str, Any]) -> None:
        pass

    def resumed(self, replica: Replica, channel: Channel) -> None:
        """All members have loaded, and none has stepped yet."""

    def joined(self, replica: Replica, channel: Channel) -> None:
        """This member came in late, has loaded a living peer's state, and has not stepped yet.

        What was the peer's alone (deltas that it has yet to send, random draws) is put right here.
        """

    def on_member(self, event: MemberEvent) -> None:
        """Told of a death or a join, between two steps."""


def require(right: bool, sentence: str) -> None:
    """Raise ValueError with ``sentence`` for a hyper-parameter that makes no sense."""
    if not right:
        raise ValueError(sentence)


def centre_of(channel: Channel) -> int:
    """The rank that keeps the centre, under a strategy that has one."""
    return channel.size - 1


def replicas_of(channel: Channel) -> Sequence[int]:
    """The ranks that learn, under a strategy with a centre."""
    return range(channel.size - 1)


def mean_of_published(replica: Replica, channel: Channel) -> Tensor:
    """[N]: the mean of the own parameters and what the other living members last published."""
    vectors = [replica.params.detach()]
    vectors += [channel.peek(j)[0] for j in channel.living() if j != channel.rank and channel.version(j) > 0]
    return torch.stack(vectors).mean(0)


def shown_by_centre(replica: Replica, channel: Channel) -> Tensor:
    """[N]: what the centre last published; the own parameters if that is us, or it never did."""
    centre = centre_of(channel)
    if channel.rank == centre or channel.version(centre) == 0:
        return replica.values().detach().clone()
    return channel.peek(centre)[0].clone()


__all__ = [
    "LAST_CUT",
    "Exchange",
    "MemberEvent",
    "Strategy",
    "centre_of",
    "mean_of_published",
    "replicas_of",
    "require",
    "shown_by_centre",
]
