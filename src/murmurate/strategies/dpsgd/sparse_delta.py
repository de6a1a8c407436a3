"""DPSGD's exchange for gradients of a few rows: what is sent costs those rows, not the vector.

Since the last pull a node has shrunk its vector by some factor s_m and moved a few rows, so u - v is
(s_m - 1) v and increments on those rows. It pushes s_m, the rows and the increments; the master does

    v <- (1 - rho sum_m (1 - s_m)) v + rho sum_m increments_m

which is Algorithm 1, line 4, with the shrink taken of the present v, or of the pulled one (``_master_rows``).
Its answer is by what v has shrunk since the version that the node had, and the rows that have changed since.
Between the two, both keep their vectors scaled, and nothing touches all of them. Where nearly all rows have
moved they are pushed as rows too. As a message is never longer than the vector, those that have moved least
then wait for the next push.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from murmurate.replica.sparse import LEAST_SCALE, Rows, add_rows
from murmurate.replica.vector import Replica

_HEAD_BYTES = 24  # three float64
_MOST_SHRUNK = -25.0  # logarithm of a scale at which what it scales has lost its numbers' digits
_NEARLY_ALL = 0.9  # of the rows that have moved, that a message of them holds; else it is the vector


class Parcel(NamedTuple):
    """factor: what all else has shrunk to. version: of v, that it was made from or is. row: [R].
    values: [R, W]."""

    factor: float
    version: int
    row: Tensor
    values: Tensor

    def pack(self) -> Tensor:
        """[H + R + R W] in the values' dtype: the head and the rows' numbers by their bits, the values."""
        width, dtype = self.values.shape[1], self.values.dtype
        message, values = blank(self.factor, self.version, self.row, width, dtype)
        values.copy_(self.values)
        return message

    @classmethod
    def unpack(cls, x: Tensor, width: int) -> Parcel:
        """Raises ValueError for a message that nobody packed."""
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
            raise ValueError(f"a message of {len(x)} numbers is no parcel of rows of {width}")
        end = head + int(rows) * number
        row = x[head:end].clone().view(_whole(x.dtype)).long()
        values = x[end:].reshape(-1, width)
        # a sum is four times as quick, and it is finite unless a number is not or all are huge
        if not bool(values.sum().isfinite()) and not bool(values.isfinite().all()):
            raise ValueError("rows that are not finite")
        return cls(factor, int(version), row, values)


def blank(factor: float, version: int, row: Tensor, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A packed parcel, and its values [R, W] to be filled in."""
    head, number = _lengths(dtype)
    end = head + len(row) * number
    message = torch.empty(end + len(row) * width, dtype=dtype)
    message[:head].copy_(torch.tensor([factor, version, len(row)], dtype=torch.float64).view(dtype))
    message[head:end].copy_(row.to(_whole(dtype)).view(dtype))
    return message, message[end:].view(-1, width)


def _whole(dtype: torch.dtype) -> torch.dtype:
    """Of a row's number in a message of ``dtype``."""
    return torch.int64 if dtype.itemsize == 8 else torch.int32


def _lengths(dtype: torch.dtype) -> tuple[int, int]:
    """Numbers of ``dtype`` that the head takes in a message, and that the number of a row takes."""
    return _HEAD_BYTES // dtype.itemsize, _whole(dtype).itemsize // dtype.itemsize


def fits(rows: int, width: int, vector: Tensor) -> bool:
    """Whether so many rows are a shorter message than ``vector`` [N]."""
    return rows <= most_rows(width, vector)


