"""What a script can measure of how its replicas agree: traffic, waiting, and how far apart they are."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from murmurate.fabric.interface import Capability
from murmurate.replicator.loop_collectives import LoopCollectives
from murmurate.replicator.replica_parts import ReplicaParts
from murmurate.replicator.replicator import BoundReplica


class MeasuredLoop(LoopCollectives):
    """A script's replicator with figures of this member. parts: parts of this replica."""

    parts: ReplicaParts

    @property
    def bytes_exchanged(self) -> int:
        """Bytes read from and written to other members so far, in steps and in collectives."""
        return super().bytes_exchanged + self.parts.bytes

    @property
    def waiting_seconds(self) -> float:
        """Seconds for which this member has waited for others so far, in steps and in collectives; of
        ``inputs`` those in which replicas agree on whether all have a next batch."""
        return super().waiting_seconds + self.parts.waiting_seconds

    def disagreement(self) -> float:
        """sqrt(mean_i ||x_i - mean||^2) / ||mean|| of the replicas' parameters x_i (all optimizers together).

        Under strategies with common rounds all replicas must call it, and wait for one another. Under the
        others nobody waits, and the x_i of another living replica is what it has published last: in its last
        step under gala, push-sum and asynchronous gossip, else at its end (see ``finish``). NaN while none
        of these is known; 0 for one replica, and under Hogwild, whose replicas have one vector. What it sends
        is not counted in ``bytes_exchanged``.
        """
        if self.strategy.behaviour.carries == "nothing":
            return 0.0
        square = norm_square = 0.0
        known = self.size
        with torch.no_grad():
            for bound in self.bound_replicas.values():
                vectors = self._known_vectors(bound)
                known = min(known, len(vectors))
                mean = torch.stack(vectors).mean(0)
                square += sum(float((x - mean).square().sum()) for x in vectors) / len(vectors)
                norm_square += float(mean.square().sum())
        alone = known == 1 and not self.strategy.common_rounds and len(self._living_replicas()) > 1
        return math.nan if alone else math.sqrt(square / max(norm_square, 1e-60))

    def _known_vectors(self, bound: BoundReplica) -> list[Tensor]:
        """The parameters [N] of this replica, and those of the others that are known."""
        own, channel = bound.replica.values().detach(), bound.channel
        bytes_before = channel.traffic.bytes
        try:
            if self.strategy.common_rounds:
                return list(channel.gather(own).values())
            if Capability.REGISTER not in channel.capabilities:
                return [own]
            others = (r for r in self._living_replicas() if r != self.rank and channel.version(r) > 0)
            return [own, *(channel.peek(r)[0] for r in others)]
        finally:
            channel.traffic.bytes = bytes_before

    def _living_replicas(self) -> list[int]:
        return [rank for rank in self.fabric.living() if rank < self.size]
