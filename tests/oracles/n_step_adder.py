"""From steps to transitions, one simulator and one step at a time, as n-step returns are defined.

From s_t: R = r_t + g r_{t+1} + .. + g^{k-1} r_{t+k-1} and the discount g^k of what follows s_{t+k}, with
k = n, or less where the episode was terminated before, and then the discount is 0 (Sutton and Barto 2018,
eq. 7.1). An episode that was cut off is no end: its last steps bootstrap from the observation that followed.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


class Transition(NamedTuple):
    """observation, next_observation: of one simulator. action: a scalar or a vector. reward: R. discount: 0
    after a termination. length: k."""

    observation: Tensor
    action: Tensor
    reward: float
    discount: float
    next_observation: Tensor
    length: int


@dataclass
class _Step:
    observation: Tensor
    action: Tensor
    reward: float


class Adder:
    """One simulator's steps in, transitions out."""

    def __init__(self, steps: int, discount: float) -> None:
        if steps < 1:
            raise ValueError(f"a return is over at least one step, not {steps}")
        if not 0 <= discount <= 1:
            raise ValueError(f"a discount lies between 0 and 1, not at {discount}")
        self.steps, self.discount = steps, discount
        self._open: deque[_Step] = deque()

    def add(
        self,
        observation: Tensor,
        action: Tensor,
        reward: float,
        next_observation: Tensor,
        terminated: bool,
        truncated: bool,
    ) -> list[Transition]:
        """``next_observation``: what followed; where the episode ended its last one, not the next one's
        first."""
        self._open.append(_Step(observation, action, float(reward)))
        if not (terminated or truncated):
            if len(self._open) < self.steps:
                return []
            return [self._close(next_observation, self.discount)]
        after = 0.0 if terminated else self.discount
        return [self._close(next_observation, after) for _ in range(len(self._open))]

    def _close(self, next_observation: Tensor, after: float) -> Transition:
        """The oldest open step ends here. after: the discount of one more step, 0 where nothing follows."""
        reward = 0.0
        for step in reversed(self._open):
            reward = step.reward + self.discount * reward
        length = len(self._open)
        first = self._open.popleft()
        discount = 0.0 if after == 0.0 else self.discount**length
        return Transition(first.observation, first.action, reward, discount, next_observation, length)

    def forget(self) -> None:
        """The simulator starts anew, without an end."""
        self._open.clear()
