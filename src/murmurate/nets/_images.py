"""What torsos for images have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from murmurate.spec import EnvSpec


def check_images(observation: Tensor, shape: torch.Size) -> None:
    """Raise ValueError unless the observations are uint8 [B, *shape]."""
    if observation.dtype != torch.uint8 or observation.shape[1:] != shape:
        raise ValueError(
            f"observations must be uint8 [B, {', '.join(map(str, shape))}], but they are "
            f"{observation.dtype} {list(observation.shape)}"
        )


def for_images(
    name: str, make: Callable[[Sequence[int]], nn.Module]
) -> Callable[[EnvSpec, Sequence[int]], nn.Module]:
    """An entry of ``TORSOS`` that refuses observations other than images.

    make: the torso for observations of a shape (C, H, W).
    """

    def torso(spec: EnvSpec, hidden: Sequence[int]) -> nn.Module:
        if not spec.images:
            raise ValueError(
                f"{name} reads uint8 images [C, H, W], but observations of {spec.name} are "
                f"{spec.observation_dtype} {list(spec.observation_shape)}: use mlp"
            )
        return make(spec.observation_shape)

    return torso
