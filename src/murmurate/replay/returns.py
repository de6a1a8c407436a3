"""From steps to transitions: n-step returns that end where episodes end, for many simulators at once.

From s_t: R = r_t + g r_{t+1} + .. + g^{k-1} r_{t+k-1}, and the discount g^k of the value of s_{t+k}, where
k = n, or less if the episode ends earlier. The discount is 0 if the episode was terminated (Sutton and Barto
2018, eq. 7.1); if it was truncated, its last steps bootstrap from its final observation.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


class CompletedReturns(NamedTuple):
    """M complete returns.

    simulator: [M]. age: [M], k: the return starts k - 1 steps before the newest step. reward: [M], R.
    discount: [M], 0 after a termination.
    """

    simulator: Integers
    age: Integers
    reward: npt.NDArray[np.float32]
    discount: npt.NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.simulator)


class NStepReturns:
    """The rewards of the last n steps of each simulator, and how many of their returns are incomplete.

    steps: n. discount: g. Raises ValueError for n < 1, and for a discount outside of [0, 1].
    """

    def __init__(self, simulators: int, steps: int, discount: float) -> None:
        if steps < 1:
            raise ValueError(f"a return needs at least one step, not {steps}")
        if not 0 <= discount <= 1:
            raise ValueError(f"the discount must lie between 0 and 1, but it is {discount}")
        self.steps, self.discount = steps, discount
        self._reward: Floats = np.zeros((steps, simulators))  # newest first
        self._incomplete: Integers = np.zeros(simulators, np.int64)  # number of incomplete returns

    def step(
        self, first_simulator: int, reward: npt.ArrayLike, terminated: Flags, truncated: Flags
    ) -> CompletedReturns:
        """Add one step of b simulators from number ``first_simulator`` on; returns what it completes.

        reward, terminated, truncated: [b].
        """
        new = np.asarray(reward, np.float64)
        stop = first_simulator + len(new)
        stepping = slice(first_simulator, stop)
        if self.steps == 1:  # every return is complete at once
            self._reward[0, stepping] = new
            simulator, age = np.arange(first_simulator, stop), np.ones(len(new), np.int64)
            discount = np.where(terminated, np.float32(0.0), np.float32(self.discount))
            return CompletedReturns(simulator, age, new.astype(np.float32), discount)
        rewards = self._reward[:, stepping]
        push(rewards, new)
        ages = self._incomplete[stepping] + 1
        ended = terminated | truncated
        by_age = []  # the columns of the completed returns of each age
        total = np.zeros(len(new))
        for k in range(1, self.steps + 1):
            total = rewards[k - 1] + self.discount * total  # the return of the last k steps
            complete = ages >= k if k == self.steps else ended & (ages >= k)
            (rows,) = np.nonzero(complete)
            if len(rows):
                discount = np.where(terminated[rows], 0.0, self.discount**k)
                by_age.append((rows + first_simulator, np.full(len(rows), k), total[rows], discount))
        self._incomplete[stepping] = np.where(ended, 0, np.minimum(ages, self.steps - 1))
        if not by_age:
            empty = np.zeros(0, np.int64)
            return CompletedReturns(empty, empty, empty.astype(np.float32), empty.astype(np.float32))
        columns = by_age[0] if len(by_age) == 1 else [np.concatenate(c) for c in zip(*by_age, strict=True)]
        simulator, age, reward_sum, discount = columns
        return CompletedReturns(simulator, age, reward_sum.astype(np.float32), discount.astype(np.float32))

    def forget(self, first_simulator: int, count: int) -> None:
        """Discard the incomplete returns of ``count`` simulators from ``first_simulator`` on."""
        self._incomplete[first_simulator : first_simulator + count] = 0

    def state(self) -> dict[str, Any]:
        return {
            "reward": torch.from_numpy(self._reward.copy()),
            "open": torch.from_numpy(self._incomplete.copy()),
        }

    def load(self, state: dict[str, Any]) -> None:
        self._reward[:] = state["reward"].numpy()
        self._incomplete[:] = state["open"].numpy()


class InitialErrors:
    """Errors of new transitions from the actor's own values: R + d max_a Q(s', a) - Q(s, a).

    d is the discount of the return, which is from s to s'. steps: n of the returns.
    """

    def __init__(self, simulators: int, steps: int) -> None:
        self._action_value = np.full((steps, simulators), np.nan, np.float32)  # newest first

    def step(self, first_simulator: int, count: int, action_value: Tensor | None) -> None:
        """Add Q(s, a) [b] of one step of ``count`` = b simulators; None if it is unknown."""
        new = np.float32(np.nan) if action_value is None else action_value.detach().float().numpy()
        push(self._action_value[:, first_simulator : first_simulator + count], new)

    def errors(
        self, completed: CompletedReturns, first_simulator: int, next_value: Tensor | None
    ) -> Tensor | None:
        """The errors [M] of completed returns; None if one of the values is unknown (None or NaN).

        next_value: [b], max_a Q(s', a) after the newest step of the simulators from ``first_simulator`` on.
        """
        if next_value is None:
            return None
        action_value = self._action_value[completed.age - 1, completed.simulator]
        bootstrap = next_value.detach().float().numpy()[completed.simulator - first_simulator]
        error = completed.reward + completed.discount * bootstrap - action_value
        return None if np.count_nonzero(np.isnan(error)) else torch.from_numpy(error)


def push(history: npt.NDArray[Any], new: npt.NDArray[Any] | np.float32) -> None:
    """Insert ``new`` [...] at the front of ``history`` [n, ...] (newest first), and drop the oldest."""
    history[1:] = history[:-1]
    history[0] = new
