"""A strategy is the step: it decides when, where and whether a replica updates (design, section 1)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from murmurate.fabric.interface import Capability, Channel
from murmurate.replica.vector import Exchange, Replica

FINAL_DRAIN = 1 << 40  # the number of the ``drain`` after which a member sends no more


@dataclass(frozen=True)
class MemberEvent:
    """A member died or joined."""

    kind: str  # "died" or "joined"
    rank: int


@dataclass(frozen=True)
class Behaviour:
    """What ``list strategies`` prints of a strategy beside its step.

    carries: what messages hold: "state", of which a lost one is harmless; "deltas", of which it is missed; or
        "nothing". bounded_by: what bounds staleness.
    on_death, on_slow, on_join: what is done about a peer that dies, is slow, or joins.
    needs_less: the setting with which the strategy needs less of a channel, for the error where it lacks
    some. pushes_after: the options that say after how many updates a centre hears of them, for the warning
    where it
        never did.
    """

    carries: Literal["state", "deltas", "nothing"] = "nothing"
    bounded_by: str = ""
    on_death: str = ""
    on_slow: str = ""
    on_join: str = ""
    needs_less: str = ""
    pushes_after: str = "--strategy.period"


@dataclass
class Strategy:
    """Base of all strategies: a dataclass whose fields are its hyper-parameters, all with defaults.

    A strategy object serves one replica: the replicator copies it before ``attach``. Private,
    non-init fields hold what it remembers between steps; whatever of it must survive a restart is
    returned by ``state`` (tensors and plain values only) and taken back by ``load``.
    """

    name: ClassVar[str] = ""
    summary: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    behaviour: ClassVar[Behaviour] = Behaviour()
    # Synchronous: all members pass the same rounds, so the clock at a round is the same everywhere.
    synchronous: ClassVar[bool] = False
    # Whether schedules follow the updates of all replicas instead of the own ones.
    counts_all: ClassVar[bool] = False
    # Whether one more member, the last rank, keeps a centre: it learns nothing and runs ``serve``.
    centre: ClassVar[bool] = False

    # deltas that this member refused or had refused (too old), or for which there was no room
    refused: int = field(default=0, init=False, repr=False, compare=False)

    @property
    def needs(self) -> frozenset[Capability]:
        """What it needs of a channel; a class variable where that does not depend on hyper-parameters."""
        return frozenset()

    @property
    def common_rounds(self) -> bool:
        """Whether all replicas are in the same step together, so that collectives work inside it."""
        return self.synchronous or not self.needs

    def check(self, replicas: int, *, shrinks: float = 0.0) -> None:
        """Raise Refusal for a run that this strategy cannot carry.

        shrinks: the share of parameters that each update takes away, where these must stay above 0 (counts,
            say); 0 for others. A mean, or one update after another, takes no more.
        """

    def with_model_steps(self, rate: float) -> Strategy:
        """This one with step sizes derived from the model's ``rate``, where its paper ties the two."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled and copied by its hyper-parameters alone: what it remembers is one replica's."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.init}
        return functools.partial(type(self), **fields), ()

    def attach(self, replica: Replica, channel: Channel) -> None:
        """Called once before the first step, on every member, in the same order.

        One that reads and writes ``scale * params`` calls ``replica.scale.keep()``, so that a gradient of a
        few rows costs those rows (``Replica.follow``); for all others it is made dense.
        """

    def step(self, replica: Replica, channel: Channel) -> Exchange:
        """Turn the gradient in ``replica.grad`` into an update and, perhaps, an agreement."""
        raise TypeError(f"{type(self).__name__} has no step")

    def serve(self, replica: Replica, channel: Channel) -> bool:
        """One turn of the centre, where there is one: take one message in; False if none came."""
        raise TypeError(f"{type(self).__name__} has no centre")

    def consensus(self, replica: Replica, channel: Channel) -> Tensor:
        """The vector [N] that stands for all: evaluated, saved as best, exported. A copy.

        What the centre last published, where there is one; else the own parameters.
        """
        if not self.centre or channel.rank == centre_of(channel) or channel.version(centre_of(channel)) == 0:
            return replica.values().detach().clone()
        return channel.peek(centre_of(channel))[0].clone()

    def drain(self, replica: Replica, channel: Channel, number: int, deadline_seconds: float) -> bool:
        """Before checkpoint ``number``: take in the deltas that would otherwise be in flight across it.

        ``FINAL_DRAIN`` is the number of the last, after which this member takes no further part.
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
        """A member has died or joined; called between two steps."""


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


__all__ = [
    "FINAL_DRAIN",
    "Behaviour",
    "Exchange",
    "MemberEvent",
    "Strategy",
    "centre_of",
    "mean_of_published",
    "replicas_of",
    "require",
]
