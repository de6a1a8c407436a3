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
_ROW_MULTIPLE = 16  # the rows of a weight matrix are padded to a multiple of this


class EnsembleGradient:
    """``sum of the members' losses + sum_l decay_l |W_l|^2 / 2 + 0.01 sum(high - low)`` and its gradient,
    which is written to ``replica.grad``.

    A layer is one matrix product: its inputs have a column of ones, and its weights have the biases as a
    further row, so biases and their gradients need no pass of their own. The product, before the activation,
    is called the layer's sums.

    decay: weight decay of each layer. batch: examples of each member. precision: ``bfloat16`` for all layers
    between the first and the last, which remain in the ensemble's dtype, but for the first layer's sums and
    gradient.
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
        layers = range(len(net.weights))
        self._layer_gradients = [
            (gradients[f"net.weights.{i}"], gradients[f"net.biases.{i}"]) for i in layers
        ]
        self._low_gradient, self._high_gradient = gradients["low"], gradients["high"]
        like = net.weights[0].detach()
        hidden_dtype = torch.bfloat16 if precision == "bfloat16" else like.dtype
        self._weights, self._inputs, self._sums = list[Tensor](), list[Tensor](), list[Tensor]()
        for i, weight in enumerate(net.weights):
            members, width, out = weight.shape
            dtype = like.dtype if i in (0, layers[-1]) else hidden_dtype
            rows = -(-(width + 1) // _ROW_MULTIPLE) * _ROW_MULTIPLE  # the rows after the biases are 0
            self._weights.append(like.new_zeros(members, rows, out, dtype=dtype))
            self._inputs.append(like.new_zeros(members, batch, rows, dtype=dtype))
            self._inputs[i][..., width] = 1
            sum_dtype = like.dtype if i == layers[-1] else hidden_dtype
            self._sums.append(like.new_empty(members, batch, out, dtype=sum_dtype))
        self._sum_slopes = [torch.empty_like(sums) for sums in self._sums[:-1]]
        self._input_slopes = [torch.empty_like(inputs) for inputs in self._inputs]

    @torch.no_grad()
    def __call__(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The members' losses [E], without decay and bounds, for standardised inputs [E, batch, I] and
        targets [E, batch, D]."""
        net, low, high = self.ensemble.net, self.ensemble.low, self.ensemble.high
        self._inputs[0][..., : inputs.shape[-1]] = inputs
        for i, (weight, bias) in enumerate(zip(net.weights, net.biases, strict=True)):
            width = weight.shape[1]
            self._weights[i][:, :width] = weight
            self._weights[i][:, width] = bias[:, 0]
            sums = _product(self._inputs[i], self._weights[i], self._sums[i])
            if i < len(self._sum_slopes):
                next_inputs = self._inputs[i + 1][..., : sums.shape[-1]]
                if next_inputs.dtype == sums.dtype:
                    torch.ops.aten.silu.out(sums, out=next_inputs)
                else:
                    next_inputs.copy_(torch.ops.aten.silu(sums))
        nll = bounded_nll_gradient(sums, targets, low, high)
        slope = nll.output
        for i in reversed(range(len(self._layer_gradients))):
            slope = self._layer_gradient(i, slope)
        self._low_gradient.copy_(nll.low - _BOUNDS_WEIGHT)
        self._high_gradient.copy_(nll.high + _BOUNDS_WEIGHT)
        return nll.loss

    def _layer_gradient(self, i: int, slope: Tensor) -> Tensor:
        """Write the gradient of layer ``i``'s weights and biases, given the gradient ``slope`` of its sums;
        returns the gradient of the sums of the layer before it."""
        weight, (weight_gradient, bias_gradient) = self.ensemble.net.weights[i], self._layer_gradients[i]
        width = weight.shape[1]
        gradient = torch.bmm(self._inputs[i].to(slope.dtype).transpose(1, 2), slope)
        torch.add(gradient[:, :width], weight, alpha=self.decay[i], out=weight_gradient)
        bias_gradient[:, 0] = gradient[:, width]
        if i == 0:
            return slope
        # with the rows of the biases and the padding: without them, bmm would first copy the weights
        weights = self._weights[i].transpose(1, 2)
        input_slope = torch.bmm(slope, weights, out=self._input_slopes[i])[..., :width]
        slope_before = self._sum_slopes[i - 1]
        if input_slope.dtype != slope_before.dtype:
            input_slope = slope_before.copy_(input_slope)
        torch.ops.aten.silu_backward.grad_input(input_slope, self._sums[i - 1], grad_input=slope_before)
        return slope_before


def _product(inputs: Tensor, weights: Tensor, out: Tensor) -> Tensor:
    """Write the product to ``out``, which may have another dtype than the factors, and return it."""
    if out.dtype == inputs.dtype:
        return torch.bmm(inputs, weights, out=out)
    return out.copy_(torch.bmm(inputs, weights))
