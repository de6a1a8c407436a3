"""Whether what a replay is told fits what it keeps; asked before anything of it is written."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from murmurate.replay.interface import Steps
from murmurate.replay.rows import Column
from murmurate.spec import Shapes


def check_steps(
    steps: Steps, low: int, simulators: int, observation: Column, action: Column, behaviour: Shapes
) -> None:
    """Raise ValueError, naming the field, for a step of other shapes or kinds than those of ``observation``
    and ``action``, of simulators that there are not, or of rewards or values that are not finite. nan is a
    value that is not known."""
    count = steps.reward.shape[0]  # len asks whether torch is tracing
    if not (low >= 0 and low + count <= simulators):
        raise ValueError(
            f"a step of simulators {low} to {low + count - 1}, and this replay is of {simulators}: open it "
            "with as many as play"
        )
    flags = Column((), torch.bool)
    for name, value, column in (
        ("observation", steps.observation, observation),
        ("next_observation", steps.next_observation, observation),
        ("action", steps.action, action),
        ("terminated", steps.terminated, flags),
        ("truncated", steps.truncated, flags),
        *((name, steps.behaviour.get(name), Column(s, torch.float32)) for name, s in behaviour.items()),
    ):
        if value is None:
            raise ValueError(f"the action came without '{name}', which this replay keeps beside it")
        if value.shape != (count, *column.shape) or value.dtype != column.dtype:
            raise ValueError(
                f"'{name}' is {value.dtype} {list(value.shape)}, and this replay keeps {column.dtype} "
                f"{[count, *column.shape]}"
            )
    for name, numbers in (("reward", steps.reward), ("taken", steps.taken), ("following", steps.following)):
        if numbers is None:
            continue
        if numbers.shape != (count,) or not numbers.is_floating_point():
            raise ValueError(
                f"'{name}' is {numbers.dtype} {list(numbers.shape)}, and is one float for each of {count} "
                "simulators"
            )
        values = numbers.detach().float().cpu().numpy()
        wrong = np.isinf(values) if name != "reward" else ~np.isfinite(values)
        if np.count_nonzero(wrong):
            b = int(wrong.argmax())
            raise ValueError(f"'{name}' of simulator {low + b} is {float(numbers[b])}: give finite numbers")


def check_errors(error: Tensor, count: int) -> None:
    """Raise ValueError unless there is one finite error for each of ``count`` transitions."""
    if error.shape != (count,):
        raise ValueError(f"{list(error.shape)} errors of {count} transitions: give one for each")
    wrong = ~np.isfinite(error.detach().float().cpu().numpy())
    if np.count_nonzero(wrong):
        i = int(wrong.argmax())
        raise ValueError(f"the error of transition {i} is {float(error[i])}: give finite numbers")
