"""``nets.batch_norm.BatchNorm`` over the parts of a replica: its kernels process the pixels of one part, and
its sums are over all parts, or over all parts of all replicas."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from murmurate.errors import Refusal
from murmurate.nets.batch_norm import BatchNorm, SumOver
from murmurate.spatial.parts import Parts
from murmurate.spatial.reductions import summed
from murmurate.spatial.tensor import SpatialTensor, aligned


class NormOverParts:
    """Makes ``norm`` normalise images that are spread over ``parts``, until ``remove`` is called.

    Raises Refusal for ghost batches, whose statistics are of a few images on one part.
    """

    def __init__(self, norm: BatchNorm, parts: Parts, name: str) -> None:
        if norm.ghost:
            raise Refusal(
                f"'{name}' takes statistics of ghost batches, which is not possible over parts: use "
                "local ones (--agent.batch-norm local)"
            )
        self._norm, self._parts, self._over_replicas = norm, parts, norm.sum_over
        norm.__dict__["forward"] = self._forward

    def remove(self) -> None:
        """Restore the forward pass of ``norm``."""
        del self._norm.__dict__["forward"]

    def _forward(self, x: Any, residual: Any = None, rectify: bool = False) -> Any:
        norm = self._norm
        if not isinstance(x, SpatialTensor):
            return BatchNorm.forward(norm, x, residual, rectify)
        try:
            # only for this call and its backward pass: other calls, on whole images, do not involve the other
            # parts
            norm.sum_over = self._sum_over if self._parts.size > 1 else self._over_replicas
            own, own_residual = x.local, None if residual is None else aligned(x, residual)
            if norm.training and own.is_cpu:
                # The kernels send other sums than torch's backward pass, so all parts or none must run them.
                # They take channels-last images alone, and a single pixel always counts as one.
                own = own.contiguous(memory_format=torch.channels_last)
                if own_residual is not None:
                    own_residual = own_residual.contiguous(memory_format=torch.channels_last)
            return x.like(BatchNorm.forward(norm, own, own_residual, rectify))
        finally:
            norm.sum_over = self._over_replicas

    def _sum_over(self, x: Tensor) -> Tensor:
        if self._over_replicas is None:
            return summed(x, self._parts)
        total: Tensor = _SumOverReplicas.apply(x, self._parts, self._over_replicas)  # type: ignore[no-untyped-call]
        return total


class _SumOverReplicas(torch.autograd.Function):
    """The sum over all parts of all replicas; the backward pass is the same sum, of the gradients.

    Only the first part of each replica sums over replicas; the others copy its result. So all parts of a
    replica have the same bits, even if another replica dies meanwhile.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, parts: Parts, over_replicas: SumOver) -> Tensor:
        ctx.parts, ctx.over_replicas = parts, over_replicas
        return _over_all(x, parts, over_replicas)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _over_all(gradient, ctx.parts, ctx.over_replicas), None, None


def _over_all(x: Tensor, parts: Parts, over_replicas: SumOver) -> Tensor:
    total = parts.sum(x)
    return parts.from_leader(over_replicas(total) if parts.rank == 0 else total)
