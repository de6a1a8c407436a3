"""The interface of strategies: a strategy decides when, where and whether a replica updates."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from murmurate.fabric.interface import Capability, Channel
from murmurate.ranges import check_ranges
from murmurate.replica.vector import Exchange, Replica

# passed to ``drain`` instead of the number of a checkpoint when a member will send no more afterwards
FINAL_DRAIN = 1 << 40


@dataclass(frozen=True)
class MemberEvent:
    """A member died or joined."""

    kind: str  # "died" or "joined"
    rank: int


@dataclass(frozen=True)
class Behaviour:
    """What users are told of a strategy: by ``list strategies``, and the last two by messages.

    carries: what messages contain: "state", so that losing one is harmless; "deltas", so that it is
        not; or "nothing". bounded_by: what bounds staleness.
    on_death, on_slow, on_join: the consequences when a peer dies, is slow, or joins.
    needs_less: a setting with which the strategy needs fewer capabilities, for the error message when one is
        missing. pushes_after: the options that set the number of updates between pushes to a centre, for the
        warning that there was no push.
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

    A strategy object serves one replica: the replicator copies it before ``attach``. Private, non-init fields
    hold its state between steps; the part that must survive a restart is returned by ``state`` (tensors and
    plain values only) and restored by ``load``.
    """

    name: ClassVar[str] = ""
    summary: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    behaviour: ClassVar[Behaviour] = Behaviour()
    # Whether all members take part in the same rounds, so that all have the same clock at a round.
    synchronous: ClassVar[bool] = False
    # Whether schedules follow the updates of all replicas instead of this replica's.
    counts_all: ClassVar[bool] = False
    # Whether each update uses the mean of all replicas' gradients: their batches then count as one.
    averages_gradients: ClassVar[bool] = False
    # Whether a step updates, publishes, averages the own vector and vectors that peers have published, with
    # equal weights, and does nothing else.
    averages_published: ClassVar[bool] = False
    # Whether one more member, the last rank, keeps a centre: it does not learn, and runs ``serve``.
    centre: ClassVar[bool] = False
    # Whether the centre makes the optimizer's steps, from gradients that it gets for each vector separately.
    centre_steps: ClassVar[bool] = False
    # The field that gives the updates between two exchanges (H, tau or B), if there is such a field.
    period_field: ClassVar[str] = "period"

    # at a replica: its messages that were refused as too old, or not sent because a queue was full; at the
    # centre: all deltas that it refused
    refused: int = field(default=0, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_ranges(self, "strategy.")

    @property
    def needs(self) -> frozenset[Capability]:
        """The capabilities that the strategy needs; a class variable, unless they depend on
        hyper-parameters."""
        return frozenset()

    @property
    def common_rounds(self) -> bool:
        """Whether all replicas make each step together, so that collectives work inside it."""
        return self.synchronous or not self.needs  # what needs nothing trains a single replica

    @property
    def updates_per_round(self) -> int:
        """The most updates of a replica between two common rounds, under a synchronous strategy: a member may
        go on for so many batches until it ends a round, where it stops or saves."""
        period: int = getattr(self, self.period_field, 1)
        return max(1, period)

    def check(self, replicas: int, *, shrinks: float = 0.0) -> None:
        """Raise Refusal for a run that this strategy does not support.

        shrinks: the share by which each update shrinks parameters that must stay positive (counts, say); 0
            if there are none. A strategy that adds up updates checks that their shares sum to less than 1;
            one that averages updates, or applies them one by one, need not.
        """

    def with_model_steps(self, rate: float) -> Strategy:
        """This strategy with step sizes derived from the model's ``rate``, if its paper relates them."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle and copy only the hyper-parameters: the state belongs to one replica."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.init}
        return functools.partial(type(self), **fields), ()

    def attach(self, replica: Replica, channel: Channel) -> None:
        """Called once, before ``load`` and the first step; all members attach their named replicas in the
        same order.

        A strategy that reads and writes ``scale * params`` calls ``replica.scale.keep()``, so that the update
        by a row-sparse gradient touches only its rows (``Replica.follow``). For all other strategies
        such a gradient is made dense.
        """

    def step(self, replica: Replica, channel: Channel) -> Exchange:
        """Turn the gradient in ``replica.grad`` into an update, and possibly exchange with peers."""
        raise TypeError(f"{type(self).__name__} has no step")

    def rewritten(self, replica: Replica, channel: Channel) -> None:
        """Called when the parameters were overwritten by other means than a step (``Replica.rewritten``).

        A strategy that computes them from a vector of its own adopts them there, without a collective. A
        centre stays as it is, so its pull brings back part of what was overwritten.
        """

    def serve(self, replica: Replica, channel: Channel) -> bool:
        """Process one message, at the centre of a strategy that has one; False if none arrived."""
        raise TypeError(f"{type(self).__name__} has no centre")

    def consensus(self, replica: Replica, channel: Channel) -> Tensor:
        """A copy of the vector [N] that represents all replicas: it is evaluated, saved as best, exported.

        By default the vector that the centre last published; this member's own parameters at the centre,
        before the centre has published, and without a centre.
        """
        if not self.centre or channel.rank == centre_of(channel) or channel.version(centre_of(channel)) == 0:
            return replica.values().detach().clone()
        return channel.peek(centre_of(channel))[0].clone()

    def drain(self, replica: Replica, channel: Channel, number: int, deadline_seconds: float) -> bool:
        """Before checkpoint ``number``: receive the deltas that would otherwise be in flight across it.

        ``FINAL_DRAIN`` is the number of the last drain, after which this member takes no further part.
        Returns False if the deadline passed first; then the checkpoint is skipped.
        """
        return True

    def fields(self) -> dict[str, float | Tensor]:
        """This replica's own figures by name, scalars, for ``metrics.jsonl``: an adaptive period, say.

        Called whenever a record is written, which replicas do at different times: it must not communicate.
        A figure with the name of another field (``docs/metrics.md``) is recorded as ``strategy_NAME``.
        """
        return {}

    def state(self) -> dict[str, Any]:
        return {}

    def load(self, state: dict[str, Any]) -> None:
        pass

    def resumed(self, replica: Replica, channel: Channel) -> None:
        """Called after a resume, when all members have loaded their states, and before their first steps."""

    def joined(self, replica: Replica, channel: Channel) -> None:
        """Called when this member has joined late and has loaded a living peer's state, before its first
        step.

        The strategy then replaces the state that belongs to the peer alone (deltas still to be sent, random
        draws).
        """

    def on_member(self, event: MemberEvent) -> None:
        """A member has died or joined; called between two steps."""


def centre_of(channel: Channel) -> int:
    """The rank that keeps the centre, under a strategy that has one."""
    return channel.size - 1


def replicas_of(channel: Channel) -> Sequence[int]:
    """The ranks that learn, under a strategy with a centre."""
    return range(channel.size - 1)


def mean_of_published(replica: Replica, channel: Channel) -> Tensor:
    """The mean [N] of this member's parameters and the vectors that other living members last published."""
    vectors = [replica.params.detach()]
    vectors += [channel.peek(j)[0] for j in channel.living() if j != channel.rank and channel.version(j) > 0]
    return torch.stack(vectors).mean(0)
