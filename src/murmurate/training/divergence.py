"""Periodic measurement of how far apart the replicas are, and how similar their gradients are.

Disagreement is sqrt(mean_i ||x_i - mean||^2) / ||mean||; the cosine matrix is that of GALA's Fig. 2b.
Probes have their own channel, separate from the strategies', and their messages do not count as traffic.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from murmurate.fabric.interface import Capability, Channel, Fabric
from murmurate.replica.vector import Replica
from murmurate.training.run import Run


def relative_spread(x: Tensor) -> float:
    """The disagreement of the rows of ``x`` [n, N]: sqrt(mean_i ||x_i - mean||^2) / ||mean||."""
    mean = x.mean(0)
    return float((x - mean).square().sum(1).mean().sqrt() / mean.norm().clamp_min(1e-30))


class Probe:
    """Compares one replica with its peers: each sends [2N], its parameters and gradient, through a channel.

    Members of a synchronous strategy gather, so all vectors are of the same update; other members read,
    without waiting, what their peers published last. replicas: number of learners, without a centre.
    """

    def __init__(self, replica: Replica, fabric: Fabric, synchronous: bool, replicas: int) -> None:
        self.replica, self.replicas = replica, replicas
        self.synchronous = synchronous
        self._own_vector = torch.empty(2 * len(replica), dtype=replica.params.dtype, device=replica.device)
        self.channel: Channel = fabric.channel(f"{replica.name}.probe", self._own_vector)

    def measure(self) -> dict[str, Any]:
        """Metrics ``disagreement, distance_to_mean, gradient_cosine`` (see ``docs/metrics.md``); none while
        no peer's vector is known."""
        n = len(self.replica)
        with torch.no_grad():
            self._own_vector[:n].copy_(self.replica.values())
            own_gradient = self.replica.own_gradient
            self._own_vector[n:].copy_(self.replica.grad if own_gradient is None else own_gradient)
            vectors = self._gather_peers()
            return self._compare({rank: (vector[:n], vector[n:]) for rank, vector in vectors.items()})

    def _gather_peers(self) -> dict[int, Tensor]:
        """The vectors [2N] of this member and of the peers whose vectors are known, by rank."""
        if self.synchronous:
            return self.channel.gather(self._own_vector)
        if Capability.REGISTER not in self.channel.capabilities:
            return {self.channel.rank: self._own_vector}
        self.channel.publish(self._own_vector)
        peers = [r for r in self.channel.living() if r != self.channel.rank and self.channel.version(r)]
        return {self.channel.rank: self._own_vector} | {r: self.channel.peek(r)[0] for r in peers}

    def _compare(self, members: dict[int, tuple[Tensor, Tensor]]) -> dict[str, Any]:
        """members: (parameters, gradient) by rank."""
        mine, my_gradient = members[self.channel.rank]
        cosine: list[float | None] = [None] * self.replicas
        for rank, (_, gradient) in members.items():
            cosine[rank] = float(torch.nn.functional.cosine_similarity(my_gradient, gradient, dim=0))
        if len(members) < 2:
            return {}
        mean = torch.zeros_like(mine)
        for x, _ in members.values():
            mean.add_(x, alpha=1 / len(members))
        squares = [float(torch.linalg.vector_norm(x - mean)) ** 2 for x, _ in members.values()]
        scale = float(torch.linalg.vector_norm(mean))
        return {
            "disagreement": (sum(squares) / len(squares)) ** 0.5 / max(scale, 1e-30),
            "distance_to_mean": float(torch.linalg.vector_norm(mine - mean)),
            "gradient_cosine": cosine,
        }


class Probes:
    """The probes of all of a learner's replicas, which are due by the number of its updates."""

    def __init__(self, run: Run, replicas: Iterable[Replica], fabric: Fabric, synchronous: bool) -> None:
        self._every = run.probe_every_updates if run.replicas > 1 else 0
        self._probes = [Probe(replica, fabric, synchronous, run.replicas) for replica in replicas]

    @property
    def channels(self) -> list[Channel]:
        return [probe.channel for probe in self._probes]

    def measure(self, before: int, after: int) -> dict[str, Any]:
        """Metrics of ``Probe.measure`` and ``update_norm``, if they became due since ``before`` updates; of
        several replicas in one learner, those of the last. ``after``: updates by now."""
        metrics: dict[str, Any] = {}
        if self._becomes_due(before, after):
            for probe in self._probes:
                metrics |= probe.measure()
                if probe.replica.update_norm is not None:
                    metrics["update_norm"] = float(probe.replica.update_norm)
        self.prepare(after, after - before)
        return metrics

    def prepare(self, updates: int, count: int) -> None:
        """Have the norm of the next update measured, if metrics are due after ``count`` more updates."""
        if self._becomes_due(updates, updates + count):
            for probe in self._probes:
                probe.replica.measure = True

    def _becomes_due(self, before: int, after: int) -> bool:
        """Whether a measurement becomes due between these two numbers of updates.

        It is due one update before each multiple of ``probe_every_updates``, when periodic averaging has not
        just made the replicas equal.
        """
        every = self._every
        return bool(every) and (after + 1) // every > (before + 1) // every
