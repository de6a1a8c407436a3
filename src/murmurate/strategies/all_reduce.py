"""All-reduce: every replica steps with the mean of all gradients, so all stay equal.

TF-Replicator's synchronous replicator; A2C (Dhariwal et al.); Jin 2018, Algorithm 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from murmurate.fabric.interface import Capability, Channel
from murmurate.replica.vector import Exchange, Replica
from murmurate.strategies.interface import Behaviour, Strategy


@dataclass
class AllReduce(Strategy):
    """Average the gradient over the replicas; update."""

    name: ClassVar[str] = "all-reduce"
    summary: ClassVar[str] = "average the gradient; update"
    paper: ClassVar[str] = "TF-Replicator; A2C; Jin 2018, Algorithm 2"
    needs: ClassVar[frozenset[Capability]] = frozenset({Capability.COLLECTIVE})
    synchronous: ClassVar[bool] = True
    averages_gradients: ClassVar[bool] = True
    behaviour: ClassVar[Behaviour] = Behaviour(
        carries="deltas",
        bounded_by="the round: 0",
        on_death="from that round on the mean is over the living",
        on_slow="waited for up to a deadline; then replaced (murmurate train, local or ray) or the run stops",
        on_join="takes part from the next common round on, with a living peer's state",
    )

    def step(self, replica: Replica, channel: Channel) -> Exchange:
        heard = channel.mean_(replica.grad)
        replica.update()
        return Exchange(round=replica.clock, heard=heard, staleness=0)
