"""Sums, means and losses over all pixels of an image that is spread over parts.

Every part gets the result, and computes the same loss from it. The gradient of what every part holds whole
(parameters, images) is then the mean over the parts of what each part's backward pass gives.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from murmurate.spatial.parts import Parts
from murmurate.spatial.tensor import FORMS, SpatialTensor, aligned, first_of, refuse, spatial, spatial_axis


def summed(x: Tensor, parts: Parts) -> Tensor:
    """The sum of ``x`` over the parts, on every part; differentiable once. All parts must call it.

    Backward: the sum of all parts' gradients, the adjoint.
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
    """``x.sum(dim)``: a whole tensor if ``dim`` includes rows and columns, or None."""
    return _reduced(x, "sum", dim, keepdim, dtype)


@spatial("mean")
def mean(x: SpatialTensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    """``x.mean(dim)``: as ``total``."""
    return _reduced(x, "mean", dim, keepdim, dtype)


def _reduced(x: SpatialTensor, name: str, dim: Any, keepdim: bool, dtype: Any) -> Any:
    dims = list(range(x.dim())) if dim is None else [dim] if isinstance(dim, int) else list(dim)
    pixels = [d for d in dims if spatial_axis(x, d)]
    if not pixels:
        if not keepdim and x.dim() - len(dims) < 2:
            raise refuse(x, f"{name} over {dims}")
        return x.like(x.local.sum(dims, keepdim, dtype=dtype) / (_count(x, dims) if name == "mean" else 1))
    if len(pixels) == 1 and x.parts.grid[pixels[0] % x.dim() - x.dim() + 2] != x.parts.size:
        raise refuse(x, f"{name} over rows or columns alone, on a grid of {x.parts.grid} parts,")
    whole = summed(x.local.sum(dims, keepdim, dtype=dtype), x.parts)
    return whole / _count(x, dims) if name == "mean" else whole


def _count(x: SpatialTensor, dims: list[int]) -> int:
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


def _pointwise(loss: Callable[..., Tensor]) -> Callable[..., Any]:
    def form(input: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
        image = first_of((input, target))
        kwargs = {k: aligned(image, v) if k == "weight" else v for k, v in kwargs.items()}
        reduction = _reduction(image, kwargs)
        each = "none" if reduction == "none" else "sum"
        found = loss(aligned(image, input), aligned(image, target), *args, **kwargs, reduction=each)
        if reduction == "none":
            return image.like(found)
        whole = summed(found, image.parts)
        return whole if reduction == "sum" else whole / image.numel()

    return form


def _reduction(x: SpatialTensor, kwargs: dict[str, Any]) -> str:
    for old in ("size_average", "reduce"):
        if kwargs.pop(old, None) is not None:
            raise refuse(x, f"a loss with {old}")
    return str(kwargs.pop("reduction", "mean"))


FORMS.update({name: _pointwise(loss) for name, loss in _POINTWISE.items()})


@spatial("cross_entropy")
def cross_entropy(
    input: SpatialTensor,
    target: Any,
    weight: Tensor | None = None,
    size_average: None = None,
    ignore_index: int = -100,
    reduce: None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """``torch.nn.functional.cross_entropy`` of every pixel: [N, K, H, W]; target [N, H, W] or as input."""
    goal = aligned(input, target)
    options = {"weight": weight, "ignore_index": ignore_index, "label_smoothing": label_smoothing}
    return _of_classes(functional.cross_entropy, input, goal, options, reduction)


@spatial("nll_loss")
def nll_loss(
    input: SpatialTensor,
    target: Any,
    weight: Tensor | None = None,
    size_average: None = None,
    ignore_index: int = -100,
    reduce: None = None,
    reduction: str = "mean",
) -> Any:
    """``torch.nn.functional.nll_loss`` of every pixel: input [N, K, H, W]; target [N, H, W]."""
    options = {"weight": weight, "ignore_index": ignore_index}
    return _of_classes(functional.nll_loss, input, aligned(input, target), options, reduction)


def _of_classes(
    loss: Callable[..., Tensor], x: SpatialTensor, goal: Tensor, options: dict[str, Any], reduction: str
) -> Any:
    if reduction == "none":
        return x.like(loss(x.local, goal, **options, reduction="none"))
    found = loss(x.local, goal, **options, reduction="sum")
    if reduction == "sum":
        return summed(found, x.parts)
    counted = _divisor(goal, options["weight"], options["ignore_index"]).to(found.device, torch.float64)
    both = summed(torch.stack([found.to(torch.float64), counted]), x.parts)
    return (both[0] / both[1].detach()).to(found.dtype)


def _divisor(goal: Tensor, weight: Tensor | None, ignore_index: int) -> Tensor:
    """By what this part's share of the mean is divided: its pixels, or the sum of their weights."""
    if goal.is_floating_point():  # probabilities [N, K, H, W]
        return torch.tensor(goal.numel() // goal.shape[1])
    kept = goal[goal != ignore_index]
    return torch.tensor(kept.numel()) if weight is None else weight[kept].sum()
