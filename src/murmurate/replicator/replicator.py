"""Joins a strategy and a fabric: makes replicas whose step is the strategy's."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from murmurate.errors import Refusal
from murmurate.fabric.interface import Capability, Channel, Fabric
from murmurate.replica.vector import Exchange, MakeOptimizer, Replica
from murmurate.strategies.interface import MemberEvent, Strategy


@dataclass
class Bond:
    """One replica with its own copy of the strategy and its own channel."""

    replica: Replica
    strategy: Strategy
    channel: Channel
    last: Exchange = field(default_factory=lambda: Exchange(0, 1, 0))
    staleness_max: int = 0
    _living: Sequence[int] = ()

    def step(self, replica: Replica) -> Exchange:
        living = self.channel.living()
        if living != self._living:
            self._tell(living)
        self.last = self.strategy.step(replica, self.channel)
        self.staleness_max = max(self.staleness_max, self.last.staleness)
        return self.last

    def joined(self, rank: int) -> None:
        """``rank`` begins another life: if the end of the last one was not seen, tell of both."""
        if rank in self._living:
            self.strategy.on_member(MemberEvent("died", rank))
        self.strategy.on_member(MemberEvent("joined", rank))
        self._living = sorted({*self._living, rank}) if self._living else ()

    def _tell(self, living: Sequence[int]) -> None:
        before = set(self._living or living)
        for rank in sorted(before - set(living)):
            self.strategy.on_member(MemberEvent("died", rank))
        for rank in sorted(set(living) - before):
            self.strategy.on_member(MemberEvent("joined", rank))
        self._living = living


class Replicator:
    """What a learner asks for its replicas, whatever the strategy and the fabric are.

    Raises Refusal at once if the fabric lacks what the strategy needs.
    """

    def __init__(self, strategy: Strategy, fabric: Fabric) -> None:
        check_capabilities(strategy, fabric.capabilities, "this fabric")
        self.strategy = strategy
        self.fabric = fabric
        self.bonds: dict[str, Bond] = {}

    def replicate(
        self, name: str, module: nn.Module, make_optimizer: MakeOptimizer, **options: Any
    ) -> Replica:
        """A Replica (which see for ``options``) that starts from the lowest living rank's parameters.

        All members call this for the same modules in the same order.
        """
        if name in self.bonds:
            raise ValueError(f"there is a replica called '{name}' already; names are checkpoint keys")
        replica = Replica(name, module, make_optimizer, **options)
        channel = self.fabric.channel(name, replica.params.detach())
        check_capabilities(self.strategy, channel.capabilities, f"replica '{name}' on {replica.device}")
        strategy = copy.deepcopy(self.strategy)
        if Capability.COLLECTIVE in channel.capabilities and channel.size > 1:
            with torch.no_grad():
                # gathered, because all agree on who came, and not on who lives at this moment
                answers = channel.gather(replica.params.detach())
                replica.params.copy_(answers[min(answers)])
        replica.keeps_scale = strategy.keeps_scale
        strategy.attach(replica, channel)
        replica.reload()
        bond = Bond(replica, strategy, channel)
        replica.exchange = bond.step
        replica.common_rounds = strategy.synchronous or channel.size == 1
        self.bonds[name] = bond
        return replica

    def consensus(self) -> dict[str, Tensor]:
        """For each replica the vector [N] that stands for all members."""
        return {name: b.strategy.consensus(b.replica, b.channel) for name, b in self.bonds.items()}

    def state(self) -> dict[str, Any]:
        return {
            name: {"replica": b.replica.state(), "strategy": b.strategy.state()}
            for name, b in self.bonds.items()
        }

    def load(self, state: dict[str, Any]) -> None:
        for name, bond in self.bonds.items():
            bond.replica.load(state[name]["replica"])
            bond.strategy.load(state[name]["strategy"])

    def settle(self, number: int, deadline_seconds: float) -> bool:
        """See ``Strategy.settle``; False if one of the strategies missed the deadline."""
        with torch.no_grad():
            settled = [
                b.strategy.settle(b.replica, b.channel, number, deadline_seconds) for b in self.bonds.values()
            ]
        return all(settled)

    def resumed(self) -> None:
        """All members have loaded, and none has stepped yet."""
        with torch.no_grad():
            for bond in self.bonds.values():
                bond.strategy.resumed(bond.replica, bond.channel)
                bond.replica.reload()

    def joined(self, rank: int) -> None:
        """``rank`` was started again, and comes in with a living peer's state."""
        for bond in self.bonds.values():
            bond.joined(rank)

    def entered(self) -> None:
        """This member was started again, and has loaded a living peer's state."""
        with torch.no_grad():
            for bond in self.bonds.values():
                bond.strategy.refused = 0  # the peer tells of its own
                bond.strategy.joined(bond.replica, bond.channel)
                bond.replica.reload()

    def publish(self) -> None:
        """Show peers the parameters as they are now (at the end of a run, or after a restart)."""
        for bond in self.bonds.values():
            if Capability.REGISTER in bond.channel.capabilities:
                bond.channel.publish(bond.replica.values().detach())

    @property
    def bytes_exchanged(self) -> int:
        return sum(b.channel.traffic.bytes for b in self.bonds.values())

    @property
    def refused(self) -> int:
        """Deltas that were too old to be folded, or found no room (see the strategies), and messages of or to
        lives that are over."""
        return sum(b.strategy.refused + b.channel.traffic.refused for b in self.bonds.values())

    @property
    def refused_all(self) -> str:
        """At a centre that has folded nothing yet of what came: what a person should know. Else empty."""
        names = self._never_moved(refused=True)
        if not names:
            return ""
        return (
            f"the centre has refused all that was sent to it for {names}, as not finite or not "
            "readable: the model is what it was at the start. Stop the run; look for data that is not finite."
        )

    @property
    def untouched(self) -> str:
        """At a centre at the end of a run in which updates were made: what a person should know if it has
        folded nothing, and refused nothing either. Else empty."""
        names = self._never_moved(refused=False)
        if not names:
            return ""
        return (
            f"no update of {names} has reached the centre: the model is what it was at the "
            f"start. Make the run longer (--updates), or {self.strategy.hears_every} smaller."
        )

    def _never_moved(self, *, refused: bool) -> str:
        """The replicas that no update has moved, because all were refused or because none came."""
        bonds = self.bonds.items()
        return " and ".join(
            f"'{name}'" for name, b in bonds if bool(b.strategy.refused) is refused and not b.replica.clock
        )

    @property
    def between_rounds(self) -> bool:
        """Whether no replica has learned since its last exchange: synchronous ones are all the same then."""
        return all(bond.last.staleness == 0 for bond in self.bonds.values())

    @property
    def waiting_seconds(self) -> float:
        return sum(b.channel.traffic.waiting_seconds for b in self.bonds.values())


def check_capabilities(strategy: Strategy, offered: frozenset[Capability], where: str) -> None:
    """Raise Refusal, naming a strategy that would work, if something the strategy needs is missing."""
    missing = sorted(c.value for c in strategy.needed() - offered)
    if missing:
        remedy = next((name for need, name in _REMEDIES if need in offered), "solo --replicas 1")
        apart = Capability.SHARED_MEMORY not in offered
        own = f" {strategy.remedy}." if apart and strategy.remedy else ""
        raise Refusal(
            f"{strategy.name} needs {' and '.join(missing)}, which {where} does not offer.{own} "
            f"Use --strategy {remedy}, or --launcher local on one host."
        )


# what to offer instead, best first, by the one thing that it needs
_REMEDIES = (
    (Capability.REGISTER, "gala"),
    (Capability.COLLECTIVE, "all-reduce"),
    (Capability.SHARED_MEMORY, "hogwild"),
)


Replicate = Callable[..., Replica]
