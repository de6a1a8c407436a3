"""Forward and backward passes of batched MLPs without autograd, writing gradients where they are needed."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from murmurate.nets._conv_kernels import is_traced
from murmurate.nets._mlp_kernels import add_and_rectify_
from murmurate.nets.batched_mlp import BatchedMLP
from murmurate.nets.precision import processors

_ALL = slice(None)
_NARROW = 16  # a factor with fewer columns may be multiplied faster as the left one


class Passes:
    """Passes through a ``BatchedMLP`` with ReLU.

    Autograd would allocate each gradient, and the replica would copy it into its flat vector; here the matrix
    products write into that vector. An update of two critics with two layers of 256 units takes a fifth less
    time.

    gradient: for each parameter by name, the tensor that ``backward`` writes its gradient into, possibly of
    another dtype; None for nets that never learn.

    Raises ``ValueError`` for another activation.
    """

    def __init__(self, net: BatchedMLP, gradient: Mapping[str, Tensor] | None = None) -> None:
        if net.activation is not torch.relu:
            raise ValueError("passes without autograd exist only for ReLU")
        # a replica may move the parameters' memory, but never replaces the parameters
        self._weights, self._biases = list(net.weights), list(net.biases)
        self._slopes = [] if not gradient else list(_by_layer(len(self._weights), gradient))
        self._ones: dict[torch.dtype, Tensor] = {}

    def forward(self, x: Tensor, members: slice = _ALL) -> list[Tensor]:
        """From the input [E, B, in]: the inputs of all layers, followed by the result [E, B, out].

        Each layer computes in the dtype of its weight. members: the MLPs to evaluate, E in number.
        """
        activations = []
        last = len(self._weights) - 1
        for layer, (weight, bias) in enumerate(zip(self._weights, self._biases, strict=True)):
            if members is not _ALL:
                weight, bias = weight[members], bias[members]
            activations.append(_in_dtype(x, weight.dtype))
            # faster than baddbmm, which first copies the bias to all rows
            x = product(activations[layer], weight)
            if layer < last:
                add_and_rectify_(x, bias)
            else:
                x.add_(bias)
        return [*activations, x]

    def result(self, x: Tensor) -> Tensor:
        """The result [E, B, out] alone, for no ``backward``."""
        return self.forward(x)[-1]

    def rows(self, activations: list[Tensor], rows: slice) -> list[Tensor]:
        """What ``backward`` needs for some rows of a batch."""
        return [activation[:, rows] for activation in activations[:-1]]

    def backward(self, activations: list[Tensor], slope: Tensor) -> None:
        """Write the gradients with respect to all parameters. slope: the gradient of the loss with respect to
        the result, [E, B, out]."""
        for layer in range(len(self._weights) - 1, -1, -1):
            weight, (weight_slope, bias_slope) = self._weights[layer], self._slopes[layer]
            result_slope, slope = slope, _in_dtype(slope, weight.dtype)
            _write_product(activations[layer].transpose(1, 2), slope, weight_slope)
            # from the wider dtype: more exact, and sums of float32 take a tenth of the time of bfloat16's
            widest = max(result_slope, slope, key=Tensor.element_size)
            _write_product(self._row_of_ones(widest), widest, bias_slope)
            if layer:
                slope = _slope_before(slope, weight, activations[layer])

    def input_slope(
        self, activations: list[Tensor], slope: Tensor, members: slice = _ALL, inputs: slice = _ALL
    ) -> Tensor:
        """The gradient [E, B, I] with respect to some of the inputs alone; ``slope`` as in ``backward``."""
        for layer in range(len(self._weights) - 1, 0, -1):
            slope = _slope_before(slope, self._weights[layer][members], activations[layer])
        first = self._weights[0][members, inputs]
        return product(_in_dtype(slope, first.dtype), first.transpose(1, 2))

    def slope_of_chosen(self, activations: list[Tensor], chosen: Tensor, inputs: slice) -> Tensor:
        """The gradient [B, I] of ``sum_b f_chosen[b](x_b)`` with respect to some of the inputs, for MLPs with
        one output. Each row goes through one MLP, which is half the work of ``input_slope`` for two.

        chosen: [B], the number of an MLP for each row. inputs: which of the inputs.
        """
        first, last = self._weights[0][:, inputs], len(self._weights) - 1
        result = activations[-1].new_empty(len(chosen), first.shape[1])
        for member in range(len(first)):
            rows = (chosen == member).nonzero()[:, 0]
            slope = self._weights[last][member].t().expand(len(rows), -1)
            for layer in range(last, 0, -1):
                if layer < last:
                    weight = self._weights[layer][member]
                    slope = torch.mm(_in_dtype(slope, weight.dtype), weight.t())
                slope = torch.ops.aten.threshold_backward(
                    slope, activations[layer][member].index_select(0, rows), 0
                )
            slope = product(_in_dtype(slope, first.dtype)[None], first[member].t()[None])[0]
            result.index_copy_(0, rows, slope)
        return result

    def _row_of_ones(self, like: Tensor) -> Tensor:
        """Ones [E, 1, B]: a product with them sums over the batch, and is faster than ``sum``."""
        shape = (like.shape[0], 1, like.shape[1])
        ones = self._ones.get(like.dtype)
        if ones is None or ones.shape != shape:
            ones = self._ones[like.dtype] = like.new_ones(shape)
        return ones


def _slope_before(slope: Tensor, weight: Tensor, activations: Tensor) -> Tensor:
    """The gradient with respect to the input of the ReLU before a layer, from ``slope``, that with respect to
    the layer's output. activations: the ReLU's output."""
    slope = _in_dtype(slope, weight.dtype)
    if weight.shape[2] == 1:  # an outer product, and faster than bmm
        slope = slope * weight.transpose(1, 2)
    else:
        slope = torch.bmm(slope, weight.transpose(1, 2))
    torch.ops.aten.threshold_backward.grad_input(slope, activations, 0, grad_input=slope)
    return slope


def _in_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x if x.dtype == dtype else x.to(dtype)  # ``to`` takes a few microseconds even then


def _by_layer(layers: int, gradient: Mapping[str, Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """(gradient of the weight, gradient of the bias) of each layer."""
    for layer in range(layers):
        yield gradient[f"weights.{layer}"], gradient[f"biases.{layer}"]


def product(one: Tensor, other: Tensor) -> Tensor:
    """``one other`` [E, M, N], as the transpose of its transpose where that is faster."""
    if _is_faster_transposed(one, other):
        return torch.bmm(other.transpose(1, 2), one.transpose(1, 2)).transpose(1, 2)
    return torch.bmm(one, other)


def _is_faster_transposed(one: Tensor, other: Tensor) -> bool:
    """Whether ``other`` has so few columns that MKL multiplies its transpose by that of ``one`` faster. If
    that gives it a transposed view as the right factor, it is five times as fast on processors of AMD, and
    up to fifteen times as slow on those of Intel."""
    if other.shape[2] >= _NARROW or is_traced() or one.shape[1] < _NARROW:  # exports take any batch
        return False
    return one.stride(2) != 1 or _is_amd()


@functools.cache
def _is_amd() -> bool:
    return "AuthenticAMD" in processors()


def _write_product(one: Tensor, other: Tensor, out: Tensor) -> None:
    if out.dtype == one.dtype and not _is_faster_transposed(one, other):
        torch.bmm(one, other, out=out)
    else:
        out.copy_(product(one, other))
