"""The compiled bias and ReLU of ``nets/passes.py``."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from murmurate import native
from murmurate.nets._conv_kernels import is_traced

_DTYPES = (torch.float32, torch.bfloat16)
_MOST_WIDE = 1 << 16  # the kernel's limit (native/normalize.hpp)


def add_and_rectify_(x: Tensor, bias: Tensor) -> Tensor:
    """``x = relu(x + bias)`` in place, for x [E, B, H] and bias [E, 1, H].

    On the host, in float32 or bfloat16, both are done in one pass over memory: the kernel of batch
    normalisation with a scale of 1. NaN stays NaN.
    """
    members, rows, width = x.shape
    kernels = native.kernels
    is_readable = x.dtype == bias.dtype and _is_readable(x) and _is_readable(bias)
    if kernels is None or is_traced() or not is_readable:
        return x.add_(bias).relu_()
    wide_bias = bias if bias.dtype == torch.float32 else bias.float()
    threads, ones, size = torch.get_num_threads(), _ones(width).data_ptr(), x.element_size()
    address, shift = x.data_ptr(), wide_bias.data_ptr()
    for _ in range(members):
        kernels.normalize_apply(rows, width, 8 * size, address, 0, ones, shift, True, address, threads)
        address += size * rows * width
        shift += 4 * width
    return x


def _is_readable(x: Tensor) -> bool:
    is_plain = x.dtype in _DTYPES and x.is_cpu and x.is_contiguous()
    return is_plain and x.numel() > 0 and x.shape[-1] <= _MOST_WIDE


@lru_cache(maxsize=16)
def _ones(width: int) -> Tensor:
    return torch.ones(width, dtype=torch.float32, device="cpu")  # whatever torch's defaults are
