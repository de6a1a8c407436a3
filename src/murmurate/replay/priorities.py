"""Samplers of slots: in proportion to a priority, or uniformly.

Prioritized replay (Schaul et al. 2016): p = (|error| + epsilon) ** alpha and P(i) = p_i / sum p. The weight
of a draw is (N P(i)) ** -beta divided by the greatest such weight, that of the least priority; the quotient
is (p_i / least p) ** -beta.
"""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor

from murmurate.replay._native_tree import check_out
from murmurate.replay.sum_tree import sum_tree
from murmurate.replay.tree import Draw, SumTree


class SlotSampler(Protocol):
    """A distribution over slots 0 .. capacity - 1; only slots that were ``put`` and not removed are drawn.

    weighted: whether errors matter; otherwise all weights are 1.
    """

    capacity: int
    weighted: ClassVar[bool]

    @property
    def filled(self) -> int:
        """How many slots can be drawn."""
        ...

    def put(self, slots: Tensor, error: Tensor | None = None) -> None:
        """``slots`` [B] can be drawn from now on. error: [B], for their priorities; None: the highest
        priority so far, so that each is likely to be drawn soon."""
        ...

    def remove(self, slots: Tensor) -> None:
        """``slots`` [B] are no longer drawn."""
        ...

    def update(self, slots: Tensor, error: Tensor) -> None:
        """New errors [B] of ``slots`` [B], which can be drawn."""
        ...

    @property
    def mass(self) -> tuple[float, float]:
        """The sum of all priorities, and the least positive one."""
        ...

    def draw(self, count: int, beta: float, out: Draw | None = None) -> Draw:
        """``count`` draws with replacement, weighted with exponent ``beta``. Raises ValueError if fewer than
        ``count`` slots can be drawn."""
        ...

    def set_alpha(self, alpha: float) -> None:
        """Use this exponent for errors from now on; existing priorities do not change."""
        ...

    def state(self) -> dict[str, Any]: ...
    def load(self, state: dict[str, Any]) -> None: ...


class Prioritized:
    """See ``SlotSampler``.

    alpha: exponent; 0 is uniform, 1 proportional to the error. epsilon: added to each error, so that each
    slot can be drawn again. tree: the tree to use; None: a new one, with random numbers from ``seed`` and
    ``threads`` threads for its searches. Raises ValueError for an alpha outside [0, 1] or a negative epsilon.
    """

    weighted: ClassVar[bool] = True

    def __init__(
        self,
        capacity: int,
        *,
        alpha: float = 0.6,
        epsilon: float = 1e-6,
        seed: int = 0,
        threads: int = 1,
        tree: SumTree | None = None,
    ) -> None:
        if not 0 <= alpha <= 1:
            raise ValueError(f"alpha must lie between 0 and 1, but it is {alpha}")
        if not epsilon >= 0:
            raise ValueError(f"epsilon must not be negative, but it is {epsilon}")
        self.capacity, self.alpha, self.epsilon = capacity, alpha, epsilon
        self.tree = sum_tree(capacity, seed=seed, threads=threads) if tree is None else tree
        self.highest = 1.0  # the highest priority so far
        self._present = np.zeros(capacity, np.bool_)
        self.filled = 0

    def put(self, slots: Tensor, error: Tensor | None = None) -> None:
        if error is None:
            self.tree.set(slots, torch.full((len(slots),), self.highest, dtype=torch.float32, device="cpu"))
        else:
            self.update(slots, error)
        if self.filled < self.capacity:
            numbers = slots.numpy()
            new = numbers[~self._present[numbers]]
            self.filled += len(set(new.tolist()))
            self._present[new] = True

    def remove(self, slots: Tensor) -> None:
        self.tree.set(slots, torch.zeros(len(slots), dtype=torch.float32, device="cpu"))
        numbers = slots.numpy()
        removed = numbers[self._present[numbers]]
        self.filled -= len(set(removed.tolist()))
        self._present[removed] = False

    def update(self, slots: Tensor, error: Tensor) -> None:
        greatest = self.tree.update(slots, error, self.alpha, self.epsilon)
        if greatest > self.highest:
            self.highest = greatest

    @property
    def mass(self) -> tuple[float, float]:
        return self.tree.total, self.tree.minimum

    def draw(self, count: int, beta: float, out: Draw | None = None) -> Draw:
        if count > self.filled:
            refuse_too_many(count, self.filled)
        return self.tree.sample(count, beta, out=out)

    def set_alpha(self, alpha: float) -> None:
        self.alpha = alpha

    def draw_any(self, count: int, beta: float, out: Draw | None = None) -> Draw:
        """``draw`` where ``count`` may exceed the number of filled slots."""
        return self.tree.sample(count, beta, out=out)

    def state(self) -> dict[str, Any]:
        return {
            "tree": self.tree.state(),
            "highest": self.highest,
            "present": torch.from_numpy(self._present.copy()),
        }

    def load(self, state: dict[str, Any]) -> None:
        self.tree.load(state["tree"])
        self.highest = float(state["highest"])
        self._present[:] = state["present"].numpy()
        self.filled = int(self._present.sum())


