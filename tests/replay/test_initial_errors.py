"""Errors of new transitions from the actor's own values, by hand: R + d max Q(s') - Q(s, a)."""

from __future__ import annotations

import numpy as np
import torch

from murmurate.replay.returns import InitialErrors, NStepReturns


class Recorded:
    """Three-step returns of one simulator of two, the second, and their errors."""

    def __init__(self) -> None:
        self.returns, self.initial = NStepReturns(2, 3, 0.5), InitialErrors(2, 3)

    def step(self, reward: float, value: float | None, next_value: float, end: bool = False) -> object:
        self.initial.step(1, 1, None if value is None else torch.tensor([value]))
        completed = self.returns.step(1, [reward], np.array([end]), np.array([False]))
        errors = self.initial.errors(completed, 1, torch.tensor([next_value]))
        return None if errors is None else errors.tolist()


def test_each_return_has_the_value_of_its_own_first_step() -> None:
    recorded = Recorded()
    assert recorded.step(1.0, 10.0, 7.0) == recorded.step(2.0, 20.0, 7.0) == []
    # from the first step: 1 + 2/2 + 4/4, and an eighth of 100, less 10
    assert recorded.step(4.0, 40.0, 100.0) == [5.5]
    # the last one ends the task: the returns from it, and from one and two steps before it
    assert recorded.step(8.0, 80.0, 100.0, end=True) == [8.0 - 80.0, 8.0 - 40.0, 6.0 - 20.0]


def test_returns_from_a_step_whose_value_is_unknown_have_no_errors() -> None:
    recorded = Recorded()
    for value in (None, 20.0):
        recorded.step(1.0, value, 0.0)
    assert recorded.step(1.0, 40.0, 0.0) is None
    assert recorded.step(0.0, 80.0, 0.0) == [1.5 - 20.0]
