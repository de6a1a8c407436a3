"""Batch, group, layer and instance normalisation with the statistics of the whole image.

Each part computes mean and variance of its own pixels, and one exchange combines those of all parts (Chan et
al. 1979), which is numerically stable where mean squares minus squared means are not. The backward pass needs
one sum over the parts.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from murmurate.spatial.parts import Parts
from murmurate.spatial.tensor import SpatialTensor, aligned, spatial
from murmurate.spatial.window import format_of


class Statistics(NamedTuple):
    """Mean, biased variance and number of values of each normalised group, over all parts."""

    mean: Tensor
    variance: Tensor
    number: int


@spatial("batch_norm")
def batch_norm(
    x: SpatialTensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> SpatialTensor:
    """``torch.nn.functional.batch_norm`` for x [N, C, H, W]; running statistics stay equal on all parts."""
    if not training and running_mean is not None:
        return x.like(
            functional.batch_norm(x.local, running_mean, running_var, weight, bias, False, momentum, eps)
        )
    statistics = _moments(x.local, x.numel() // x.shape[1], x.parts)
    if training and running_mean is not None and running_var is not None:
        _follow(running_mean, statistics.mean, momentum)
        _follow(
            running_var, statistics.variance * (statistics.number / max(statistics.number - 1, 1)), momentum
        )
    return x.like(_by_channel(x.local, weight, bias, statistics, eps, x.parts))


@spatial("group_norm")
def group_norm(
    x: SpatialTensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> SpatialTensor:
    """``torch.nn.functional.group_norm`` for x [N, C, H, W]. Raises ValueError if C is no multiple of
    ``num_groups``."""
    batch, channels = x.shape[:2]
    if channels % num_groups:
        raise ValueError(f"group_norm with {num_groups} groups of {channels} channels: use a divisor of them")
    grouped = x.local.reshape(1, batch * num_groups, -1, x.local.shape[-1])
    statistics = _moments(grouped, x.numel() // (batch * num_groups), x.parts)
    y = _by_channel(grouped, None, None, statistics, eps, x.parts).view(batch, channels, *x.local.shape[2:])
    shape = [1, -1, *[1] * (x.dim() - 2)]
    if weight is not None:
        y = y * weight.view(shape)
    if bias is not None:
        y = y + bias.view(shape)
    return x.like(y.to(x.dtype))


@spatial("instance_norm")
def instance_norm(
    x: SpatialTensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> SpatialTensor:
    """``torch.nn.functional.instance_norm`` for x [N, C, H, W]."""
    if not use_input_stats:
        y: SpatialTensor = batch_norm(x, running_mean, running_var, weight, bias, False, momentum, eps)
        return y
    batch, channels = x.shape[:2]
    flat = x.local.reshape(1, batch * channels, *x.local.shape[2:])
    statistics = _moments(flat, math.prod(x.shape[2:]), x.parts)
    if running_mean is not None and running_var is not None:
        unbiased = statistics.variance * (statistics.number / max(statistics.number - 1, 1))
        _follow(running_mean, statistics.mean.view(batch, channels).mean(0), momentum)
        _follow(running_var, unbiased.view(batch, channels).mean(0), momentum)
    repeated = [None if p is None else p.repeat(batch) for p in (weight, bias)]
    normalised = _by_channel(flat, repeated[0], repeated[1], statistics, eps, x.parts)
    return x.like(normalised.view(x.local.shape))


@spatial("layer_norm")
def layer_norm(
    x: SpatialTensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> SpatialTensor:
    """``torch.nn.functional.layer_norm`` over the last dimensions, rows and columns included.

    Raises ValueError for another shape than the whole image's last dimensions, at least two.
    """
    sizes = [normalized_shape] if isinstance(normalized_shape, int) else list(normalized_shape)
    if len(sizes) < 2 or list(x.shape[-len(sizes) :]) != sizes:
        raise ValueError(
            f"layer_norm over {sizes} of an image of {list(x.shape)}: give its last dimensions, at least two"
        )
    groups = x.numel() // math.prod(sizes)
    grouped = x.local.reshape(1, groups, -1, x.local.shape[-1])
    statistics = _moments(grouped, math.prod(sizes), x.parts)
    y = _by_channel(grouped, None, None, statistics, eps, x.parts).view(x.local.shape)
    if weight is not None:
        y = y * aligned(x, weight)
    if bias is not None:
        y = y + aligned(x, bias)
    return x.like(y.to(x.dtype))


def _follow(running: Tensor, present: Tensor, momentum: float) -> None:
    """Move a running statistic towards the present batch's."""
    running.lerp_(present.to(running.dtype), momentum)


