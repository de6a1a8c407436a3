"""Checks that losses and gradients are finite, and gradient clipping."""

from __future__ import annotations

import math
from numbers import Real

import torch
from torch import Tensor

from murmurate.errors import Refusal


class NotFinite(RuntimeError):
    """A loss or gradient is NaN or infinite; the message says which, where and when."""


def checked_clip(clip: float | None) -> float | None:
    """``clip``, the largest norm of a gradient. Raises Refusal unless it is None or a number above 0: a
    negative one would turn the gradient round."""
    if clip is not None and not (isinstance(clip, Real) and clip > 0):
        raise Refusal(f"clip is {clip!r}: give the largest norm of the gradient, a number above 0")
    return clip


def check_loss(loss: Tensor, name: str, clock: int) -> None:
    """Raise NotFinite for a loss [] of replica ``name`` that is NaN or infinite; not on XLA devices, where
    reading the loss would compute it twice."""
    if loss.device.type == "xla":
        return
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


def factor(norm: Tensor, max_norm: float) -> Tensor:
    """The factor, [], by which torch.nn.utils.clip_grad_norm_ multiplies a gradient of this norm."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


def clip_(gradient: Tensor, max_norm: float, name: str, clock: int) -> Tensor:
    """Clip ``gradient`` [N] to norm ``max_norm``, in place; returns its norm before clipping, []. Raises
    NotFinite only on a CPU (on a GPU the check would synchronize)."""
    norm: Tensor = torch.linalg.vector_norm(gradient)
    if norm.device.type == "cpu":
        value = norm.item()
        check_norm(value, name, clock)
        if value + 1e-6 <= max_norm:  # the factor is 1, also after rounding to float32
            return norm
    gradient.mul_(factor(norm, max_norm))
    return norm
