"""Sums, means and losses over all pixels of an image that is spread over parts.

Every part gets the result, and computes the same loss from it. The gradient with respect to a tensor that
every part holds as a whole (a parameter, an image) is then the mean of the gradients from all parts' backward
passes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from murmurate.spatial.parts import Parts
from murmurate.spatial.tensor import FORMS, SpatialTensor, aligned, largest_of, refuse, spatial, spatial_axis


def summed(x: Tensor, parts: Parts) -> Tensor:
    """The sum of ``x`` over the parts, on every part; differentiable once. All parts must call it.

    The backward pass is the adjoint: it sums the gradients of all parts.
    """
    if parts.size == 1:
        return x
    result: Tensor = _Sum.apply(x, parts)  # type: ignore[no-untyped-call]
    return result


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, parts: Parts) -> Tensor:
        ctx.parts = parts
        return parts.sum(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.parts.sum(gradient), None


# -- sums and means -----------------------------------------------------------------------------------


@spatial("sum")
def total(x: SpatialTensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    """``x.sum(dim)``; an ordinary tensor on every part if ``dim`` is None or includes rows or columns (one of
    these alone: only where the grid cuts no other dimension)."""
    return _reduced(x, "sum", dim, keepdim, dtype)


@spatial("mean")
def mean(x: SpatialTensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    """``x.mean(dim)``; otherwise as ``total``."""
    return _reduced(x, "mean", dim, keepdim, dtype)


def _reduced(x: SpatialTensor, name: str, dim: Any, keepdim: bool, dtype: Any) -> Any:
    if name == "mean" and dtype is None and sum_dtype(x.local) != x.local.dtype:
        return _reduced(x, name, dim, keepdim, sum_dtype(x.local)).to(x.local.dtype)
    dims = [dim] if isinstance(dim, int) else list(dim or range(x.dim()))
    spatial_dims = [d for d in dims if spatial_axis(x, d)]
    if not spatial_dims:
        if not keepdim and x.dim() - len(dims) < 2:
            raise refuse(x, f"{name} over {dims}")
        own_sums = x.local.sum(dims, keepdim, dtype=dtype)
        return x.like(own_sums / _count(x, dims) if name == "mean" else own_sums)
    if len(spatial_dims) == 1 and x.parts.grid[spatial_dims[0] % x.dim() - x.dim() + 2] != x.parts.size:
        raise refuse(x, f"{name} over rows or columns alone, on a grid of {x.parts.grid} parts,")
    sums = summed(x.local.sum(dims, keepdim, dtype=dtype), x.parts)
    return sums / _count(x, dims) if name == "mean" else sums


def _count(x: SpatialTensor, dims: list[int]) -> int:
    """The number of values that a sum over ``dims`` adds up, on all parts together."""
    return math.prod(x.shape[d] for d in dims)


# -- losses -------------------------------------------------------------------------------------------

_POINTWISE: dict[str, Callable[..., Tensor]] = {
    loss.__name__: loss
    for loss in (
        functional.mse_loss,
        functional.l1_loss,
        functional.smooth_l1_loss,
        functional.huber_loss,
        functional.binary_cross_entropy,
        functional.binary_cross_entropy_with_logits,
        functional.soft_margin_loss,
    )
}


# whose mean with ``weight`` is divided by the sum of the weights, and not by the number of values
_MEANS_BY_WEIGHT = (functional.mse_loss, functional.l1_loss)


def sum_dtype(x: Tensor) -> torch.dtype:
    """The dtype to sum ``x`` in: float32 for half precision, which whole images would overflow."""
    return torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype


def _broadcast_shape(one: Any, other: Any) -> tuple[int, ...]:
    return tuple(torch.broadcast_shapes(one.shape, other.shape))  # type: ignore[no-untyped-call]


def _pointwise(loss: Callable[..., Tensor]) -> Callable[..., Any]:
    """The spatial form of a loss that is a sum or mean over single values."""

    def form(input: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
        image = largest_of((input, target))
        kwargs = {k: aligned(image, v) if k in ("weight", "pos_weight") else v for k, v in kwargs.items()}
        reduction = _reduction(image, kwargs)
        own_input, own_target = aligned(image, input), aligned(image, target)
        own_loss = loss(own_input, own_target, *args, **kwargs, reduction="none")
        if reduction == "none":
            return image.like(own_loss)
        loss_sum = summed(own_loss.sum(dtype=sum_dtype(own_loss)), image.parts)
        if reduction == "mean":
            weight = kwargs.get("weight")
            if weight is not None and loss in _MEANS_BY_WEIGHT:
                own_weight = weight.detach().expand_as(own_loss)
                loss_sum = loss_sum / summed(own_weight.sum(dtype=sum_dtype(own_weight)), image.parts)
            else:
                loss_sum = loss_sum / math.prod(_broadcast_shape(input, target))
        return loss_sum.to(own_loss.dtype)

    return form


def _reduction(x: SpatialTensor, kwargs: dict[str, Any]) -> str:
    for deprecated in ("size_average", "reduce"):
        if kwargs.pop(deprecated, None) is not None:
            raise refuse(x, f"a loss with {deprecated}")
    reduction = str(kwargs.pop("reduction", "mean"))
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"{reduction} is not a valid value for reduction")  # torch's words
    return reduction


FORMS.update({name: _pointwise(loss) for name, loss in _POINTWISE.items()})


@spatial("cross_entropy")
def cross_entropy(
    input: SpatialTensor,
    target: Any,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    **kwargs: Any,
) -> Any:
    """``torch.nn.functional.cross_entropy`` of every pixel: input [N, K, H, W]; target [N, H, W] or like
    input."""
    options = {"weight": weight, "ignore_index": ignore_index, "label_smoothing": label_smoothing}
    return _class_loss(functional.cross_entropy, input, target, options, _reduction(input, kwargs))


@spatial("nll_loss")
def nll_loss(
    input: SpatialTensor,
    target: Any,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    **kwargs: Any,
) -> Any:
    """``torch.nn.functional.nll_loss`` of every pixel: input [N, K, H, W]; target [N, H, W]."""
    options = {"weight": weight, "ignore_index": ignore_index}
    return _class_loss(functional.nll_loss, input, target, options, _reduction(input, kwargs))


def _class_loss(
    loss: Callable[..., Tensor], x: SpatialTensor, target: Any, options: dict[str, Any], reduction: str
) -> Any:
    own_target = aligned(x, target)
    own_loss = loss(x.local, own_target, **options, reduction="none")
    if reduction == "none":
        return x.like(own_loss)
    own_sum = own_loss.sum(dtype=sum_dtype(own_loss))
    if reduction == "sum":
        return summed(own_sum, x.parts).to(own_loss.dtype)
    divisor = _divisor(own_target, options["weight"], options["ignore_index"]).to(
        own_sum.device, torch.float64
    )
    sums = summed(torch.stack([own_sum.to(torch.float64), divisor]), x.parts)
    return (sums[0] / sums[1].detach()).to(own_loss.dtype)


def _divisor(own_target: Tensor, weight: Tensor | None, ignore_index: int) -> Tensor:
    """This part's addend to the divisor of a mean: the number of its pixels, or the sum of their weights."""
    if own_target.is_floating_point():  # probabilities [N, K, H, W]
        return torch.tensor(own_target.numel() // own_target.shape[1])
    kept = own_target[own_target != ignore_index]
    return torch.tensor(kept.numel()) if weight is None else weight[kept].sum(dtype=torch.float64)
