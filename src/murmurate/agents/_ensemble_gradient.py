"""The gradient of an ensemble's loss, computed layer by layer in memory that is reused.

Autograd would compute the same with a graph and new tensors for every step (``bench model-ensemble``).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from murmurate.losses.gaussian_nll import bounded_nll_gradient
from murmurate.nets.dynamics import DynamicsEnsemble
from murmurate.replica.vector import Replica

_BOUNDS_WEIGHT = 0.01  # weight of the bounds of the log variances in the loss (Chua et al. 2018)
_WIDTH_MULTIPLE = 16  # layers are padded to a multiple of this many units


class EnsembleGradient:
    """``sum of the members' losses + sum_l decay_l |W_l|^2 / 2 + 0.01 sum(high - low)`` and its gradient,
    which is written to ``replica.grad``.

    A layer is one matrix product: its inputs have a column of ones, and its weights have the biases as a
    further row, so biases and their gradients need no pass of their own. The product, before the activation,
    is called the layer's sums. Sums are as wide as the next layer's inputs, so that the activation is one
    pass over contiguous memory.

    decay: weight decay of each layer. batch: examples of each member. precision: ``bfloat16`` for all
    products but the last layer's forward one, which remains in the ensemble's dtype. Inputs keep the digits
    that bfloat16 lacks: what rounding cuts off follows in further columns, with the same weights.
    """

    def __init__(
        self,
        ensemble: DynamicsEnsemble,
        replica: Replica,
        decay: Sequence[float],
        batch: int,
        precision: str = "float32",
    ) -> None:
        self.ensemble, self.decay = ensemble, decay
        net = ensemble.net
        gradients = dict(replica.named_views(replica.grad))
        last = len(net.weights) - 1
        self._layer_gradients = [
            (gradients[f"net.weights.{i}"], gradients[f"net.biases.{i}"]) for i in range(last + 1)
        ]
        self._low_gradient, self._high_gradient = gradients["low"], gradients["high"]
        like = net.weights[0].detach()
        self._dtype = torch.bfloat16 if precision == "bfloat16" else like.dtype
        self._weights, self._inputs, self._sums = list[Tensor](), list[Tensor](), list[Tensor]()
        for i, weight in enumerate(net.weights):
            members, width, out = weight.shape
            rows = _padded(2 * width if i == 0 and self._dtype != like.dtype else width)
            columns, forward_dtype = (out, like.dtype) if i == last else (_padded(out), self._dtype)
            self._weights.append(like.new_zeros(members, rows, columns, dtype=forward_dtype))
            self._inputs.append(like.new_zeros(members, batch, rows, dtype=self._dtype))
            self._sums.append(like.new_empty(members, batch, columns, dtype=forward_dtype))
        self._inputs[0][..., net.in_features] = 1
        self._last_inputs = torch.empty_like(self._inputs[last], dtype=like.dtype)
        self._sum_slopes = [torch.empty_like(sums) for sums in self._sums[:-1]]
        self._input_slopes = [torch.empty_like(inputs) for inputs in self._inputs]

    @torch.no_grad()
    def __call__(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The members' losses [E], without decay and bounds, for standardised inputs [E, batch, I] and
        targets [E, batch, D]."""
        net, low, high = self.ensemble.net, self.ensemble.low, self.ensemble.high
        self._set_inputs(inputs)
        layers = zip(net.weights, net.biases, self._inputs, self._weights, self._sums, strict=True)
        for i, (weight, bias, factor, padded_weight, sums) in enumerate(layers):
            _, width, out = weight.shape
            padded_weight[:, :width, :out] = weight
            padded_weight[:, width, :out] = bias[:, 0]
            if i == 0 and self._dtype != weight.dtype:
                padded_weight[:, width + 1 : 2 * width + 1, :out] = weight
            if factor.dtype != padded_weight.dtype:
                factor = self._last_inputs.copy_(factor)
            torch.bmm(factor, padded_weight, out=sums)
            if i < len(self._sum_slopes):
                torch.ops.aten.silu.out(sums, out=self._inputs[i + 1])
                self._inputs[i + 1][..., out] = 1
        nll = bounded_nll_gradient(self._sums[-1], targets, low, high)
        slope = nll.output.to(self._dtype)
        for i in reversed(range(len(self._layer_gradients))):
            slope = self._layer_gradient(i, slope)
        self._low_gradient.copy_(nll.low - _BOUNDS_WEIGHT)
        self._high_gradient.copy_(nll.high + _BOUNDS_WEIGHT)
        return nll.loss

    def _set_inputs(self, inputs: Tensor) -> None:
        first, width = self._inputs[0], inputs.shape[-1]
        first[..., :width] = inputs
        if first.dtype != inputs.dtype:
            first[..., width + 1 : 2 * width + 1] = inputs - first[..., :width]

    def _layer_gradient(self, i: int, slope: Tensor) -> Tensor:
        """Write the gradient of layer ``i``'s weights and biases, given the gradient ``slope`` of its sums;
        returns the gradient of the sums of the layer before it."""
        weight, (weight_gradient, bias_gradient) = self.ensemble.net.weights[i], self._layer_gradients[i]
        _, width, out = weight.shape
        gradient = torch.bmm(self._inputs[i].transpose(1, 2), slope)
        torch.add(gradient[:, :width, :out], weight, alpha=self.decay[i], out=weight_gradient)
        bias_gradient[:, 0] = gradient[:, width, :out]
        if i == 0:
            return slope
        # sums beyond the layer's width get a slope, too, which nothing reads: the weights after them are 0
        weights = self._weights[i].to(slope.dtype).transpose(1, 2)
        input_slope = torch.bmm(slope, weights, out=self._input_slopes[i])
        slope_before = self._sum_slopes[i - 1]
        torch.ops.aten.silu_backward.grad_input(input_slope, self._sums[i - 1], grad_input=slope_before)
        return slope_before


def _padded(width: int) -> int:
    """Columns of the inputs of a layer of this width: these, that of ones, and then zeros."""
    return -(-(width + 1) // _WIDTH_MULTIPLE) * _WIDTH_MULTIPLE
