"""Makes replicas whose step is a strategy's, over the channels of a fabric."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from murmurate.errors import Refusal
from murmurate.fabric.interface import Capability, Channel, Fabric
from murmurate.fabric.xla import execute
from murmurate.replica.state_dict import tensors_of, write_values
from murmurate.replica.vector import Exchange, MakeOptimizer, Replica
from murmurate.strategies.interface import MemberEvent, Strategy

_TURN_SECONDS = 0.05  # for which a centre drains one replica before it turns to the next
_MOST_UNPUBLISHED = 32  # updates of a centre that publishes while messages are waiting


@dataclass
class BoundReplica:
    """A replica with its own copy of the strategy and its own channel."""

    replica: Replica
    strategy: Strategy
    channel: Channel
    last: Exchange = field(default_factory=lambda: Exchange(0, 1, 0))
    staleness_max: int = 0
    _living: Sequence[int] = ()
    _present: set[int] | None = None  # members that are alive, as far as the strategy was told

    def step(self, replica: Replica) -> Exchange:
        if self.channel.size > 1:
            self._notice_members()
        exchange: Exchange | None = self.strategy.step(replica, self.channel)
        if exchange is None:
            raise TypeError(
                f"{type(self.strategy).__name__}.step returned None: return Exchange(round, heard, staleness)"
            )
        self.last = exchange
        execute(replica.device)
        self.staleness_max = max(self.staleness_max, self.last.staleness)
        return self.last

    def drain(self, number: int, deadline_seconds: float) -> bool:
        drained = self.strategy.drain(self.replica, self.channel, number, deadline_seconds)
        self.replica.reload()  # the parameters may have moved
        return drained

    def joined(self, rank: int) -> None:
        """``rank`` was restarted: notify the strategy, also of its death if that was not noticed."""
        if self._present is not None and rank in self._present:
            self.strategy.on_member(MemberEvent("died", rank))
        self.strategy.on_member(MemberEvent("joined", rank))
        if self._present is not None:
            self._present.add(rank)

    def _notice_members(self) -> None:
        living = self.channel.living()
        if self._present is None:
            self._present = set(living)
        if living != self._living or len(living) < len(self._present):
            self._notify(living)

    def _notify(self, living: Sequence[int]) -> None:
        """Notify the strategy of deaths, and of members that joined. One whose connection is interrupted is
        neither: it will go on where it was."""
        before = set(self._present or living)
        # on a simulated fabric others may run meanwhile, and ``joined`` be called
        kept = {rank for rank in before - set(living) if not self.channel.has_lost(rank)}
        joined_meanwhile = set(self._present or living) - before
        present = {*living, *kept}
        for rank in sorted(before - present):
            self.strategy.on_member(MemberEvent("died", rank))
        for rank in sorted(present - before - joined_meanwhile):
            self.strategy.on_member(MemberEvent("joined", rank))
        self._living, self._present = living, present | joined_meanwhile


def begins_with(name: str, beginnings: Sequence[str]) -> bool:
    """Whether ``name`` is one of ``beginnings``, or goes on from one with a dot."""
    return any(f"{name}.".startswith(f"{beginning}.") for beginning in beginnings)


class Replicator:
    """Makes a learner's replicas, for any strategy and fabric.

    initial: parameters and buffers that replicas start from, by the name of the replica and their own; empty:
    those that their modules have. initial_except: names of those that stay as their modules have them, or
    their beginnings up to a dot. The fabric must have the capabilities that the strategy needs (see
    ``check_capabilities``).
    """

    def __init__(
        self,
        strategy: Strategy,
        fabric: Fabric,
        *,
        initial: Mapping[str, Mapping[str, Tensor]] = MappingProxyType({}),
        initial_except: Sequence[str] = (),
    ) -> None:
        self.strategy = strategy
        self.fabric = fabric
        self.initial = initial
        self.initial_except = initial_except
        self.bound_replicas: dict[str, BoundReplica] = {}

    def replicate(
        self, name: str, module: nn.Module, make_optimizer: MakeOptimizer, **options: Any
    ) -> Replica:
        """A ``Replica`` (with its ``options``) that starts from the lowest living rank's parameters.

        All members must call this for the same modules in the same order. Raises ValueError if there is a
        replica of that name, or if the initial values do not fit.
        """
        if name in self.bound_replicas:
            raise ValueError(f"there is already a replica called '{name}'; names are keys of checkpoints")
        replica = Replica(name, module, make_optimizer, **options)
        if self.initial:
            self._start_from_initial(replica)
        channel = self.fabric.channel(name, replica.params.detach())
        strategy = copy.deepcopy(self.strategy)
        if Capability.COLLECTIVE in channel.capabilities and channel.size > 1:
            with torch.no_grad():
                # a gather, because members agree on its contributors, but may not agree on which are alive
                gathered = channel.gather(replica.params.detach())
                replica.params.copy_(gathered[min(gathered)])
        replica.scale.keep(False)  # a strategy may enable it in ``attach``
        strategy.attach(replica, channel)
        replica.reload()
        bound = BoundReplica(replica, strategy, channel)
        replica.exchange = bound.step
        replica.on_rewrite = lambda: strategy.rewritten(replica, channel)
        replica.common_rounds = strategy.common_rounds or channel.size == 1
        self.bound_replicas[name] = bound
        return replica

    def _start_from_initial(self, replica: Replica) -> None:
        """Overwrite the drawn values by the initial ones. Raises ValueError for one that does not fit."""
        drawn = {k: v for k, v in tensors_of(replica).items() if begins_with(k, self.initial_except)}
        others = self.initial.get(replica.name, {}).items()
        values = {k: v for k, v in others if not begins_with(k, self.initial_except)} | drawn
        try:
            write_values(replica, values)
        except ValueError as error:
            if replica.name not in self.initial:
                raise ValueError(
                    f"the initial values are of another learner: they have none for '{replica.name}', only "
                    f"for {', '.join(map(repr, self.initial))}. Start from a run of the same algorithm"
                ) from error
            raise ValueError(
                f"the initial values are of another network: {error}."
                f"{_normalization_advice(tensors_of(replica), values)} --initial-except NAME,... draws these "
                f"parameters instead{self._unknown_names(replica)}"
            ) from error

    def _unknown_names(self, replica: Replica) -> str:
        """Words about names in ``initial_except`` that are none of the replica or of the initial values."""
        names = [*tensors_of(replica), *(name for values in self.initial.values() for name in values)]
        unknown = [part for part in self.initial_except if not any(begins_with(n, [part]) for n in names)]
        return f"; no parameter or buffer here is called {', '.join(unknown)}" if unknown else ""

    @property
    def folds(self) -> int:
        """At a centre: updates made from members' messages."""
        return sum(bound.replica.clock for bound in self.bound_replicas.values())

    def serve_until(
        self, is_over: Callable[[], bool], between_messages: Callable[[], None] = lambda: None
    ) -> None:
        """At a centre: answer members' messages until ``is_over()``; ``between_messages`` is called
        after each round of answers."""
        self.publish()
        published = self.folds
        while not is_over():
            with torch.no_grad():
                # a list, as ``any`` of a generator would stop at the first replica that has a message
                served = [
                    bound.strategy.serve(bound.replica, bound.channel)
                    for bound in self.bound_replicas.values()
                ]
            folds = self.folds - published
            if folds >= _MOST_UNPUBLISHED or (folds and not any(served)):  # or no message is waiting
                self.publish()
                published = self.folds
            between_messages()

    def consensus(self) -> dict[str, Tensor]:
        """The consensus vector [N] of each replica, by name."""
        return {name: b.strategy.consensus(b.replica, b.channel) for name, b in self.bound_replicas.items()}

    def state(self) -> dict[str, Any]:
        """The state of all replicas and their strategies, by name: nested tensors and plain values, to be
        saved."""
        return {
            name: {"replica": b.replica.state(), "strategy": b.strategy.state()}
            for name, b in self.bound_replicas.items()
        }

    def load(self, state: dict[str, Any]) -> None:
        """Restore what ``state`` returned."""
        for name, bound in self.bound_replicas.items():
            bound.replica.load(state[name]["replica"])
            bound.strategy.load(state[name]["strategy"])

    def drain(self, number: int, deadline_seconds: float) -> bool:
        """See ``Strategy.drain``; False if one of the strategies missed the deadline."""
        bound_replicas = list(self.bound_replicas.values())
        with torch.no_grad():
            if not self.strategy.centre or self.fabric.rank < self.fabric.size - 1:
                drained = [bound.drain(number, deadline_seconds) for bound in bound_replicas]
                return all(drained)
            # A centre drains the replicas by turns: a member that has sent a message of one of them waits for
            # its reply, and only then sends the markers of all.
            left_seconds = deadline_seconds
            while bound_replicas and left_seconds > 0:
                turn_seconds = min(_TURN_SECONDS, left_seconds)
                bound_replicas = [b for b in bound_replicas if not b.drain(number, turn_seconds)]
                left_seconds -= turn_seconds * len(bound_replicas)
            return not bound_replicas

    def resumed(self) -> None:
        """To be called when all members have loaded a checkpoint, and before their first steps."""
        with torch.no_grad():
            for bound in self.bound_replicas.values():
                bound.strategy.resumed(bound.replica, bound.channel)
                bound.replica.reload()

    def joined(self, rank: int) -> None:
        """To be called when ``rank`` was restarted, and joins with a living peer's state."""
        for bound in self.bound_replicas.values():
            bound.joined(rank)

    def rejoined(self) -> None:
        """To be called when this member was restarted, and has loaded a living peer's state."""
        with torch.no_grad():
            for bound in self.bound_replicas.values():
                bound.strategy.refused = 0  # the count in the loaded state is the peer's
                bound.strategy.joined(bound.replica, bound.channel)
                bound.replica.reload()

    def publish(self) -> None:
        """Publish the present parameters to peers (at the end of a run, or after a restart)."""
        for bound in self.bound_replicas.values():
            if Capability.REGISTER in bound.channel.capabilities:
                bound.channel.publish(bound.replica.values().detach())

    @property
    def bytes_exchanged(self) -> int:
        """Bytes read from and written to other members; a member without peers publishes for nobody."""
        return sum(b.channel.traffic.bytes for b in self.bound_replicas.values() if b.channel.size > 1)

    @property
    def refused(self) -> int:
        """Number of deltas dropped as too old or for lack of space (see the strategies), plus that of
        messages from or to processes that were replaced."""
        return sum(b.strategy.refused + b.channel.traffic.refused for b in self.bound_replicas.values())

    def strategy_fields(self) -> dict[str, float]:
        """``Strategy.fields``; with several vectors, the mean of each over those that have it."""
        return mean_fields([b.strategy.fields() for b in self.bound_replicas.values()])

    @property
    def all_refused_warning(self) -> str:
        """At a centre that has refused all messages so far, a warning for the user; else empty."""
        names = self._unchanged(refused=True)
        if not names:
            return ""
        return (
            f"the centre has refused all messages for {names}, as not finite or not readable: the model "
            "has not changed. Stop the run, and look for data that is not finite."
        )

    @property
    def no_update_warning(self) -> str:
        """A warning for the user if this centre received no update in the whole run; else empty."""
        names = self._unchanged(refused=False)
        if not names:
            return ""
        return f"no update of {names} has reached the centre: the model has not changed. {self._more_pushes}"

    @property
    def _more_pushes(self) -> str:
        return f"Make the run longer (--updates), or {self.strategy.behaviour.pushes_after} smaller."

    def _unchanged(self, *, refused: bool) -> str:
        """Names of replicas without an update: with ``refused``, those whose messages were all refused; else
        those that received none."""
        return " and ".join(
            f"'{name}'"
            for name, bound in self.bound_replicas.items()
            if bool(bound.strategy.refused) is refused and not bound.replica.clock
        )

    @property
    def between_rounds(self) -> bool:
        """Whether no replica has updated since its last exchange; synchronous replicas are then equal."""
        return all(bound.last.staleness == 0 for bound in self.bound_replicas.values())

    @property
    def waiting_seconds(self) -> float:
        return sum(b.channel.traffic.waiting_seconds for b in self.bound_replicas.values())


