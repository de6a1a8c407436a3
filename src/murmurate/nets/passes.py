"""Forward and backward passes of batched MLPs without autograd, whose gradients go where they are needed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from murmurate.nets.batched_mlp import BatchedMLP

_ALL = slice(None)


class Passes:
    """Passes through a ``BatchedMLP`` with ReLU.

    Autograd would allocate each gradient, and a replica copy it to its vector; here the products write them
    there. An update of two critics of two layers of 256 takes a fifth less time.

    gradient: by the names of the net's parameters, where ``backward`` writes their gradients, also in another
    dtype; None for nets that never learn.

    Raises ``ValueError`` for another activation.
    """

    def __init__(self, net: BatchedMLP, gradient: Mapping[str, Tensor] | None = None) -> None:
        if net.activation is not torch.relu:
            raise ValueError("the passes without autograd are those of ReLU")
        # a replica moves the parameters' memory, never the parameters
        self._weights, self._biases = list(net.weights), list(net.biases)
        self._slopes = [] if not gradient else list(_layers(len(self._weights), gradient))
        self._ones: dict[torch.dtype, Tensor] = {}

    def forward(self, x: Tensor, members: slice = _ALL) -> list[Tensor]:
        """[E, B, in] to the inputs of all layers, and the result [E, B, out] behind them.

        Each layer computes in the dtype of its weight. members: which of the MLPs, E in number.
        """
        seen = []
        last = len(self._weights) - 1
        for layer, (weight, bias) in enumerate(zip(self._weights, self._biases, strict=True)):
            if members is not _ALL:
                weight, bias = weight[members], bias[members]
            seen.append(x.to(weight.dtype))
            # faster than baddbmm, which first copies the bias to all rows
            x = torch.bmm(seen[layer], weight).add_(bias)
            if layer < last:
                x.relu_()
        return [*seen, x]

    def backward(self, seen: list[Tensor], slope: Tensor) -> None:
        """Write the gradient of all parameters; ``slope`` [E, B, out] is that of the result."""
        for layer in range(len(self._weights) - 1, -1, -1):
            weight, (weight_slope, bias_slope) = self._weights[layer], self._slopes[layer]
            slope = slope.to(weight.dtype)
            _product(seen[layer].transpose(1, 2), slope, weight_slope)
            _product(self._row_of_ones(slope), slope, bias_slope)
            if layer:
                slope = _before(slope, weight, seen[layer])

    def input_slope(self, seen: list[Tensor], slope: Tensor, members: slice = _ALL) -> Tensor:
        """The gradient [E, B, in] of the input, and of no parameter."""
        for layer in range(len(self._weights) - 1, 0, -1):
            slope = _before(slope, self._weights[layer][members], seen[layer])
        first = self._weights[0][members]
        return torch.bmm(slope.to(first.dtype), first.transpose(1, 2))

    def _row_of_ones(self, like: Tensor) -> Tensor:
        """[E, 1, B]: a product with it sums over the batch, faster than ``sum``."""
        shape = (like.shape[0], 1, like.shape[1])
        found = self._ones.get(like.dtype)
        if found is None or found.shape != shape:
            found = self._ones[like.dtype] = like.new_ones(shape)
        return found


def _before(slope: Tensor, weight: Tensor, seen: Tensor) -> Tensor:
    """The gradient before a layer and the ReLU in front of it, whose result it saw."""
    slope = torch.bmm(slope.to(weight.dtype), weight.transpose(1, 2))
    torch.ops.aten.threshold_backward.grad_input(slope, seen, 0, grad_input=slope)
    return slope


def _layers(layers: int, gradient: Mapping[str, Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    for layer in range(layers):
        yield gradient[f"weights.{layer}"], gradient[f"biases.{layer}"]


def _product(one: Tensor, other: Tensor, out: Tensor) -> None:
    if out.dtype == one.dtype:
        torch.bmm(one, other, out=out)
    else:
        out.copy_(torch.bmm(one, other))