def most_rows(width: int, vector: Tensor) -> int:
    """Rows of a message that is shorter than ``vector`` [N]."""
    head, number = _lengths(vector.dtype)
    return max(0, (len(vector) - head - 1) // (width + number))


class NodeRows:
    """What the threads of a node know together of its scaled u and base.

    scales: [3] float64, shared: the base's logarithm, that of s_m of the last push, and whether rows were
    followed at all. touched: [N / W] uint8, shared: 1 for rows moved since the last push, 2 for those of a
    push that may not have arrived. A row too many costs its bytes and nothing else: what is pushed is u - v.
    """

    def __init__(self, replica: Replica, base: Tensor, shared: Callable[[str, Tensor], Tensor]) -> None:
        self.width = replica.row_width or 1
        self._replica, self._base = replica, base
        self._foreign = False
        self._scales = shared("scales", torch.zeros(3, dtype=torch.float64))
        rows = len(replica) // self.width if replica.row_width else 1
        self.touched = shared("touched", torch.zeros(rows, dtype=torch.uint8))
        if replica.row_width:
            replica.touched = self.touched

    @property
    def stretched(self) -> bool:
        """u has shrunk so much since the last push that the pulled v hardly counts in it any more."""
        return self._replica.scale.logarithm - float(self._scales[0]) < _MOST_SHRUNK

    @property
    def used(self) -> bool:
        return bool(self._scales[2]) or self._replica.scale.logarithm != 0.0

    def _views(self) -> tuple[Tensor, Tensor]:
        return self._replica.params.detach().view(-1, self.width), self._base.view(-1, self.width)

    def values(self) -> Tensor:
        """[N] the base."""
        return self._base * math.exp(float(self._scales[0]))

    def take(self, version: int) -> Parcel:
        """What is to be pushed, while nobody writes. version: of v in the base.

        Of no version is that of a joiner, or of a push whose answer went to a leader who is dead.
        """
        self._scales[2] = 1
        version = -1 if self._foreign or self._scales[1] else version
        row = self.touched.nonzero()[:, 0]
        u, base = self._views()
        logarithm = self._replica.scale.logarithm
        # index_select copies rows several times as fast as u[row]
        increments = u.index_select(0, row).sub_(base.index_select(0, row)).mul_(math.exp(logarithm))
        most = most_rows(self.width, self._replica.params)
        if _NEARLY_ALL * len(row) <= most < len(row):
            far = increments.abs().sum(1).topk(most, sorted=False).indices.sort().values
            row, increments = row[far], increments[far]
        self.touched[row] = 2
        return Parcel(math.exp(logarithm - float(self._scales[0])), version, row, increments)

    def dense(self, parcel: Parcel) -> Tensor:
        """[N] the same push as a whole vector."""
        difference = self.values().mul_(parcel.factor - 1)
        add_rows(difference, Rows(parcel.row, parcel.values), 1.0)
        return difference

    def advance(self, parcel: Parcel, alone: bool) -> None:
        """It was sent: the base becomes what u then was. alone: nobody writes."""
        self._scales[0] += math.log(parcel.factor)
        self._scales[1] = math.log(parcel.factor)
        add_rows(self._base, Rows(parcel.row, parcel.values), math.exp(-float(self._scales[0])))
        if alone:
            self.touched[parcel.row[self.touched[parcel.row] == 2]] = 0

    def pull(self, x: Tensor, afresh: bool) -> None:
        """u <- s v' + what was learned since the push, and the base v', while nobody writes.

        s: by what u has shrunk since then. afresh: forget what was learned since.
        """
        u, base = self._views()
        before, was = self._replica.scale.logarithm, float(self._scales[0])
        since = 0.0 if afresh else before - was  # of s
        mine = self.touched.bool()
        if len(x) == len(self._base):
            row, theirs, now = torch.arange(len(u)), x.view(-1, self.width), 0.0
        else:
            parcel = Parcel.unpack(x, self.width)
            now = was + math.log(parcel.factor) - float(self._scales[1])
            only_mine = mine.clone()
            only_mine[parcel.row] = False
            rest = only_mine.nonzero()[:, 0]
            row = torch.cat([parcel.row, rest])
            theirs = torch.cat([parcel.values * math.exp(-now), base.index_select(0, rest)])
        sums = theirs
        if not afresh and mine.any():  # else nothing was learned since, as of who waits for the answer
            # in units of the new u; rows that were not moved here have nothing of their own
            own = u.index_select(0, row).sub_(base.index_select(0, row))
            sums = own.mul_(math.exp(before - now - since)).mul_(mine[row][:, None]).add_(theirs)
        base.index_copy_(0, row, theirs)
        u.index_copy_(0, row, sums)
        self._scales[0], self._scales[1] = now, 0.0
        self._replica.scale.restore(now + since)
        self._foreign = False
        if afresh:
            self.touched.zero_()
        if abs(now + since) > -_MOST_SHRUNK:
            self.fold()

    def make_room(self, living: Sequence[int]) -> None:
        """Fold, while nobody of the ``living`` threads writes, unless one of them has done so."""
        with self._replica.scale.closed(living) as alone:
            if alone and self._replica.scale.value < LEAST_SCALE:
                self.fold()

    def fold(self) -> None:
        """Multiply the scale into u, and the same into the base, so that untouched rows stay equal."""
        factor = self._replica.scale.logarithm
        self._replica.fold()
        self._base.mul_(math.exp(factor))
        self._scales[0] -= factor
        if abs(float(self._scales[0])) > -2 * _MOST_SHRUNK:  # rare: then all rows are pushed as they are
            self._base.mul_(math.exp(float(self._scales[0])))
            self._scales[0] = 0.0
            self.touched.fill_(1)

    def restore(self, params: Tensor, base: Tensor, foreign: bool) -> None:
        """Both as whole vectors, from a checkpoint or a peer. foreign: the base is no version of v."""
        self._foreign = foreign
        self._replica.scale.restore(0.0)
        self._replica.params.detach().copy_(params)
        self._base.copy_(base)
        self._scales.zero_()
        if self._replica.row_width:
            u, mine = self._views()
            self.touched.copy_((u != mine).any(1))
