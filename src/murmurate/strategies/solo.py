"""No agreement: one replica, one optimizer. The baseline that every law compares with."""

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
    summary: ClassVar[str] = "update; talk to nobody"
    behaviour: ClassVar[Behaviour] = Behaviour(
        carries="nothing",
        bounded_by="having no peer: 0",
        on_death="the run ends",
        on_slow="there is nobody to wait for",
        on_join="refused: one replica trains",
    )

    def check(self, replicas: int, *, shrinks: float = 0.0) -> None:
        if replicas > 1:
            raise Refusal(
                f"solo trains one replica and {replicas} were asked for. "
                "Use --replicas 1, or let them agree: --strategy all-reduce."
            )

    def attach(self, replica: Replica, channel: Channel) -> None:
        self.check(channel.size)
        replica.scale.keep()

    def step(self, replica: Replica, channel: Channel) -> Exchange:
        replica.update()
        return Exchange(round=replica.clock, heard=1, staleness=0)
