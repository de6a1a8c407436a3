"""Hogwild: all replicas share one vector in memory and update it without a lock.

A3C (Mnih et al. 2016); PA3C (Mohamad et al., Algorithm 5). Differs: optimizer moments are shared, as
A3C's "shared RMSProp", and schedules follow the number of updates that all replicas have made.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from murmurate.fabric.interface import Capability, Channel
from murmurate.replica.vector import Exchange, Replica
from murmurate.strategies.interface import Behaviour, Strategy


@dataclass
class Hogwild(Strategy):
    """Update the vector in shared memory without a lock. Gradients stay private.

    shared_moments: whether all replicas share one set of optimizer moments and step counters (A3C's default);
        else each has its own.
    """

    shared_moments: bool = True

    name: ClassVar[str] = "hogwild"
    summary: ClassVar[str] = "update one vector in shared memory, without a lock"
    paper: ClassVar[str] = "A3C; Mohamad et al., Algorithm 5 (PA3C)"
    needs: ClassVar[frozenset[Capability]] = frozenset({Capability.SHARED_MEMORY})
    counts_all: ClassVar[bool] = True
    behaviour: ClassVar[Behaviour] = Behaviour(
        carries="nothing",
        bounded_by="nothing: the writes of peers during a replica's own update",
        on_death="the others go on; a half-written update is noise",
        on_slow="no replica waits for it",
        on_join="uses the shared vector at once",
    )

    _clocks: Tensor = field(default_factory=lambda: torch.empty(0), init=False, repr=False, compare=False)
    _last_seen: int = field(default=0, init=False, repr=False, compare=False)

    def attach(self, replica: Replica, channel: Channel) -> None:
        share = channel.shared if self.shared_moments else None
        replica.rebind(channel.shared("params", replica.params.detach()), share)
        # one cell for each replica, so that no count is lost to a race
        self._clocks = channel.shared("clocks", torch.zeros(channel.size, dtype=torch.int64))
        replica.count_steps_by(lambda: int(self._clocks.sum()))
        if replica.row_width is not None:  # gradients may be row-sparse
            replica.scale.share(channel.shared, channel.size, channel.rank)
            replica.scale.keep()

    def step(self, replica: Replica, channel: Channel) -> Exchange:
        heard = len(channel.living())
        # updates by others since this replica read the parameters at which it computed this gradient
        staleness = int(self._clocks.sum()) - self._last_seen
        replica.update()
        # after a resume it may be ahead of the replica's own clock, and clocks only grow
        self._clocks[channel.rank] = max(replica.clock, int(self._clocks[channel.rank]))
        self._last_seen = int(self._clocks.sum())
        return Exchange(round=replica.clock, heard=heard, staleness=staleness)

    def state(self) -> dict[str, Any]:
        return {"clocks": self._clocks.clone()}

    def load(self, state: dict[str, Any]) -> None:
        # clocks only grow, and a peer that was restored earlier may have made updates already
        torch.maximum(self._clocks, state["clocks"], out=self._clocks)
        self._last_seen = int(self._clocks.sum())
