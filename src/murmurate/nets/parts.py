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
    smallest: least height and width, in pixels, of an image that has a torso if another one has it; pixels of
    smaller ones are read as numbers from 0 to 1. Raises ValueError for a torso without ``out_features``.
    """

    def __init__(
        self,
        spec: EnvSpec,
        make: Callable[[EnvSpec, Sequence[int]], nn.Module],
        hidden: Sequence[int],
        smallest: int,
    ) -> None:
        super().__init__()
        self.history = spec.history
        images = [part for part in spec.parts if part[3]]
        self.images = [part for part in images if min(part[3][1:]) >= smallest] or images
        self.numbers = [part for part in spec.parts if part not in self.images]
        self.torsos = nn.ModuleList(make(_of_image(spec, shape), hidden) for *_, shape in self.images)
        if any(not isinstance(getattr(torso, "out_features", None), int) for torso in self.torsos):
            raise ValueError("a torso of an image has no number of features: set its out_features")
        features = sum(cast(int, torso.out_features) for torso in self.torsos)
        features += self.history * sum(stop - start for _, start, stop, _ in self.numbers)
        self.mlp = MLP((features, *hidden), torch.relu)
        self.out_features = self.mlp.out_features

    def forward(self, observation: Tensor) -> Tensor:
        """Observations [B, D] to features [B, ``out_features``] of the dtype of the MLP's parameters."""
        steps = observation.reshape(observation.shape[0], self.history, -1)
        features = []
        for (_, start, stop, shape), torso in zip(self.images, self.torsos, strict=True):
            # uint8 again, if other parts made all numbers float32
            image = steps[..., start:stop].clamp(0, 255).to(torch.uint8).contiguous()
            features.append(torso(image.reshape(-1, self.history * shape[0], *shape[1:])).float())
        for _, start, stop, shape in self.numbers:
            numbers = steps[..., start:stop].flatten(1).float()
            features.append(numbers / 255 if shape else numbers)
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
