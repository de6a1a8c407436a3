"""A strategy is the step: it decides when, where and whether a replica updates (design, section 1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from murmurate.fabric.interface import Capability, Fabric
from murmurate.vector import Exchange, Replica


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
    # What happens when a peer dies, in words: printed by ``list strategies``.
    on_death: ClassVar[str] = ""

    def attach(self, replica: Replica, fabric: Fabric) -> None:
        """Called once before the first step, on every member, in the same order."""

    def step(self, replica: Replica, fabric: Fabric) -> Exchange:
        """Turn the gradient in ``replica.grad`` into an update and, perhaps, an agreement."""
        raise TypeError(f"{type(self).__name__} has no step")

    def consensus(self, replica: Replica, fabric: Fabric) -> Tensor:
        """The vector [N] that stands for all: evaluated, saved as best, exported. A copy."""
        return replica.params.detach().clone()

    def state(self) -> dict[str, Any]:
        return {}

    def load(self, state: dict[str, Any]) -> None:
        pass

    def on_member(self, event: MemberEvent) -> None:
        """Told of a death or a join, between two steps."""


__all__ = ["Exchange", "MemberEvent", "Strategy"]
