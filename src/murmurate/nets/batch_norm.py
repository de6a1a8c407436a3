"""Batch normalisation with the addition and the rectifier that follow it in a residual net (Ioffe and Szegedy
2015; He et al. 2016), with statistics of a replica's own batch, of ghost batches, or of all replicas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from murmurate.nets import _normalize_kernels as kernels

SumOver = Callable[[Tensor], Tensor]  # the sum of the replicas' tensors [N]; differentiable
_ONE_VALUE = "a (ghost) batch has one value for each channel, and so no variance: use larger batches"


class BatchNorm(nn.Module):
    """y = weight (x - mean) / sqrt(variance + epsilon) + bias, then optionally + residual and max(., 0).

    In training, each channel is normalised by the batch's mean and variance; the running statistics, which
    evaluation uses, follow them with ``momentum`` (the variance unbiased, as in torch). Compiled kernels
    compute both passes on a CPU; elsewhere torch does.

    Args:
        channels: C. ghost: size of the ghost batches, parts of a batch with their own statistics (Hoffer et
            al. 2017); the last one may be smaller. 0: the whole batch.
        sum_over: sums a tensor over the replicas, for statistics of all their batches together
            (TF-Replicator, section 3.3). None: statistics of this replica's batch alone.

    Raises:
        ValueError: for ghost batches over replicas.
    """

    weight: Tensor
    bias: Tensor
    running_mean: Tensor
    running_var: Tensor

    def __init__(
        self,
        channels: int,
        *,
        ghost: int = 0,
        sum_over: SumOver | None = None,
        epsilon: float = 1e-5,
        momentum: float = 0.1,
    ) -> None:
        super().__init__()
        if ghost and sum_over is not None:
            raise ValueError("ghost batches are parts of one replica's batch: leave out ghost or sum_over")
        self.ghost, self.sum_over, self.epsilon, self.momentum = ghost, sum_over, epsilon, momentum
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))

    def forward(self, x: Tensor, residual: Tensor | None = None, rectify: bool = False) -> Tensor:
        """x and residual [B, C, H, W] to the same shape and dtype; statistics are in float32 or more.

        Raises:
            ValueError: in training, if a channel of a (ghost) batch is a single value.
        """
        if not self.training:
            return self._evaluate(x, residual, rectify)
        smallest = len(x) % self.ghost or self.ghost if self.ghost else len(x)
        if smallest * x.shape[2] * x.shape[3] == 1 and self.sum_over is None:
            raise ValueError(f"of images {list(x.shape)}, {_ONE_VALUE}")
        compiled = kernels.can_process(x, residual) and self.weight.dtype == torch.float32
        if not compiled:
            return self._in_torch(x, residual, rectify)
        y, mean, unbiased = _Normalize.apply(  # type: ignore[no-untyped-call]
            x, self.weight, self.bias, residual, rectify, self.epsilon, self.ghost, self.sum_over
        )
        self._follow(mean, unbiased)
        return cast(Tensor, y)

    def _evaluate(self, x: Tensor, residual: Tensor | None, rectify: bool) -> Tensor:
        inverse = (self.running_var + self.epsilon).rsqrt()
        scale = self.weight * inverse
        shift = self.bias - self.running_mean * scale
        needs_gradient = torch.is_grad_enabled() and any(
            t is not None and t.requires_grad for t in (x, residual, self.weight, self.bias)
        )
        if not needs_gradient and scale.dtype == torch.float32 and kernels.can_process(x, residual):
            y = torch.empty_like(x)
            kernels.apply(x, residual, scale.detach(), shift.detach(), rectify, y)
            return y
        return _finish(x * _column(scale) + _column(shift), x.dtype, residual, rectify)

    def _in_torch(self, x: Tensor, residual: Tensor | None, rectify: bool) -> Tensor:
        """What the kernels compute, in torch; by ``F.batch_norm`` where it takes the same statistics."""
        if not self.ghost and self.sum_over is None:
            running, affine = (self.running_mean, self.running_var), (self.weight, self.bias)
            y = F.batch_norm(x, *running, *affine, True, self.momentum, self.epsilon)
            return _finish(y, x.dtype, residual, rectify)
        parts, means, variances = [], [], []
        for part in _parts(x, self.ghost or len(x)):
            wide = part.to(torch.promote_types(part.dtype, torch.float32))
            count: float | Tensor = part.numel() // part.shape[1]
            if self.sum_over is None:
                variance, mean = torch.var_mean(wide, (0, 2, 3), correction=0)
            else:
                wider = wide.double()
                ones = wider.new_full((1,), count)
                sums = self.sum_over(torch.cat([wider.sum((0, 2, 3)), wider.square().sum((0, 2, 3)), ones]))
                count = sums[-1].detach()
                wide_mean, mean_square = (sums[:-1] / count).view(2, -1)
                mean, variance = wide_mean.to(wide), (mean_square - wide_mean.square()).clamp(min=0).to(wide)
            scale = self.weight * (variance + self.epsilon).rsqrt()
            parts.append(wide * _column(scale) + _column(self.bias - mean * scale))
            means.append(mean.detach())
            variances.append(_unbiased(variance.detach(), count))
        self._follow(torch.stack(means).mean(0), torch.stack(variances).mean(0))
        return _finish(torch.cat(parts) if len(parts) > 1 else parts[0], x.dtype, residual, rectify)

    @torch.no_grad()
    def _follow(self, mean: Tensor, unbiased: Tensor) -> None:
        """Move the running statistics towards those of the batch (means over its ghost batches)."""
        self.running_mean.lerp_(mean.to(self.running_mean), self.momentum)
        self.running_var.lerp_(unbiased.to(self.running_var), self.momentum)


class _Normalize(torch.autograd.Function):
    """Both passes in the compiled kernels; also returns the batch's statistics, for the running ones."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        residual: Tensor | None,
        rectify: bool,
        epsilon: float,
        ghost: int,
        sum_over: SumOver | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        y = torch.empty_like(x)
        size = ghost or len(x)
        pieces = zip(_parts(x, size), _parts(y, size), _parts(residual, size, x), strict=True)
        means, inverses, variances, counts = [], [], [], []
        for part, out, residual_part in pieces:
            mean, variance, count = _statistics(part, sum_over)
            inverse = (variance + epsilon).rsqrt()
            scale = weight * inverse.float()
            kernels.apply(part, residual_part, scale, (bias - mean * scale).float(), rectify, out)
            means.append(mean)
            inverses.append(inverse)
            counts.append(count)
            variances.append(_unbiased(variance, count))
        ctx.save_for_backward(x, y if rectify else None, weight)
        ctx.statistics = list(zip(means, inverses, counts, strict=True))
        ctx.size, ctx.sum_over, ctx.with_residual = size, sum_over, residual is not None
        mean, unbiased = torch.stack(means).mean(0), torch.stack(variances).mean(0)
        ctx.mark_non_differentiable(mean, unbiased)
        return y, mean, unbiased

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        x, y, weight = ctx.saved_tensors
        gradient = kernels.as_channels_last(gradient, x)
        # a hook on saved tensors may have laid them out anew
        x, y = kernels.as_channels_last(x, x), None if y is None else kernels.as_channels_last(y, x)
        x_gradient = torch.empty_like(x)
        residual_gradient = torch.empty_like(x) if ctx.with_residual else None
        weight_gradient = torch.zeros_like(weight, dtype=torch.float64)
        bias_gradient = torch.zeros_like(weight_gradient)
        for part, part_gradient, out, to_x, to_residual, (mean, inverse, count) in zip(
            _parts(x, ctx.size),
            _parts(gradient, ctx.size),
            _parts(y, ctx.size, x),
            _parts(x_gradient, ctx.size),
            _parts(residual_gradient, ctx.size, x),
            ctx.statistics,
            strict=True,
        ):
            total, product = kernels.gradient_sums(part_gradient, out, part, mean.float())
            bias_gradient += total
            weight_gradient += product * inverse
            if ctx.sum_over is not None:
                total, product = ctx.sum_over(torch.cat([total, product])).view(2, -1)
            # the gradient with respect to x is a g + b x + c, as mean and variance depend on x
            a = weight * inverse
            b = -a * inverse.square() * product / count
            c = -a * total / count - b * mean
            kernels.gradients(part_gradient, out, part, (a.float(), b.float(), c.float()), to_x, to_residual)
        affine = weight_gradient.to(weight), bias_gradient.to(weight)
        return x_gradient, *affine, residual_gradient, None, None, None, None


