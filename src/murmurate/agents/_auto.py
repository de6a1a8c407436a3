"""What a config leaves to be decided by the world and the machine."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

import torch

from murmurate.spec import EnvSpec, native_bfloat16

Config = TypeVar("Config")


def without_auto(config: Config, spec: EnvSpec, device: torch.device) -> Config:
    """``config`` with its ``torso`` and ``precision`` chosen where they are ``auto``: nature2013 for images,
    mlp for vectors; bfloat16 for images where the device multiplies it natively."""
    this: Any = config
    images = len(spec.observation_shape) == 3
    torso, precision = this.torso, this.precision
    if torso == "auto":
        torso = "nature2013" if images else "mlp"
    if precision == "auto":
        precision = "bfloat16" if images and native_bfloat16(device) else "float32"
    changed: Config = dataclasses.replace(this, torso=torso, precision=precision)
    return changed
