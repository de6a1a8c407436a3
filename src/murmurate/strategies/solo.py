"""Solo: one replica, one optimizer, no exchange."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from murmurate.errors import Refusal
from murmurate.fabric.interface import Channel
from murmurate.replica.vector import Exchange, Replica
from murmurate.strategies.interface import Behaviour, Strategy


@dataclass
class Solo(Strategy):
    """Update."""

    name: ClassVar[str] = "solo"
    summary: ClassVar[str] = "update; no exchange"
    behaviour: ClassVar[Behaviour] = Behaviour(
        carries="nothing",
        bounded_by="no peers: 0",
        on_death="the run ends",
        on_slow="there is no peer to wait for",
        on_join="refused: only one replica trains",
    )

    def check(self, replicas: int, *, shrinks: float = 0.0) -> None:
        if replicas > 1:
            raise Refusal(
                f"solo trains one replica, and the run has {replicas}. "
                "Use --replicas 1, or let them agree: --strategy all-reduce."
            )

    def attach(self, replica: Replica, channel: Channel) -> None:
        self.check(channel.size)
        replica.scale.keep()

    def step(self, replica: Replica, channel: Channel) -> Exchange:
        replica.update()
        return Exchange(round=replica.clock, heard=1, staleness=0)