def _parts(x: Any, size: int, like: Tensor | None = None) -> Sequence[Any]:
    """``x`` in parts of ``size`` images; where it is None, a None for each part of ``like``."""
    if x is None:
        assert like is not None
        return (None,) * -(-len(like) // size)
    return cast(Sequence[Any], x.split(size))


def _statistics(x: Tensor, sum_over: SumOver | None) -> tuple[Tensor, Tensor, float]:
    """(mean [C], variance [C], count) in float64 of ``x``, or with ``sum_over`` of all replicas' ``x``."""
    mean, squares = kernels.moments(x)
    count = float(x.numel() // x.shape[1])
    if sum_over is not None:
        own_sums = torch.cat([count * mean, squares + count * mean.square(), mean.new_full((1,), count)])
        sums = sum_over(own_sums)
        count = float(sums[-1])
        mean, mean_square = (sums[:-1] / count).view(2, -1)
        return mean, (mean_square - mean.square()).clamp(min=0), count
    return mean, squares / count, count


def _unbiased(variance: Tensor, count: float | Tensor) -> Tensor:
    if count == 1:  # the count over replicas is known only now
        raise ValueError(_ONE_VALUE)
    return variance * (count / (count - 1))


def _column(values: Tensor) -> Tensor:
    return values.view(1, -1, 1, 1)


def _finish(y: Tensor, dtype: torch.dtype, residual: Tensor | None, rectify: bool) -> Tensor:
    if residual is not None:
        y = y + residual
    return (torch.relu(y) if rectify else y).to(dtype)
