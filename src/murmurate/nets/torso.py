"""The part of a net that reads observations, by name."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from murmurate.nets.conv import nature_2013, nature_2015
from murmurate.nets.mlp import MLP
from murmurate.spec import EnvSpec


def torso_name(spec: EnvSpec, name: str | None) -> str:
    """``name``, or what suits the world: nature2013 for frames, mlp for vectors.

    Raises:
        ValueError: for a torso of images where there are none.
    """
    frames = len(spec.observation_shape) == 3 and spec.observation_dtype == torch.uint8
    if name is None:
        return "nature2013" if frames else "mlp"
    if name in ("nature2013", "nature2015") and not frames:
        raise ValueError(
            f"{name} reads uint8 frames [C, H, W], but observations of {spec.name} are "
            f"{spec.observation_dtype} {list(spec.observation_shape)}: use mlp"
        )
    return name


def build_torso(
    spec: EnvSpec, name: str, hidden: Sequence[int], *, channels_last: bool
) -> tuple[nn.Module, int]:
    """(the torso called ``name``, how many features it gives). Weights are drawn from the global generator.

    Raises:
        ValueError: for a torso nobody knows.
    """
    trunk: nn.Module
    if name == "nature2013":
        trunk = nature_2013(spec.observation_shape, channels_last=channels_last)
    elif name == "nature2015":
        trunk = nature_2015(spec.observation_shape, channels_last=channels_last)
    elif name == "mlp":
        trunk = MLP((math.prod(spec.observation_shape), *hidden))
    else:
        raise ValueError(f"there is no torso called '{name}': use nature2013, nature2015 or mlp")
    return trunk, int(trunk.out_features)
