"""Replicas that span several members, called the parts of the replica.

All parts of a replica hold the same parameters. Their gradients are averaged within the replica; then part 0,
the leader, makes the strategy's step with the leaders of the other replicas, and the other parts copy its
vector (docs/decisions/0029). So every part has the same parameters whatever the strategy does, and a
strategy's state exists once per replica.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol

from torch import Tensor

from murmurate.errors import Refusal
from murmurate.fabric.group import GroupFabric
from murmurate.fabric.interface import Capability, Channel, Fabric
from murmurate.replica.vector import Exchange, Replica
from murmurate.strategies.interface import Strategy


class SharedVector(Protocol):
    """One replica's vector, as its parts hold it."""

    def exchange(self, replica: Replica, step: Callable[[Replica], Exchange]) -> Exchange:
        """Average the parts' gradients; then the leader runs ``step``, and the others copy its vector."""
        ...

    def broadcast(self, vector: Tensor) -> None:
        """Replace ``vector`` [N] on every part by the leader's."""
        ...


class ReplicaParts(Protocol):
    """The parts of this member's replica, for example ``murmurate.spatial.Parts``."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def bytes(self) -> int:
        """Bytes exchanged so far."""
        ...

    @property
    def waiting_seconds(self) -> float:
        """Seconds spent waiting for the other parts so far."""
        ...

    def share(self, replica: Replica) -> SharedVector:
        """Give all parts the leader's vector. All parts call it for the same replicas in the same order."""
        ...


class OnePart:
    """Stands for the parts of a replica that consists of one member."""

    rank, size, bytes = 0, 1, 0
    waiting_seconds = 0.0

    def share(self, replica: Replica) -> SharedVector:
        raise TypeError("a replica of one part shares its vector with nobody")


ONE_PART = OnePart()


@dataclass
class Follow(Strategy):
    """Stands for the strategy on parts that are not leaders: these only copy the leader's vector.

    rounds: whether the leader's strategy has common rounds.
    """

    rounds: bool = True

    name: ClassVar[str] = "follow"

    @property
    def common_rounds(self) -> bool:
        return self.rounds

    def step(self, replica: Replica, channel: Channel) -> Exchange:
        raise TypeError("a part that follows makes no step of its own")


def role_of(strategy: Strategy, fabric: Fabric, parts: int) -> tuple[Strategy, Fabric]:
    """(strategy, fabric) of one member where each replica has ``parts`` parts.

    Leaders, and the centre if there is one, keep the strategy. The returned fabric connects the same part of
    all replicas, so that its ranks are the replicas' numbers.
    """
    if parts == 1:
        return strategy, fabric
    replicas = (fabric.size - strategy.centre) // parts
    part = fabric.rank % parts
    if part:
        return Follow(strategy.common_rounds), GroupFabric(fabric, range(part, replicas * parts, parts))
    return strategy, GroupFabric(fabric, range(0, replicas * parts + strategy.centre, parts))


def check_parts(strategy: Strategy, parts: int) -> None:
    """Raise Refusal for a strategy whose other members write into a replica's parameters at any time."""
    if parts > 1 and Capability.SHARED_MEMORY in strategy.needs:
        raise Refusal(
            f"under {strategy.name} other replicas write into a replica's parameters at any time, so its "
            f"{parts} parts would compute with different parameters. Use all-reduce, local-sgd or gala."
        )
