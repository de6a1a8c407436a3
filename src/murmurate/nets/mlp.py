"""Fully connected torsos for vector observations."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor, nn

from murmurate.errors import Refusal
from murmurate.nets.precision import first_dtype
from murmurate.ranges import Widths
from murmurate.spec import EnvSpec


def layer_widths(hidden: Widths) -> tuple[int, ...]:
    """The widths of all hidden layers. Raises Refusal if there is none."""
    if hidden == ():
        raise Refusal("hidden names no layer; a net has at least one. Give its width, such as 64.")
    return hidden if isinstance(hidden, tuple) else (hidden, hidden)


class MLP(nn.Module):
    """Linear layers, each followed by ``activation``.

    Args:
        sizes: widths from the input to the output, at least two.
        activation: applied after every layer, including the last.

    Raises:
        ValueError: if there are fewer than two sizes, or one is below 1.
    """

    shared: ClassVar[bool] = False  # see ``nets/torso.py``

    def __init__(self, sizes: Sequence[int], activation: Callable[[Tensor], Tensor] = torch.tanh) -> None:
        super().__init__()
        if len(sizes) < 2 or min(sizes) < 1:
            raise ValueError(f"sizes must be at least two widths of 1 or more, but they are {list(sizes)}")
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))
        self.activation = activation
        self.in_features, self.out_features = sizes[0], sizes[-1]

    def forward(self, observation: Tensor) -> Tensor:
        """Observations [B, ...] of any dtype, of sizes[0] numbers each, to features [B, sizes[-1]] of the
        parameters' dtype."""
        x = observation.flatten(1)
        if x.shape[1] != self.in_features:
            raise ValueError(
                f"an observation must have {self.in_features} numbers, but the batch has "
                f"shape {list(observation.shape)}"
            )
        x = x.to(first_dtype(self))
        for layer in self.layers:
            x = self.activation(layer(x))
        return x


def _mlp(spec: EnvSpec, hidden: Sequence[int]) -> MLP:
    return MLP((math.prod(spec.observation_shape), *hidden))


TORSOS = {"mlp": _mlp}
