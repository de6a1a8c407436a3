"""Nets for pixels and vector actions: a convolutional encoder, and a critic that predicts distributions."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from murmurate.nets.batched_mlp import BatchedMLP
from murmurate.nets.initialize import orthogonal_
from murmurate.nets.torso import build_torso, seeded_by
from murmurate.spec import EnvSpec


class PixelEncoder(nn.Module):
    """A torso, layer normalisation and tanh: features in (-1, 1), independent of the torso's scale."""

    def __init__(self, spec: EnvSpec, torso: str, hidden: Sequence[int], generator: torch.Generator) -> None:
        super().__init__()
        with seeded_by(generator):
            self.torso = build_torso(spec, torso, hidden)
        orthogonal_(self.torso, math.sqrt(2.0), generator)
        self.out_features: int = self.torso.out_features  # type: ignore[assignment]
        self.norm = nn.LayerNorm(self.out_features)

    def forward(self, observation: Tensor) -> Tensor:
        """uint8 [B, C, H, W] to float32 [B, F]."""
        normed: Tensor = self.norm(self.torso(observation).float())
        return torch.tanh(normed)


_INITIAL_SCALE = 2.0  # of the distribution of returns, in distances between atoms


class CategoricalCritic(nn.Module):
    """The distribution of the return of an action, as logits over a fixed support (Barth-Maron et al. 2018).

    Initially it is approximately a Laplace distribution around 0 whose scale is two distances between
    atoms. With the usual initial weights it would be uniform, and each move of the target network would
    narrow it only by the discount.

    features: F, the number of features of an observation. encoder: encoder of images, trained with the
    critic; None for vector observations.

    Attributes:
        support: the atoms z [K].
    """

    support: Tensor

    def __init__(
        self,
        features: int,
        spec: EnvSpec,
        hidden: Sequence[int],
        support: Tensor,
        encoder: PixelEncoder | None,
        *,
        generator: torch.Generator,
    ) -> None:
        super().__init__()
        self.encoder = encoder
        inputs = features + math.prod(spec.action_shape)
        self.net = BatchedMLP(1, (inputs, *hidden, len(support)), generator=generator)
        self.register_buffer("support", support, persistent=False)
        middle = support.new_zeros(()).clamp(support[0], support[-1])
        with torch.no_grad():
            distance = (support - middle).abs() / (support[1] - support[0])
            self.net.biases[-1].sub_(distance / _INITIAL_SCALE)

    def forward(self, features: Tensor, scaled: Tensor) -> Tensor:
        """Features [B, F] and a scaled action [B, D] to logits [B, K]."""
        logits: Tensor = self.net(torch.cat([features, scaled], 1))[0]
        return logits


def random_shift(images: Tensor, pad: int, generator: torch.Generator) -> Tensor:
    """Each image [B, C, H, W] moved by up to ``pad`` pixels along either axis; its edges are repeated.

    Source: Kostrikov et al. 2020 (DrQ), section 3.1: replication padding and a random crop. pad: less than
    the images' height and width. generator: on the CPU.
    """
    height, width = images.shape[2:]
    offsets = torch.randint(-pad, pad + 1, (len(images), 2), generator=generator).tolist()
    moved = torch.empty_like(images)
    # by slices: indexing every pixel takes four times as long on a CPU
    for new, old, (y, x) in zip(moved, images, offsets, strict=True):
        top, bottom = max(0, -y), min(height, height - y)
        left, right = max(0, -x), min(width, width - x)
        new[:, top:bottom, left:right] = old[:, top + y : bottom + y, left + x : right + x]
        if left:
            new[:, top:bottom, :left] = new[:, top:bottom, left : left + 1]
        if right < width:
            new[:, top:bottom, right:] = new[:, top:bottom, right - 1 : right]
        if top:
            new[:, :top] = new[:, top : top + 1]
        if bottom < height:
            new[:, bottom:] = new[:, bottom - 1 : bottom]
    return moved
