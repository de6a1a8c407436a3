"""The gradient of an ensemble's loss, layer by layer, into memory that is reused.

Autograd computes the same, with a graph and new tensors for every step (``bench model-ensemble``).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from murmurate.losses.gaussian_nll import bounded_nll_gradient
from murmurate.nets.dynamics import DynamicsEnsemble
from murmurate.replica.vector import Replica

_BOUNDS = 0.01  # weight of the bounds of the log variances in the loss (Chua et al. 2018)
_ALIGNED = 16


class EnsembleGradient:
    """``sum of the members' losses + sum_l decay_l |W_l|^2 / 2 + 0.01 sum(high - low)`` and its gradient,
    which is written to ``replica.grad``.

    Each layer is one product of its inputs, with a column of ones, and its weights, with the biases as a
    further row: biases and their gradients then cost no pass over the activations.

    decay: weight decay of each layer. batch: examples of each member. precision: ``bfloat16`` for
    everything between the first and the last layer, which remain in the ensemble's dtype.
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
        places = dict(replica.named_views(replica.grad))
        depth = range(len(net.weights))
        self._places = [(places[f"net.weights.{i}"], places[f"net.biases.{i}"]) for i in depth]
        self._low, self._high = places["low"], places["high"]
        like = net.weights[0].detach()
        hidden = torch.bfloat16 if precision == "bfloat16" else like.dtype
        self._weights, self._inputs, self._sums = list[Tensor](), list[Tensor](), list[Tensor]()
        for i, weight in enumerate(net.weights):
            members, wide, out = weight.shape
            dtype = like.dtype if i in (0, depth[-1]) else hidden
            rows = -(-(wide + 1) // _ALIGNED) * _ALIGNED  # those behind the biases are 0
            self._weights.append(like.new_zeros(members, rows, out, dtype=dtype))
            self._inputs.append(like.new_zeros(members, batch, rows, dtype=dtype))
            self._inputs[i][..., wide] = 1
            self._sums.append(
                like.new_empty(members, batch, out, dtype=like.dtype if i == depth[-1] else hidden)
            )
        self._slopes = [torch.empty_like(sums) for sums in self._sums[:-1]]
        self._below = [torch.empty_like(inputs) for inputs in self._inputs]

    @torch.no_grad()
    def __call__(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The members' losses [E], without decay and bounds, for standardised inputs [E, batch, I] and
        targets [E, batch, D]."""
        net, low, high = self.ensemble.net, self.ensemble.low, self.ensemble.high
        self._inputs[0][..., : inputs.shape[-1]] = inputs
        for i, (weight, bias) in enumerate(zip(net.weights, net.biases, strict=True)):
            wide = weight.shape[1]
            self._weights[i][:, :wide] = weight
            self._weights[i][:, wide] = bias[:, 0]
            sums = _product(self._inputs[i], self._weights[i], self._sums[i])
            if i < len(self._slopes):
                following = self._inputs[i + 1]
                place = following[..., : sums.shape[-1]]
                if following.dtype == sums.dtype:
                    torch.ops.aten.silu.out(sums, out=place)
                else:
                    place.copy_(torch.ops.aten.silu(sums))
        step = bounded_nll_gradient(sums, targets, low, high)
        slope = step.output
        for i in reversed(range(len(self._places))):
            slope = self._layer_gradient(i, slope)
        self._low.copy_(step.low - _BOUNDS)
        self._high.copy_(step.high + _BOUNDS)
        return step.loss

    def _layer_gradient(self, i: int, slope: Tensor) -> Tensor:
        """Write layer ``i``'s gradient from its sums' gradient; returns that of the sums before it."""
        weight, (weight_place, bias_place) = self.ensemble.net.weights[i], self._places[i]
        wide = weight.shape[1]
        found = torch.bmm(self._inputs[i].to(slope.dtype).transpose(1, 2), slope)
        torch.add(found[:, :wide], weight, alpha=self.decay[i], out=weight_place)
        bias_place[:, 0] = found[:, wide]
        if i == 0:
            return slope
        # of all rows, also those of the biases: a part of the weights would be copied first
        below = torch.bmm(slope, self._weights[i].transpose(1, 2), out=self._below[i])[..., :wide]
        before = self._slopes[i - 1]
        if below.dtype != before.dtype:
            below = before.copy_(below)
        torch.ops.aten.silu_backward.grad_input(below, self._sums[i - 1], grad_input=before)
        return before


def _product(one: Tensor, other: Tensor, out: Tensor) -> Tensor:
    """``out``, which may have another dtype than the factors."""
    if out.dtype == one.dtype:
        return torch.bmm(one, other, out=out)
    return out.copy_(torch.bmm(one, other))
