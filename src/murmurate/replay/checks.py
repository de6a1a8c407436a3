"""Checks of steps and errors before anything is written to a replay."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from murmurate.replay.interface import Steps
from murmurate.replay.rows import Column
from murmurate.spec import Shapes


def check_steps(
    steps: Steps,
    first_simulator: int,
    simulators: int,
    observation: Column,
    action: Column,
    behaviour: Shapes,
) -> None:
    """Raise ValueError, naming the field, if a shape or dtype differs from the declared column, a simulator
    does not exist, a reward is not finite, or an action_value or next_value is infinite (nan: unknown)."""
    count = steps.reward.shape[0]  # cheaper than len, which checks whether torch is tracing
    if not (first_simulator >= 0 and first_simulator + count <= simulators):
        raise ValueError(
            f"a step of simulators {first_simulator} to {first_simulator + count - 1}, but this replay was "
            f"opened for {simulators}: open it with the number of simulators that it serves"
        )
    flag = Column((), torch.bool)
    for name, value, column in (
        ("observation", steps.observation, observation),
        ("next_observation", steps.next_observation, observation),
        ("action", steps.action, action),
        ("terminated", steps.terminated, flag),
        ("truncated", steps.truncated, flag),
        *((name, steps.behaviour.get(name), Column(s, torch.float32)) for name, s in behaviour.items()),
    ):
        if value is None:
            raise ValueError(f"the step has no '{name}', which this replay stores with each action")
        if value.shape != (count, *column.shape) or value.dtype != column.dtype:
            raise ValueError(
                f"'{name}' is {value.dtype} {list(value.shape)}, but this replay stores {column.dtype} "
                f"{[count, *column.shape]}"
            )
    for name, numbers in (
        ("reward", steps.reward),
        ("action_value", steps.action_value),
        ("next_value", steps.next_value),
    ):
        if numbers is None:
            continue
        if numbers.shape != (count,) or not numbers.is_floating_point():
            raise ValueError(
                f"'{name}' is {numbers.dtype} {list(numbers.shape)}, but must be one float for each of "
                f"{count} simulators"
            )
        values = numbers.detach().float().cpu().numpy()
        wrong = np.isinf(values) if name != "reward" else ~np.isfinite(values)
        if np.count_nonzero(wrong):
            b = int(wrong.argmax())
            simulator = first_simulator + b
            raise ValueError(f"'{name}' of simulator {simulator} is {float(numbers[b])}: give finite numbers")


def check_errors(error: Tensor, count: int) -> None:
    """Raise ValueError unless there is one finite error for each of ``count`` transitions."""
    if error.shape != (count,):
        raise ValueError(f"errors of shape {list(error.shape)} for {count} transitions: give one for each")
    wrong = ~np.isfinite(error.detach().float().cpu().numpy())
    if np.count_nonzero(wrong):
        i = int(wrong.argmax())
        raise ValueError(f"the error of transition {i} is {float(error[i])}: give finite numbers")
