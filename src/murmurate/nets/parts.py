"""Torsos for images that are parts of flattened observations."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from murmurate.nets.mlp import MLP
from murmurate.spec import EnvSpec


class PartsTorso(nn.Module):
    """A torso for each image, whose features an MLP reads beside all other numbers.

    spec: spec of a world whose observations are flattened; where they are stacked, the images of a part
    become the channels of one image. make: makes the torso of images. hidden: widths of the MLP's layers.
    """

    def __init__(
        self, spec: EnvSpec, make: Callable[[EnvSpec, Sequence[int]], nn.Module], hidden: Sequence[int]
    ) -> None:
        super().__init__()
        self.history = spec.history
        self.images = [part for part in spec.parts if part[3]]
        self.numbers = [part for part in spec.parts if not part[3]]
        self.torsos = nn.ModuleList(make(_of_image(spec, shape), hidden) for *_, shape in self.images)
        features = sum(cast(int, torso.out_features) for torso in self.torsos)
        features += self.history * sum(stop - start for _, start, stop, _ in self.numbers)
        self.mlp = MLP((features, *hidden), torch.relu)
        self.out_features = self.mlp.out_features

    def forward(self, observation: Tensor) -> Tensor:
        """Observations [B, D] to features [B, ``out_features``] of the parameters' dtype."""
        steps = observation.reshape(observation.shape[0], self.history, -1)
        features = []
        for (_, start, stop, shape), torso in zip(self.images, self.torsos, strict=True):
            # uint8 again, if other parts made all numbers float32
            image = steps[..., start:stop].clamp(0, 255).to(torch.uint8).contiguous()
            features.append(torso(image.reshape(-1, self.history * shape[0], *shape[1:])))
        for _, start, stop, _ in self.numbers:
            features.append(steps[..., start:stop].flatten(1).to(features[0].dtype))
        result: Tensor = self.mlp(torch.cat(features, 1))
        return result


def image_shapes(spec: EnvSpec) -> list[tuple[int, ...]]:
    """The shapes [C, H, W] of the images among the parts of an observation."""
    return [shape for *_, shape in spec.parts if shape]


def _of_image(spec: EnvSpec, shape: tuple[int, ...]) -> EnvSpec:
    """The spec of a world whose observations are one of the images alone."""
    channels, *size = shape
    return dataclasses.replace(
        spec,
        observation_shape=(spec.history * channels, *size),
        observation_dtype=torch.uint8,
        stacked=spec.history > 1,
        channels=channels,
        history=1,
        parts=(),
    )
