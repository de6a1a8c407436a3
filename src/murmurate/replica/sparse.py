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
# Below the first the vector is multiplied by its scale; below the second nobody shrinks it further before
# that. float32 ends at 3e38, and numbers of a vector may be counts of 1e15.
LEAST_SCALE, _NO_SMALLER = 1e-10, 1e-20


class ShrinksAway(ValueError):
    """A step would take more of a vector than there is of it."""


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


def check_rows(rows: Rows, x: Tensor) -> None:
    """Raise ValueError for rows that a vector x [N] does not have, or numbers that it cannot take."""
    row, values = rows.row, rows.values
    shaped = row.dim() == 1 and values.dim() == 2 and len(row) == len(values) and values.shape[1] > 0
    if not shaped or x.numel() % values.shape[1]:
        raise ValueError(
            "rows are row [R] and values [R, W] of a vector of so many whole rows; these are "
            f"{list(row.shape)} and {list(values.shape)} for {x.numel()} numbers"
        )
    if row.dtype != torch.int64 or values.dtype != x.dtype or {row.device, values.device} != {x.device}:
        raise ValueError(
            f"rows are int64 and their values {x.dtype}, both on {x.device}; these are {row.dtype} on "
            f"{row.device} and {values.dtype} on {values.device}"
        )
    if len(row) and not 0 <= int(row.min()) <= int(row.max()) < x.numel() // values.shape[1]:
        raise ValueError(f"there is no row {int(row.max())}: the vector has {x.numel() // values.shape[1]}")


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


def step_rows(x: Tensor, scale: Scale, rows: Rows, rate: float, touched: Tensor | None) -> None:
    """scale * x <- scale * x - rate (shrink scale * x - values), in the scale and a few rows of x [N].

    touched: [V] uint8, where the rows are marked.
    """
    with scale.writing():
        if scale.shrink(rate * rows.shrink):
            x.zero_()
        add_rows(x, rows, rate / scale.value)
        if touched is not None:
            touched[rows.row] = 1


class Scale:
    """By how much a vector has shrunk: the exponential of a sum of logarithms, one from each who shrinks it.

    Each writes its own cell alone, so nothing is lost where several shrink one vector without a lock. To
    multiply the scale into the vector one of them closes it for a moment: that waits for those who write,
    and who has read meanwhile reads again. Who closes it is settled by Lamport's bakery (1974).
    """

    def __init__(self) -> None:
        self.share(torch.zeros(1, dtype=torch.float64), torch.zeros(self.marks(1), dtype=torch.int64), 0)

    @staticmethod
    def marks(members: int) -> int:
        """How many marks so many members need: how often it was closed and opened; who writes; who is drawing
        a number, and the numbers drawn."""
        return 1 + 3 * members

    def share(self, logs: Tensor, marks: Tensor, own: int) -> None:
        """logs: [members] float64, marks: [marks(members)] int64, in shared memory. own: our cell of them."""
        self._logs, self._own = logs, own
        self._turn, n = marks[:1], len(logs)
        self._writing, self._drawing, self._number = marks[1:].view(3, n).unbind(0)

    @property
    def shared(self) -> bool:
        """Whether others may write to the vector."""
        return len(self._logs) > 1

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

        Raises ShrinksAway for a step too far, which for a vector that others write to is one to 0 already.
        """
        alone = len(self._logs) == 1
        if not (by < 1 or (by == 1 and alone)):
            raise ShrinksAway(f"a step of {by:g} times the vector leaves nothing of it: make the rate less")
        self._logs[self._own] += math.log1p(-by) if by < 1 else -float(self._logs[0])
        return by == 1

    def await_room(self, make: Callable[[], None]) -> None:
        """``make`` room where the scale has become small. Raises RuntimeError if that does not come about."""
        if self.value >= LEAST_SCALE:
            return
        make()
        end = time.monotonic() + 10 * _PATIENCE_SECONDS
        while self.value < _NO_SMALLER:
            if time.monotonic() > end:
                raise RuntimeError(
                    "the scale cannot be multiplied in: has a replica been stopped in a write?"
                )
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
            if int(self._turn[0]) == turn:
                return found

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """While the vector is written to; nobody closes it meanwhile."""
        while True:
            self._writing[self._own] = 1
            _fence()  # who closes it looks at the cells after it has closed
            if int(self._turn[0]) % 2 == 0:
                break
            self._writing[self._own] = 0
            self._await_open()
        try:
            yield
        finally:
            _fence()
            self._writing[self._own] = 0

    @contextlib.contextmanager
    def closed(self, living: Sequence[int]) -> Iterator[bool]:
        """The vector for one alone; False if one of ``living`` has been in the way for too long."""
        others = [rank for rank in living if rank != self._own]
        end = time.monotonic() + _PATIENCE_SECONDS

        def awaited(busy: Callable[[int], bool]) -> bool:
            while any(busy(rank) for rank in others):
                if time.monotonic() > end:
                    return False
                time.sleep(_PAUSE_SECONDS)
            return True

        try:
            if not self._has_turn(awaited):
                yield False
                return
            self._turn[0] += 1
            _fence()
            try:
                yield awaited(lambda rank: bool(self._writing[rank]))
            finally:
                _fence()
                self._turn[0] += 1
        finally:
            self._number[self._own] = 0

    def _has_turn(self, awaited: Callable[[Callable[[int], bool]], bool]) -> bool:
        """Draw a number, and wait for those with lower ones."""
        self._drawing[self._own] = 1
        _fence()
        mine = self._number[self._own] = int(self._number.max()) + 1
        _fence()
        self._drawing[self._own] = 0
        _fence()

        def first(rank: int) -> bool:
            theirs = int(self._number[rank])
            return theirs > 0 and (theirs, rank) < (mine, self._own)

        return awaited(lambda rank: bool(self._drawing[rank])) and awaited(first)

    def _await_open(self) -> int:
        end = time.monotonic() + 10 * _PATIENCE_SECONDS
        while (turn := int(self._turn[0])) % 2:
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
