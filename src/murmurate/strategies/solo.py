"""No agreement: one replica, one optimizer. The baseline that every law compares with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from murmurate.errors import Refusal
from murmurate.fabric.interface import Channel
from murmurate.replica.vector import Exchange, Replica
from murmurate.strategies.interface import Strategy


@dataclass
class Solo(Strategy):
    """Update."""

    name: ClassVar[str] = "solo"
    summary: ClassVar[str] = "update; talk to nobody"
    keeps_scale: ClassVar[bool] = True
    carries: ClassVar[str] = "nothing"
    bounded_by: ClassVar[str] = "having no peer: 0"
    on_death: ClassVar[str] = "the run ends"
    on_slow: ClassVar[str] = "there is nobody to wait for"
    on_join: ClassVar[str] = "refused: one replica trains"

    def attach(self, replica: Replica, channel: Channel) -> None:
        if channel.size > 1:
            raise Refusal(
                f"solo trains one replica and {channel.size} were asked for. "
                "Use --replicas 1, or let them agree: --strategy all-reduce."
            )

    def step(self, replica: Replica, channel: Channel) -> Exchange:
        replica.update()
        return Exchange(round=replica.clock, heard=1, staleness=0)
