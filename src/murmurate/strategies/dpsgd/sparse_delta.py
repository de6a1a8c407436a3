"""The messages of DPSGD where gradients are row-sparse: they contain a few rows, not the whole vector.

Since the last pull a node has multiplied its vector u by some s_m and added increments to a few rows, so
u - v is (s_m - 1) v plus these increments. It pushes s_m, the rows and the increments; the master does

    v <- (1 - rho sum_m (1 - s_m)) v + rho sum_m increments_m

which is Algorithm 1, line 4. What shrinks is the present v, or instead the v that was pulled
(``sparse_master``). The reply is the factor by which v has shrunk since the node's version, and the rows that
have changed since. Node and master store each vector as a scale times a tensor, so no operation touches all
rows. A message is never longer than the vector: where more rows have moved than fit, those that have moved
least wait for the next push, or, if many do not fit, the whole vector is sent (``sparse_node``).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

_HEAD_BYTES = 24  # three float64: factor, version, number of rows


class SparseDelta(NamedTuple):
    """A push: s_m, the version of v from which it started, and the increments of its rows. Or a reply: the
    factor of all rows that it does not contain, the version of v to which it leads, and the values of its
    rows.

    row: [R], row numbers. values: [R, W].
    """

    factor: float
    version: int
    row: Tensor
    values: Tensor

    def pack(self) -> Tensor:
        """One tensor of the values' dtype: the bits of the header and of the row numbers, then the values."""
        width, dtype = self.values.shape[1], self.values.dtype
        message, values = blank(self.factor, self.version, self.row, width, dtype)
        values.copy_(self.values)
        return message

    @classmethod
    def unpack(cls, x: Tensor, width: int) -> SparseDelta:
        """The delta from which ``x`` was packed. Raises ValueError for a malformed message."""
        head, index_length = _lengths(x.dtype)
        factor, version, rows = (
            x[:head].clone().view(torch.float64).tolist() if len(x) >= head else (0, 0, -1)
        )
        if not (
            0 < factor < math.inf
            and math.isfinite(version)
            and rows >= 0
            and len(x) == head + rows * (width + index_length)
        ):
            raise ValueError(
                f"a message of {len(x)} numbers is not a sparse delta with rows of {width} numbers"
            )
        end = head + int(rows) * index_length
        row = x[head:end].clone().view(_integer_type(x.dtype)).long()
        values = x[end:].reshape(-1, width)
        # the sum is four times as fast to check; it can be infinite although all values are finite
        if not bool(values.sum().isfinite()) and not bool(values.isfinite().all()):
            raise ValueError("the rows of a sparse delta are not finite")
        return cls(factor, int(version), row, values)


def blank(factor: float, version: int, row: Tensor, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(a packed delta, a view of its values [R, W], which have yet to be written)."""
    head, index_length = _lengths(dtype)
    end = head + len(row) * index_length
    message = torch.empty(end + len(row) * width, dtype=dtype)
    message[:head].copy_(torch.tensor([factor, version, len(row)], dtype=torch.float64).view(dtype))
    message[head:end].copy_(row.to(_integer_type(dtype)).view(dtype))
    return message, message[end:].view(-1, width)


def _integer_type(dtype: torch.dtype) -> torch.dtype:
    """The type of row numbers in a message of ``dtype``."""
    return torch.int64 if dtype.itemsize == 8 else torch.int32


def _lengths(dtype: torch.dtype) -> tuple[int, int]:
    """The lengths of the header and of a row number, in elements of ``dtype``."""
    return _HEAD_BYTES // dtype.itemsize, _integer_type(dtype).itemsize // dtype.itemsize


def most_rows(width: int, vector: Tensor) -> int:
    """The largest number of rows with which a message is shorter than ``vector`` [N]."""
    head, index_length = _lengths(vector.dtype)
    return max(0, (len(vector) - head - 1) // (width + index_length))
