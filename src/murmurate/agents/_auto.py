"""Common to agents: resolving ``auto`` in configs, and linear learning-rate schedules."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from murmurate.nets.torso import AUTO, usual_torso
from murmurate.spec import EnvSpec, native_bfloat16

Config = TypeVar("Config")


def without_auto(config: Config, spec: EnvSpec, device: torch.device) -> Config:
    """``config`` with its ``torso`` and ``precision`` chosen where they are ``auto``: nature2013 for images,
    mlp for vectors; bfloat16 for images where the device supports it natively."""
    this: Any = config
    torso, precision = this.torso, this.precision
    if torso == AUTO:
        torso = usual_torso(spec)
    if precision == "auto":
        precision = "bfloat16" if spec.images and native_bfloat16(device) else "float32"
    changed: Config = dataclasses.replace(this, torso=torso, precision=precision)
    return changed


def linear(end: float, updates: int | None) -> Callable[[int], float] | None:
    """The learning rate's factor as a function of the clock: from 1 to ``end`` over ``updates``; None:
    constant."""
    if updates is None or end == 1.0:
        return None
    total = updates

    def factor(clock: int) -> float:
        return 1.0 + (end - 1.0) * min(clock / total, 1.0)

    return factor
