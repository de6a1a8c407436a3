"""Losses and gradients that are finite, and gradients no longer than asked."""

from __future__ import annotations

import math

import torch
from torch import Tensor


class NotFinite(RuntimeError):
    """A loss or gradient is NaN or infinite; the message says which, where and when."""


def check_loss(loss: Tensor, name: str, clock: int) -> None:
    """Raise NotFinite for a loss [] of replica ``name`` that is NaN or infinite."""
    value = loss.item()
    if not math.isfinite(value):
        raise NotFinite(
            f"the loss of replica '{name}' is {value} at its update {clock}. "
            "A smaller learning rate or gradient clipping usually helps."
        )


def check_norm(norm: float, name: str, clock: int) -> None:
    """Raise NotFinite for the norm of a gradient that is NaN or infinite."""
    if not math.isfinite(norm):
        raise NotFinite(
            f"the gradient of replica '{name}' is not finite at its update {clock}, though its loss was. "
            "A smaller learning rate usually helps."
        )


def factor(norm: Tensor, most: float) -> Tensor:
    """[] what torch.nn.utils.clip_grad_norm_ multiplies a gradient of this norm by."""
    return (most / (norm + 1e-6)).clamp(max=1.0)


def clip_(gradient: Tensor, most: float, name: str, clock: int) -> Tensor:
    """Bound the norm of ``gradient`` [N], in place; [] what it was. Raises NotFinite where to look costs
    nothing, which is not on a GPU."""
    norm: Tensor = torch.linalg.vector_norm(gradient)
    if norm.device.type == "cpu":
        size = norm.item()
        check_norm(size, name, clock)
        if size + 1e-6 <= most:  # the factor is 1: it is not less in float32, as rounding keeps the order
            return norm
    gradient.mul_(factor(norm, most))
    return norm
