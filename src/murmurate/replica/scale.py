"""A scale that makes steps along a few rows cheap (see ``sparse``): the parameters are ``scale * vector``.

Replicas that share a vector shrink it and write to it without excluding each other. Only multiplying the
vector by the scale (a fold) needs exclusive access. So each member has its own lock, which it holds while it
writes, and exclusive access means holding all of them (a "big-reader" lock). Readers take no lock: they
read again if a counter shows that another member had exclusive access meanwhile (a sequence lock).
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
from torch import Tensor

from murmurate.replica.fence import fence
from murmurate.replica.robust_lock import RobustLock, open_locks
from murmurate.replica.sparse import Rows, StepTooLarge, add_rows

T = TypeVar("T")

_PATIENCE_SECONDS, _PAUSE_SECONDS = 1.0, 50e-6
# Below LEAST_SCALE, the scale is folded into the vector; below _NO_SMALLER, writers wait for the fold.
# float32 ends at 3e38, and a vector may hold counts of 1e15.
LEAST_SCALE, _NO_SMALLER = 1e-10, 1e-20
_CHUNK = 16_384  # number of elements of a vector that are multiplied at a time
# state of a fold: its factor, or 0 if there is no fold; number of chunks copied; number of chunks multiplied
_FACTOR, _COPIED, _DONE = range(3)


class Scale:
    """The scale of a vector [N]: the exponential of a sum of logarithms, one for each member.

    A member writes only its own logarithm, so no change is lost if several members shrink a shared vector.

    Attributes:
        shared: whether other members have the same vector.
        keeps_scale: whether row-sparse gradients change only the scale and their rows; else they are made
            dense.
        touched: [V] uint8, or None; entries of changed rows are set to 1.
    """

    def __init__(self, vector: Tensor) -> None:
        self.vector = vector
        self.shared = False
        self.keeps_scale = True
        self.touched: Tensor | None = None
        self._fold_if_small = self.fold_if_small
        self._own_index = 0
        self._logs = torch.zeros(1, dtype=torch.float64)
        self._locks: list[RobustLock] = []
        self._sequence = torch.zeros(1, dtype=torch.int64)  # odd during exclusive access
        self._barrier = threading.Lock()
        # writers wait until this time for a member that asks for exclusive access
        self._closed_until = torch.zeros(1, dtype=torch.float64)
        self._fold_state = torch.zeros(3, dtype=torch.float64)
        self._chunk_copy = torch.empty(0)

    def share(self, shared: Callable[[str, Tensor], Tensor], members: int, own: int) -> None:
        """Keep the scale in memory that all members of the same vector see.

        shared: (name, initial values) -> shared memory, as ``Channel.shared`` does; all ``members`` call
        this in the same order. own: index of this member.
        """
        self.shared, self._own_index = True, own
        self._logs = shared("scale: logarithms", torch.zeros(members, dtype=torch.float64))
        self._locks = [RobustLock(memory) for memory in shared("scale: locks", open_locks(members))]
        self._sequence = shared("scale: turn", torch.zeros(1, dtype=torch.int64))
        self._closed_until = shared("scale: closing", torch.zeros(1, dtype=torch.float64))
        self._fold_state = shared("scale: fold", torch.zeros(3, dtype=torch.float64))
        self._chunk_copy = shared("scale: copy", self.vector.new_zeros(min(_CHUNK, len(self.vector))))

    def keep(
        self,
        keeps_scale: bool = True,
        *,
        touched: Tensor | None = None,
        fold_if_small: Callable[[], None] | None = None,
    ) -> None:
        """Set ``keeps_scale`` and ``touched``, for a strategy that can exchange ``scale * vector``.

        fold_if_small: called instead of the method of that name when the scale is almost 0.
        """
        self.keeps_scale, self.touched = keeps_scale, touched
        self._fold_if_small = fold_if_small or self.fold_if_small

    @property
    def members(self) -> int:
        """Number of members that have this vector."""
        return len(self._logs)

    @property
    def value(self) -> float:
        return math.exp(self.logarithm)

    @property
    def logarithm(self) -> float:
        # every dense step reads it, and a sum would take ten times as long
        return float(self._logs.sum() if self.shared else self._logs.item())

    def restore(self, logarithm: float) -> None:
        """Restore an earlier value; all members must do so before any of them shrinks the vector."""
        self._logs.zero_()
        self._logs[0] = logarithm

    def shrink(self, by: float) -> bool:
        """Multiply the scale by ``1 - by``; True if it would be 0: the caller must then set the vector to 0.

        Raises StepTooLarge for a step beyond 0 or, if the vector is shared, for a step to 0.
        """
        if not (by < 1 or (by == 1 and not self.shared)):
            raise StepTooLarge(
                f"a step of {by:g} times the vector leaves nothing of it, which replicas share: "
                "use a smaller rate, or with step rule robbins-monro a greater delay or forgetting. A single "
                "replica may take this step with --strategy solo"
            )
        # a vector of zeros has scale 1, logarithm 0
        self._logs[self._own_index] += math.log1p(-by) if by < 1 else -float(self._logs[0])
        return by == 1

    def step(self, rows: Rows, rate: float) -> None:
        """scale * x <- scale * x - rate (shrink scale * x - values), in the scale and a few rows of x [N].

        Raises StepTooLarge as ``shrink`` does, and RuntimeError if the scale cannot be folded.
        """
        with self.writing():
            if self.shrink(rate * rows.shrink):
                self.vector.zero_()
            add_rows(self.vector, rows, rate / self.value)
            if self.touched is not None:
                self.touched[rows.row] = 1
        self.fold_when_small()

    def fold_when_small(self) -> None:
        """Fold the scale if it has become small. Raises RuntimeError if that fails for too long."""
        if self.value >= LEAST_SCALE:
            return
        self._fold_if_small()
        deadline = time.monotonic() + 10 * _PATIENCE_SECONDS
        while self.value < _NO_SMALLER:
            if time.monotonic() > deadline:
                raise RuntimeError(
                    "the scale of a shared vector cannot be folded, because a replica was stopped while it "
                    "wrote. Continue it (kill -CONT) or end it (kill -KILL), and go on from the last "
                    "checkpoint: murmurate resume."
                )
            time.sleep(_PAUSE_SECONDS)
            self._fold_if_small()

    def fold_if_small(self) -> None:
        """Fold the scale, unless another member has done so, or has been writing for too long."""
        with self.exclusive() as is_exclusive:
            if is_exclusive and self.value < LEAST_SCALE:
                self.fold()

    def fold(self) -> None:
        """Multiply the vector by the scale, which becomes 1. Requires exclusive access.

        On a shared vector the next member finishes an interrupted fold: each chunk is multiplied from a copy,
        so that its multiplication can be repeated.
        """
        if not self.shared:
            self.vector.mul_(self.value)
            self._logs.zero_()
            return
        state = self._fold_state
        if not state[_FACTOR]:
            state.zero_()
            state[_FACTOR] = self.value
        factor = float(state[_FACTOR])
        for number, chunk in enumerate(torch.split(self.vector, _CHUNK)):
            if number < state[_DONE]:
                continue
            copy = self._chunk_copy[: len(chunk)]
            if number == state[_COPIED]:
                copy.copy_(chunk)
                state[_COPIED] += 1
            torch.mul(copy, factor, out=chunk)
            state[_DONE] += 1
        self._logs.zero_()
        state[_FACTOR] = 0

    # -- reading, writing, exclusive access ----------------------------------------------------------

    def read_consistently(self, read: Callable[[float], T]) -> T:
        """``read(scale)``, repeated if another member had exclusive access to the vector meanwhile."""
        while True:
            sequence = int(self._sequence[0])
            if sequence % 2:
                with self.writing():  # waits for the end of the exclusive access, or repairs after a death
                    continue
            fence(self._barrier)  # what is read lies between the two values of the counter
            result = read(self.value)
            fence(self._barrier)
            if int(self._sequence[0]) == sequence:
                return result

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Excludes exclusive access while the vector is written to. Not reentrant."""
        if not self._locks:
            yield
            return
        own_lock, deadline = self._locks[self._own_index], time.monotonic() + 10 * _PATIENCE_SECONDS
        while True:
            while time.monotonic() < self._closed_until[0]:
                time.sleep(_PAUSE_SECONDS)
            if time.monotonic() > deadline or not own_lock.acquire(10 * _PATIENCE_SECONDS):
                raise RuntimeError(
                    "a replica has had exclusive access to the shared vector for too long: it was stopped. "
                    "Continue it (kill -CONT) or end it (kill -KILL), and go on from the last checkpoint: "
                    "murmurate resume."
                )
            if int(self._sequence[0]) % 2 == 0:
                break
            # exclusive access needs this lock, too: so the member that had it has died; repair
            own_lock.release()
            with self.exclusive():
                pass
        try:
            yield
        finally:
            own_lock.release()

    @contextlib.contextmanager
    def rewriting(self) -> Iterator[None]:
        """Like ``writing``, for changes to any row that are not made by ``step``."""
        with self.writing():
            yield
            if self.touched is not None:
                self.touched.fill_(1)

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[bool]:
        """Exclusive access for this member; yields False if another member has been writing for too long."""
        deadline, acquired = time.monotonic() + _PATIENCE_SECONDS, 0
        try:
            self._closed_until[0] = deadline
            for lock in self._locks:
                if not lock.acquire(deadline - time.monotonic()):
                    break
                acquired += 1
            self._closed_until[0] = 0
            is_exclusive = acquired == len(self._locks)
            if is_exclusive:
                self._begin()
            try:
                yield is_exclusive
            finally:
                if is_exclusive:
                    self._end()
        finally:
            for lock in self._locks[:acquired]:
                lock.release()

    def _begin(self) -> None:
        """Make the counter odd; if it is odd already, finish the fold of a member that died meanwhile."""
        if int(self._sequence[0]) % 2 == 0:
            self._sequence[0] += bool(self._locks)  # not counted if the vector is not shared
        elif self._fold_state[_FACTOR]:
            self.fold()
        fence(self._barrier)  # readers see the odd counter before any change

    def _end(self) -> None:
        """Make the counter even, unless an exception interrupted a fold, which the next member finishes."""
        if not self._fold_state[_FACTOR]:
            fence(self._barrier)  # and every change before the even one
            self._sequence[0] += bool(self._locks)
