"""Warns of a replica whose gradient is NaN or infinite: the exchange makes all replicas' parameters so."""

from __future__ import annotations

import cmath
import warnings
from collections.abc import Mapping

from torch import Tensor

from murmurate.replica.vector import Replica
from murmurate.replicator.replicator import BoundReplica

# a loss that is NaN makes nearly all of the gradient NaN, and reading all of it would slow small models down
_SAMPLES = 256


class FiniteGradients:
    """Checks a sample of this replica's own gradients before every step, and warns once.

    Not on accelerators, where reading it would wait for the device, nor with a gradient scaler, which skips
    such steps. bound: the replicas by name.
    """

    def __init__(self, rank: int, bound: Mapping[str, BoundReplica]) -> None:
        self.rank, self._bound = rank, bound
        self._samples: dict[str, Tensor] = {}  # views of the gradients, which keep their memory
        self._warned = False

    def step(self, replica: Replica) -> None:
        """Before a step on the replica's own gradient."""
        if self._warned or replica.device.type != "cpu" or hasattr(replica.update, "skips_overflows"):
            return
        sample = self._samples.get(replica.name)
        if sample is None:
            sample = self._samples[replica.name] = _sample(replica.grad)
        if _is_finite(sample):
            return
        self._warned = True
        # where parameters are not finite either, the cause was an earlier step, or another replica's
        if all(_is_finite(_sample(one.replica.params.detach())) for one in self._bound.values()):
            remedy = "" if replica.clip else " With wrap_optimizer(..., clip=...) the run stops there."
            warnings.warn(
                f"the gradient of '{replica.name}' on replica {self.rank} is not finite (NaN or infinite) at "
                f"its update {replica.clock}, and the exchange passes it on. Look at this replica's batch "
                f"and loss.{remedy}",
                stacklevel=6,
            )


def _sample(vector: Tensor) -> Tensor:
    return vector[:: max(1, len(vector) // _SAMPLES)]


def _is_finite(x: Tensor) -> bool:
    # a sum of finite numbers may overflow, but is the faster check
    return cmath.isfinite(x.sum().item()) or bool(x.isfinite().all())
