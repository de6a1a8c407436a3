"""The compiled passes of ``nets/batch_norm.py`` over channels-last images in host memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from murmurate import native
from murmurate.nets._conv_kernels import BITS, is_readable, is_traced

_MOST_CHANNELS = 1 << 16  # the kernels' limit (native/normalize.hpp)


def can_process(x: Tensor, residual: Tensor | None) -> bool:
    """Whether the kernels can process ``x`` [B, C, H, W] and ``residual``: both must be dense, channels last,
    of the same shape and dtype (bfloat16 or float32), of at most 65,536 channels and in host memory, and
    torch must neither record nor transform operations."""
    if native.kernels is None or is_traced() or x.dtype not in BITS or not x.numel():
        return False
    if x.shape[1] > _MOST_CHANNELS or not _is_readable(x):
        return False
    residual_matches = residual is None or (residual.shape, residual.dtype) == (x.shape, x.dtype)
    return residual_matches and (residual is None or _is_readable(residual))


def as_channels_last(x: Tensor, like: Tensor) -> Tensor:
    """``x``, or a copy of it that the kernels can read, of the dtype of ``like``."""
    return x.to(like.dtype).contiguous(memory_format=torch.channels_last)


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """(mean, sum of squared differences from the mean), each [C] float64, of x [B, C, H, W]."""
    mean, squares = x.new_empty((2, x.shape[1]), dtype=torch.float64)
    _kernels().normalize_moments(*_size(x), *_addresses(x, mean, squares), torch.get_num_threads())
    return mean, squares


def apply(
    x: Tensor, residual: Tensor | None, scale: Tensor, shift: Tensor, rectify: bool, out: Tensor
) -> None:
    """out = scale x + shift (+ residual), with a ReLU if ``rectify``; scale and shift are [C] float32, and
    ``out`` is like ``x``."""
    addresses = _addresses(x, residual, scale, shift)
    _kernels().normalize_apply(*_size(x), *addresses, rectify, out.data_ptr(), torch.get_num_threads())


def gradient_sums(gradient: Tensor, y: Tensor | None, x: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
    """(sum of g, sum of g (x - mean)), each [C] float64. g is ``gradient``, with 0 where the output ``y`` of
    a ReLU is not above 0; y: None without a ReLU. mean: [C] float32."""
    total, product = x.new_empty((2, x.shape[1]), dtype=torch.float64)
    addresses = _addresses(gradient, y, x, mean, total, product)
    _kernels().normalize_gradient_sums(*_size(x), *addresses, torch.get_num_threads())
    return total, product


def gradients(
    gradient: Tensor,
    y: Tensor | None,
    x: Tensor,
    coefficients: tuple[Tensor, Tensor, Tensor],
    x_gradient: Tensor,
    residual_gradient: Tensor | None,
) -> None:
    """Write ``x_gradient`` = a g + b x + c, where ``coefficients`` are (a, b, c), each [C] float32, and
    ``residual_gradient`` = g; g as in ``gradient_sums``."""
    addresses = _addresses(gradient, y, x, *coefficients, x_gradient, residual_gradient)
    _kernels().normalize_gradient(*_size(x), *addresses, torch.get_num_threads())


def _kernels() -> Any:
    assert native.kernels is not None
    return native.kernels


def _size(x: Tensor) -> tuple[int, int, int]:
    """(values of a channel, channels, bits of a value)."""
    return x.numel() // x.shape[1], x.shape[1], BITS[x.dtype]


def _addresses(*tensors: Tensor | None) -> list[int]:
    return [0 if x is None else x.data_ptr() for x in tensors]


def _is_readable(x: Tensor) -> bool:
    return is_readable(x) and x.is_contiguous(memory_format=torch.channels_last)