def _moments(x: Tensor, number: int, parts: Parts) -> Statistics:
    """Mean and variance [C] over all parts' x [N, C, ...]. number: values of a channel in all of them."""
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    with torch.no_grad():
        unused = torch.zeros(2, x.shape[1], dtype=dtype, device=x.device)  # running statistics
        mean, variance = torch.ops.aten.batch_norm_update_stats(x, unused[0], unused[1], 0.0)
        if parts.size == 1:
            return Statistics(mean, variance, number)
        own_number = torch.full_like(mean, x.numel() // x.shape[1])
        shares = [(m, v, n / number) for m, v, n in parts.gather(torch.stack([mean, variance, own_number]))]
        # added up in the order of the parts, so that all of them get the same bits
        joint = functools.reduce(torch.add, [m * share for m, _, share in shares])
        variance = functools.reduce(torch.add, [(v + (m - joint) ** 2) * share for m, v, share in shares])
        return Statistics(joint, variance, number)


def _by_channel(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, statistics: Statistics, eps: float, parts: Parts
) -> Tensor:
    y: Tensor = _NormaliseChannels.apply(x, weight, bias, statistics, eps, parts)  # type: ignore[no-untyped-call]
    return y


class _NormaliseChannels(torch.autograd.Function):
    """weight * (x - mean) / sqrt(variance + eps) + bias for each channel of x [N, C, ...], where mean and
    variance depend on x on all parts. weight, bias: [C]."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        statistics: Statistics,
        eps: float,
        parts: Parts,
    ) -> Tensor:
        inverse = torch.rsqrt(statistics.variance + eps)
        ctx.save_for_backward(x, weight, statistics.mean, statistics.variance, inverse)
        ctx.eps, ctx.number, ctx.parts = eps, statistics.number, parts
        ctx.bias_dtype = None if bias is None else bias.dtype
        scale = inverse if weight is None else inverse * weight.to(inverse.dtype)
        shift = -statistics.mean * scale
        return _scaled(x, scale, shift if bias is None else shift + bias.to(shift.dtype))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight, mean, variance, inverse = ctx.saved_tensors
        x, gradient = _restrided(x), _restrided(gradient)
        # a backward pass with fixed statistics and weights of 1, whose gradients with respect to weight and
        # bias are the sums of gradient * normalised x and of gradient
        ones = torch.ones_like(mean)
        _, product, total = torch.ops.aten.native_batch_norm_backward(
            gradient, x, ones, mean, variance, None, None, False, ctx.eps, [False, True, True]
        )
        weight_gradient = None if weight is None else product.to(weight.dtype)
        bias_gradient = None if ctx.bias_dtype is None else total.to(ctx.bias_dtype)
        if not ctx.needs_input_grad[0]:
            return None, weight_gradient, bias_gradient, None, None, None
        sums = torch.stack([total, product])
        mean_gradient, mean_product = (ctx.parts.sum(sums) if ctx.parts.size > 1 else sums) / ctx.number
        scale = inverse if weight is None else inverse * weight.to(inverse.dtype)
        slope = -scale * inverse * mean_product
        x_gradient = _scaled(x, slope, -scale * mean_gradient - slope * mean)
        shape = [1, -1, *[1] * (x.dim() - 2)]
        x_gradient.addcmul_(gradient, scale.to(x_gradient.dtype).view(shape))
        return x_gradient, weight_gradient, bias_gradient, None, None, None


def _restrided(x: Tensor) -> Tensor:
    """``x`` with the usual strides if it is channels last. A view of one image may have others, from which
    torch's kernel on a CPU concludes that ``x`` and a contiguous tensor are in the same format."""
    if format_of(x) is not torch.channels_last:
        return x
    _, channels, rows, columns = x.shape
    return x.as_strided(x.shape, (rows * columns * channels, 1, columns * channels, channels))


def _scaled(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """scale * x + shift for each channel. It is computed as a batch normalisation in evaluation mode, which
    takes one pass in any memory format."""
    return torch.native_batch_norm(
        x, scale, shift, torch.zeros_like(scale), torch.ones_like(scale), False, 0.0, 0.0
    )[0]
