"""What agents have in common: what a config leaves to the world and the machine, and how rates fall."""

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
    mlp for vectors; bfloat16 for images where the device multiplies it natively."""
    this: Any = config
    torso, precision = this.torso, this.precision
    if torso == AUTO:
        torso = usual_torso(spec)
    if precision == "auto":
        precision = "bfloat16" if spec.images and native_bfloat16(device) else "float32"
    changed: Config = dataclasses.replace(this, torso=torso, precision=precision)
    return changed


def linear(end: float, updates: int | None) -> Callable[[int], float] | None:
    """A rate's factor by the clock: from 1 to ``end`` over so many updates; None stays at 1."""
    if updates is None or end == 1.0:
        return None
    total = updates

    def factor(clock: int) -> float:
        return 1.0 + (end - 1.0) * min(clock / total, 1.0)

    return factor