class Uniform:
    """See ``SlotSampler``: uniform; errors and exponents are ignored, and weights are 1."""

    weighted: ClassVar[bool] = False

    def __init__(self, capacity: int, *, seed: int = 0) -> None:
        self.capacity = capacity
        self._generator = torch.Generator().manual_seed(seed)
        # the first ``filled`` slots can be drawn; numpy arrays, which have less overhead for a few numbers
        self._slots = np.zeros(capacity, np.int64)
        self._positions = np.full(capacity, -1)  # of each slot in ``_slots``; -1 if absent
        self.filled = 0

    def put(self, slots: Tensor, error: Tensor | None = None) -> None:
        numbers = slots.numpy()
        new = np.unique(numbers[self._positions[numbers] < 0])
        end = self.filled + len(new)
        self._slots[self.filled : end] = new
        self._positions[new] = np.arange(self.filled, end)
        self.filled = end

    def remove(self, slots: Tensor) -> None:
        numbers = slots.numpy()
        for slot in np.unique(numbers[self._positions[numbers] >= 0]).tolist():
            self.filled -= 1
            # the last slot takes the place of the removed one
            position, last = self._positions[slot], self._slots[self.filled]
            self._slots[position], self._positions[last] = last, position
            self._positions[slot] = -1

    def update(self, slots: Tensor, error: Tensor) -> None:
        """Ignored: all slots are equally likely."""

    @property
    def mass(self) -> tuple[float, float]:
        return float(self.filled), 1.0

    def draw(self, count: int, beta: float, out: Draw | None = None) -> Draw:
        refuse_too_many(count, self.filled)
        return self.draw_any(count, beta, out)

    def draw_any(self, count: int, beta: float, out: Draw | None = None) -> Draw:
        """``draw`` where ``count`` may exceed the number of filled slots."""
        if out is not None:
            check_out(out.indices, torch.int64, count)
            check_out(out.weights, torch.float32, count)
        positions = torch.randint(self.filled, (count,), generator=self._generator, device="cpu")
        drawn = torch.from_numpy(self._slots[positions.numpy()])
        if out is None:
            return Draw(drawn, torch.ones(count, dtype=torch.float32, device="cpu"))
        out.indices.copy_(drawn)
        out.weights.fill_(1.0)
        return out

    def set_alpha(self, alpha: float) -> None:
        pass

    def state(self) -> dict[str, Any]:
        slots = torch.from_numpy(self._slots[: self.filled].copy())
        return {"slots": slots, "generator": self._generator.get_state()}

    def load(self, state: dict[str, Any]) -> None:
        self._positions.fill(-1)
        self.filled = 0
        slots = state["slots"].numpy()
        self._slots[: len(slots)] = slots
        self._positions[slots] = np.arange(len(slots))
        self.filled = len(slots)
        self._generator.set_state(state["generator"])


def refuse_too_many(count: int, filled: int) -> None:
    """Raise ValueError if ``count`` slots cannot be drawn from ``filled``."""
    if filled == 0:
        raise ValueError("there is nothing to draw: the replay is empty. Insert something first.")
    if count > filled:
        raise ValueError(
            f"a batch of {count} cannot be drawn from {filled} transitions: wait until there are more"
        )
