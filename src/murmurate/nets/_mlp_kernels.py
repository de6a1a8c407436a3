"""The compiled bias and ReLU of ``nets/passes.py``."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from murmurate import native
from murmurate.nets._conv_kernels import is_traced

_MOST_WIDE = 1 << 16  # the kernel's limit (native/normalize.hpp)


def add_and_rectify_(x: Tensor, bias: Tensor) -> Tensor:
    """``x = relu(x + bias)`` in place, for x [E, B, H] and bias [E, 1, H].

    On the host, in float32, both are done in one pass over memory: the kernel of batch normalisation with a
    scale of 1. NaN stays NaN.
    """
    members, rows, width = x.shape
    kernels = native.kernels
    if kernels is None or is_traced() or not (_is_readable(x) and _is_readable(bias)):
        return x.add_(bias).relu_()
    threads, ones = torch.get_num_threads(), _ones(width).data_ptr()
    address, shift = x.data_ptr(), bias.data_ptr()
    for _ in range(members):
        kernels.normalize_apply(rows, width, 32, address, 0, ones, shift, True, address, threads)
        address += 4 * rows * width
        shift += 4 * width
    return x


def _is_readable(x: Tensor) -> bool:
    is_plain = x.dtype == torch.float32 and x.is_cpu and x.is_contiguous()
    return is_plain and x.numel() > 0 and x.shape[-1] <= _MOST_WIDE


@lru_cache(maxsize=16)
def _ones(width: int) -> Tensor:
    return torch.ones(width, dtype=torch.float32, device="cpu")  # whatever torch's defaults are
