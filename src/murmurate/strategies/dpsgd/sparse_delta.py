"""The messages of DPSGD where gradients are a few rows: they contain those rows, not the whole vector.

Since the last pull a node has shrunk its vector by some factor s_m and moved a few rows, so u - v is
(s_m - 1) v and increments on those rows. It pushes s_m, the rows and the increments; the master does

    v <- (1 - rho sum_m (1 - s_m)) v + rho sum_m increments_m

which is Algorithm 1, line 4, with the shrink of the present v, or of the pulled one (``sparse_master``). Its
reply is the factor by which v has shrunk since the node's version, and the rows that have changed since. Both
keep their vectors scaled, so no operation touches all rows. A message is never longer than the vector: where
too many rows have moved, those that have moved least wait for the next push (``sparse_node``).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

_HEAD_BYTES = 24  # three float64


class SparseDelta(NamedTuple):
    """Changed rows. factor: factor of all other rows. version: version of the v from which a push started,
    or to which a reply leads. row: [R]. values: [R, W]."""

    factor: float
    version: int
    row: Tensor
    values: Tensor

    def pack(self) -> Tensor:
        """[H + R + R W] in the values' dtype: header and row numbers as bits, then the values."""
        width, dtype = self.values.shape[1], self.values.dtype
        message, values = blank(self.factor, self.version, self.row, width, dtype)
        values.copy_(self.values)
        return message

    @classmethod
    def unpack(cls, x: Tensor, width: int) -> SparseDelta:
        """Raises ValueError for a malformed message."""
        head, number = _lengths(x.dtype)
        factor, version, rows = (
            x[:head].clone().view(torch.float64).tolist() if len(x) >= head else (0, 0, -1)
        )
        if not (
            0 < factor < math.inf
            and math.isfinite(version)
            and rows >= 0
            and len(x) == head + rows * (width + number)
        ):
            raise ValueError(f"a message of {len(x)} numbers is not a sparse delta of rows of {width}")
        end = head + int(rows) * number
        row = x[head:end].clone().view(_integer_type(x.dtype)).long()
        values = x[end:].reshape(-1, width)
        # the sum is four times as fast to check, and finite unless a number is not or all are huge
        if not bool(values.sum().isfinite()) and not bool(values.isfinite().all()):
            raise ValueError("rows that are not finite")
        return cls(factor, int(version), row, values)


def blank(factor: float, version: int, row: Tensor, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A packed delta, and a view of its values [R, W] to be filled in."""
    head, number = _lengths(dtype)
    end = head + len(row) * number
    message = torch.empty(end + len(row) * width, dtype=dtype)
    message[:head].copy_(torch.tensor([factor, version, len(row)], dtype=torch.float64).view(dtype))
    message[head:end].copy_(row.to(_integer_type(dtype)).view(dtype))
    return message, message[end:].view(-1, width)


def _integer_type(dtype: torch.dtype) -> torch.dtype:
    """The type of row numbers in a message of ``dtype``."""
    return torch.int64 if dtype.itemsize == 8 else torch.int32


def _lengths(dtype: torch.dtype) -> tuple[int, int]:
    """The sizes of the header and of a row number, in numbers of ``dtype``."""
    return _HEAD_BYTES // dtype.itemsize, _integer_type(dtype).itemsize // dtype.itemsize


def most_rows(width: int, vector: Tensor) -> int:
    """The most rows of a message that is shorter than ``vector`` [N]."""
    head, number = _lengths(vector.dtype)
    return max(0, (len(vector) - head - 1) // (width + number))