def mean_fields(measured: Sequence[Mapping[str, float | Tensor]]) -> dict[str, float]:
    """The mean of each scalar over the mappings that have it: some are measured only now and then."""
    names = dict.fromkeys(name for each in measured for name in each)
    return {name: statistics.fmean(float(m[name]) for m in measured if name in m) for name in names}


def _normalization_advice(own: Iterable[str], initial: Iterable[str]) -> str:
    """What to change where only one of a network and its initial values, given by the names of their tensors,
    normalises observations; else empty."""
    here, there = (any(name.startswith("normalizer.") for name in names) for names in (own, initial))
    if here == there or not initial:
        return ""
    return f" Use --agent.normalize-observations {str(there).lower()}, as that run did."


def check_capabilities(
    strategy: Strategy, offered: frozenset[Capability], offered_by: str, devices: Iterable[str] = ()
) -> None:
    """Raise Refusal, naming a strategy that would work, if a capability that the strategy needs is missing.

    offered_by: names what has the capabilities ``offered``. devices: devices of the replicas; memory is
        shared only on the CPU.
    """
    others = "--launcher local on one host (launcher='local')"
    if any(torch.device(device).type != "cpu" for device in devices):
        if Capability.SHARED_MEMORY in offered:
            others = "--placement.devices cpu (in a script devices='cpu')"
        offered, offered_by = offered - {Capability.SHARED_MEMORY}, f"{offered_by} on a GPU"
    missing = sorted(c.value for c in strategy.needs - offered)
    if missing:
        remedy = next((name for need, name in _REMEDIES if need in offered), "solo")
        hint = strategy.behaviour.needs_less if Capability.SHARED_MEMORY not in offered else ""
        hint = f" {hint}." if hint else ""
        raise Refusal(
            f"{strategy.name} needs {' and '.join(missing)}, which {offered_by} does not offer.{hint} "
            f"Use --strategy {remedy} (strategy='{remedy}' in Python), or {others}."
        )


def check_common_rounds(strategy: Strategy, feature: str) -> None:
    """Raise Refusal if the strategy has no common rounds: a collective would never complete."""
    if not strategy.common_rounds:
        raise Refusal(
            f"{strategy.name} cannot give {feature}, because its replicas do not wait for one another. Use "
            "all-reduce or local-sgd, or leave it out and use each replica's own values."
        )


# strategies to suggest instead, best first, by the capability that they need
_REMEDIES = (
    (Capability.REGISTER, "gala"),
    (Capability.COLLECTIVE, "all-reduce"),
    (Capability.SHARED_MEMORY, "hogwild"),
)
