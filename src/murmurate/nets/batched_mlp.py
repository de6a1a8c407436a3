"""Several MLPs of one shape, evaluated together: each layer is one batched product."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

Initialize = Callable[[Tensor, Tensor, torch.Generator], None]
"""Draws a layer's weight [E, in, out] and bias [E, 1, out], in place."""


def uniform_fan_in_(weight: Tensor, bias: Tensor, generator: torch.Generator) -> None:
    """U(-1/sqrt(in), 1/sqrt(in)), as ``nn.Linear`` draws both."""
    bound = 1 / math.sqrt(weight.shape[-2])
    for tensor in (weight, bias):
        tensor.uniform_(-bound, bound, generator=generator)


def truncated_normal_(weight: Tensor, bias: Tensor, generator: torch.Generator) -> None:
    """N(0, 1/(4 in)), cut off at two standard deviations; biases 0 (Chua et al. 2018)."""
    std = 1 / (2 * math.sqrt(weight.shape[-2]))
    nn.init.trunc_normal_(weight, 0.0, std, -2 * std, 2 * std, generator=generator)
    bias.zero_()


class BatchedMLP(nn.Module):
    """``members`` MLPs with weights of their own, as twin critics and ensembles need.

    sizes: widths from the input to the output, at least two. activation: applied after every layer but the
    last. initialize: draws the weights and biases of a layer (see ``Initialize``). generator: generator of
    all of them, on whose device they are drawn.

    Raises ``ValueError`` if there is no member, fewer than two sizes, or one below 1.
    """

    def __init__(
        self,
        members: int,
        sizes: Sequence[int],
        activation: Callable[[Tensor], Tensor] = torch.relu,
        *,
        initialize: Initialize = uniform_fan_in_,
        generator: torch.Generator,
    ) -> None:
        super().__init__()
        if len(sizes) < 2 or min(sizes) < 1 or members < 1:
            raise ValueError(
                f"{members} MLPs of widths {list(sizes)}: give at least one MLP and two widths of 1 or more"
            )
        self.members, self.in_features = members, sizes[0]
        self.activation = activation
        pairs = list(pairwise(sizes))
        # [in, out], the transpose of ``nn.Linear``'s, by which the forward pass multiplies directly
        self.weights = nn.ParameterList(torch.empty(members, a, b) for a, b in pairs)
        self.biases = nn.ParameterList(torch.empty(members, 1, b) for _, b in pairs)
        with torch.no_grad():
            for weight, bias in zip(self.weights, self.biases, strict=True):
                if not weight.is_meta:  # else the net is built for its sizes alone
                    drawn = [torch.empty(x.shape, device=generator.device) for x in (weight, bias)]
                    initialize(drawn[0], drawn[1], generator)
                    weight.copy_(drawn[0])
                    bias.copy_(drawn[1])

    def forward(self, x: Tensor) -> Tensor:
        """Inputs [B, in], the same for all members, or [E, B, in], to results [E, B, out]; each layer
        computes in the dtype of its weight. Raises ValueError for another shape."""
        members, width = self.members, self.in_features
        if x.ndim not in (2, 3) or x.shape[-1] != width or (x.ndim == 3 and len(x) != members):
            raise ValueError(
                f"an input must be [B, {width}] or [{members}, B, {width}], but it has shape {list(x.shape)}"
            )
        if x.ndim == 2:
            x = x.expand(members, *x.shape)
        last = len(self.weights) - 1
        for layer, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            x = torch.baddbmm(bias, x.to(weight.dtype), weight)
            if layer < last:
                x = self.activation(x)
        return x
