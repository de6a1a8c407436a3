"""Gradients of few rows, and the scale that makes a step along them cheap (design, section 1).

A natural gradient ``x - sum of rows`` shrinks the whole vector and moves a few rows of it. With the
parameters written as ``scale * vector`` the step costs the rows alone: the scale shrinks, and the rows get
what is added to them over the scale.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from murmurate.native import kernels

T = TypeVar("T")

_PATIENCE_SECONDS, _PAUSE_SECONDS = 1.0, 50e-6
LEAST_SCALE = 1e-20  # below it the vector is multiplied by it
_NO_SMALLER = 1e-34  # below it numbers of the vector would not be finite


class Rows(NamedTuple):
    """The gradient ``shrink * x - values``, where ``values`` stand in a few rows of x [V, W].

    row: [R] int64, each once. values: [R, W].
    """

    row: Tensor
    values: Tensor
    shrink: float = 1.0

    def dense(self, x: Tensor) -> Tensor:
        """[N] the gradient at x [N]."""
        gradient = self.shrink * x
        add_rows(gradient, self, -1.0)
        return gradient


def check_rows(rows: Rows, size: int) -> None:
    """Raise ValueError for rows that a vector of ``size`` numbers does not have."""
    row, values = rows.row, rows.values
    if row.dim() != 1 or values.dim() != 2 or len(row) != len(values) or size % values.shape[1]:
        raise ValueError(
            "rows are row [R] and values [R, W] of a vector of so many whole rows; these are "
            f"{list(row.shape)} and {list(values.shape)} for {size} numbers"
        )
    if len(row) and not 0 <= int(row.min()) <= int(row.max()) < size // values.shape[1]:
        raise ValueError(f"there is no row {int(row.max())}: the vector has {size // values.shape[1]}")


def check_plain(optimizer: torch.optim.Optimizer, clip: float | None, name: str) -> None:
    """Raise ValueError unless a step moves nothing but what the gradient names."""
    group = optimizer.param_groups[0]
    plain = type(optimizer) is torch.optim.SGD and len(optimizer.param_groups) == 1 and clip is None
    if not plain or group["momentum"] or group["weight_decay"] or group["maximize"]:
        raise ValueError(
            f"replica '{name}' follows gradients of a few rows, which plain SGD alone does without touching "
            "the others: use torch.optim.SGD without momentum, weight decay and clipping, or dense gradients."
        )


def add_rows(x: Tensor, rows: Rows, step: float) -> None:
    """x [N] += step * values, in place. Nobody is locked out: of two who write a row at once one may win."""
    width = rows.values.shape[1]
    plain = x.dtype == torch.float32 and x.device.type == "cpu" and width % 16 == 0 and x.is_contiguous()
    if kernels is None or not plain:
        x.view(-1, width).index_add_(0, rows.row, rows.values, alpha=step)
        return
    row, values = rows.row.contiguous(), rows.values.contiguous()
    kernels.add_rows(x.data_ptr(), width, row.data_ptr(), len(row), values.data_ptr(), step)


class Scale:
    """By how much a vector has shrunk: the exponential of a sum of logarithms, one from each who shrinks it.

    Each writes its own cell alone, so nothing is lost where several shrink one vector without a lock. To
    multiply the scale into the vector one of them closes it for a moment: that waits for those who write,
    and who has read meanwhile reads again.
    """

    def __init__(self) -> None:
        self._logs = torch.zeros(1, dtype=torch.float64)
        self._marks = torch.zeros(2, dtype=torch.int64)  # how often it was closed and opened; who writes
        self._own = 0

    def share(self, logs: Tensor, marks: Tensor, own: int) -> None:
        """logs: [members] float64, marks: [1 + members] int64, in shared memory. own: our cell of them."""
        self._logs, self._marks, self._own = logs, marks, own

    @property
    def value(self) -> float:
        return math.exp(self.logarithm)

    @property
    def logarithm(self) -> float:
        return float(self._logs.sum())

    def restore(self, logarithm: float) -> None:
        """Back to when its ``logarithm`` was asked for; all who share it do so before any shrinks it."""
        self._logs.zero_()
        self._logs[0] = logarithm

    def shrink(self, by: float) -> bool:
        """To ``1 - by`` of what it was; True if nothing is left: the vector is then to be set to 0.

        Raises ValueError for a step too far, which for a vector that others write to is one to 0 already.
        """
        alone = len(self._logs) == 1
        if not (by < 1 or (by == 1 and alone)):
            raise ValueError(f"a step of {by:g} times the vector leaves nothing of it: make the rate smaller")
        self._logs[self._own] += math.log1p(-by) if by < 1 else -float(self._logs[0])
        return by == 1

    def await_room(self, make: Callable[[], None]) -> None:
        """``make`` room where the scale has become small; another member may have to, and is waited for."""
        if self.value >= LEAST_SCALE:
            return
        make()
        end = time.monotonic() + 10 * _PATIENCE_SECONDS
        while self.value < _NO_SMALLER:
            if time.monotonic() > end:
                raise RuntimeError("nobody multiplied the scale in: is the lowest living replica stopped?")
            time.sleep(_PAUSE_SECONDS)
            make()

    def forget(self) -> float:
        """Back to 1; what it was. To be called while nobody else shrinks or reads."""
        was = self.value
        self._logs.zero_()
        return was

    def steady(self, look: Callable[[float], T]) -> T:
        """``look(scale)`` at the vector, and again if it was closed meanwhile."""
        while True:
            turn = self._await_open()
            found = look(self.value)
            if int(self._marks[0]) == turn:
                return found

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """While the vector is written to; nobody closes it meanwhile."""
        cell = self._own + 1
        while True:
            self._marks[cell] = 1
            _fence()  # who closes it looks at the cells after it has closed
            if int(self._marks[0]) % 2 == 0:
                break
            self._marks[cell] = 0
            self._await_open()
        try:
            yield
        finally:
            _fence()
            self._marks[cell] = 0

    @contextlib.contextmanager
    def closed(self, living: Sequence[int]) -> Iterator[bool]:
        """The vector for one alone; False if one of ``living`` has been writing for too long. Only one
        member may call this."""
        self._marks[0] += 1
        _fence()
        try:
            end = time.monotonic() + _PATIENCE_SECONDS
            others = [rank for rank in living if rank != self._own]
            while (busy := any(int(self._marks[r + 1]) for r in others)) and time.monotonic() < end:
                time.sleep(_PAUSE_SECONDS)
            yield not busy
        finally:
            _fence()
            self._marks[0] += 1

    def _await_open(self) -> int:
        end = time.monotonic() + 10 * _PATIENCE_SECONDS
        while (turn := int(self._marks[0])) % 2:
            if time.monotonic() > end:
                raise RuntimeError(
                    "whoever multiplied the scale into the shared vector died in the middle, and what it "
                    "left is not the model any more. Resume from the last checkpoint."
                )
            time.sleep(_PAUSE_SECONDS)
        return turn


_LOCK = threading.Lock()


def _fence() -> None:
    """A full memory barrier, as a release followed by an acquire is."""
    with _LOCK:
        pass
    with _LOCK:
        pass
