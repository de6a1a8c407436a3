"""Row-sparse gradients.

A natural gradient ``x - sum of rows`` shrinks the whole vector and changes a few rows of it. With the
parameters written as ``scale * vector`` (``scale``) a step costs only those rows: the scale shrinks, and the
rows' increment is divided by the scale.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from murmurate.errors import RunFailed
from murmurate.native import kernels


class StepTooLarge(RunFailed, ValueError):
    """A step would shrink a vector to zero or beyond."""


class Rows(NamedTuple):
    """The gradient ``shrink * x``, from which ``values`` are subtracted in a few rows of x [V, W].

    row: [R] int64, distinct. values: [R, W].
    """

    row: Tensor
    values: Tensor
    shrink: float = 1.0

    def dense(self, x: Tensor) -> Tensor:
        """The gradient at x [N], [N]."""
        gradient = self.shrink * x
        add_rows(gradient, self, -1.0)
        return gradient


def check_rows(rows: Rows, x: Tensor) -> None:
    """Raise ValueError for rows outside a vector x [N], or of another shape, dtype or device."""
    row, values = rows.row, rows.values
    shapes_fit = row.dim() == 1 and values.dim() == 2 and len(row) == len(values) and values.shape[1] > 0
    if not shapes_fit or x.numel() % values.shape[1]:
        raise ValueError(
            "row must be [R] and values [R, W], for a vector of rows of W numbers; they are "
            f"{list(row.shape)} and {list(values.shape)} for a vector of {x.numel()}"
        )
    if row.dtype != torch.int64 or values.dtype != x.dtype or {row.device, values.device} != {x.device}:
        raise ValueError(
            f"row must be int64 and values {x.dtype}, both on {x.device}; they are {row.dtype} on "
            f"{row.device} and {values.dtype} on {values.device}"
        )
    if len(row) and not 0 <= int(row.min()) <= int(row.max()) < x.numel() // values.shape[1]:
        wrong = int(row.min() if row.min() < 0 else row.max())
        raise ValueError(f"there is no row {wrong}: the vector has {x.numel() // values.shape[1]}")


def check_plain(optimizer: torch.optim.Optimizer, clip: float | None, name: str) -> None:
    """Raise ValueError unless the optimizer's step changes only the rows of the gradient."""
    group = optimizer.param_groups[0]
    is_sgd = type(optimizer) is torch.optim.SGD and len(optimizer.param_groups) == 1 and clip is None
    if not is_sgd or group["momentum"] or group["weight_decay"] or group["maximize"]:
        raise ValueError(
            f"replica '{name}' has row-sparse gradients, and only plain SGD leaves the other rows "
            "unchanged: use torch.optim.SGD without momentum, weight decay and clipping, or dense gradients."
        )


def add_rows(x: Tensor, rows: Rows, step: float) -> None:
    """x [N] += step * values, in place, without locks: of two concurrent writes to a row one may be lost."""
    width = rows.values.shape[1]
    fits_kernel = (
        x.dtype == torch.float32 and x.device.type == "cpu" and width % 16 == 0 and x.is_contiguous()
    )
    if kernels is None or not fits_kernel:
        x.view(-1, width).index_add_(0, rows.row, rows.values, alpha=step)
        return
    row, values = rows.row.contiguous(), rows.values.contiguous()
    kernels.add_rows(x.data_ptr(), width, row.data_ptr(), len(row), values.data_ptr(), step)
