"""The gradient of an ensemble's loss, layer by layer, into memory that is reused.

Autograd computes the same, with a graph and new tensors for every step (``bench model-ensemble``).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from murmurate.losses.gaussian_nll import bounded_nll_gradient
from murmurate.nets.dynamics import DynamicsEnsemble
from murmurate.nets.precision import products_in
from murmurate.replica.vector import Replica

_BOUNDS = 0.01  # weight of the bounds of the log variances in the loss (Chua et al. 2018)


class EnsembleGradient:
    """``sum of the members' losses + sum_l decay_l |W_l|^2 / 2 + 0.01 sum(high - low)`` and its gradient,
    which is written to ``replica.grad``.

    decay: of the weights of each layer. batch: examples of each member.
    """

    def __init__(
        self, ensemble: DynamicsEnsemble, replica: Replica, decay: Sequence[float], batch: int
    ) -> None:
        self.ensemble, self.decay = ensemble, decay
        net = ensemble.net
        places = dict(replica.named_views(replica.grad))
        depth = range(len(net.weights))
        self._weights = [places[f"net.weights.{i}"] for i in depth]
        self._biases = [places[f"net.biases.{i}"] for i in depth]
        self._low, self._high = places["low"], places["high"]
        like = net.weights[0]
        widths = [weight.shape[2] for weight in net.weights]
        self._sums, self._outputs, self._gradients = (
            [like.new_empty(net.members, batch, width) for width in some]
            for some in (widths, widths[:-1], widths[:-1])
        )

    @torch.no_grad()
    def __call__(self, inputs: Tensor, targets: Tensor, precision: str = "float32") -> Tensor:
        """The members' losses [E], without decay and bounds, for standardised inputs [E, batch, I] and
        targets [E, batch, D]."""
        net, low, high = self.ensemble.net, self.ensemble.low, self.ensemble.high
        with products_in(precision):
            x = [inputs]  # of each layer
            for i, (weight, bias) in enumerate(zip(net.weights, net.biases, strict=True)):
                # faster than baddbmm, which first copies the bias to all rows
                total = torch.bmm(x[i], weight, out=self._sums[i]).add_(bias)
                if i < len(self._outputs):
                    x.append(torch.ops.aten.silu.out(total, out=self._outputs[i]))
            step = bounded_nll_gradient(total, targets, low, high)
            gradient = step.output
            for i, weight in reversed(list(enumerate(net.weights))):
                torch.baddbmm(
                    weight, x[i].transpose(1, 2), gradient, beta=self.decay[i], out=self._weights[i]
                )
                torch.sum(gradient, 1, keepdim=True, out=self._biases[i])
                if i:
                    below = torch.bmm(gradient, weight.transpose(1, 2), out=self._gradients[i - 1])
                    total = self._sums[i - 1]
                    gradient = torch.ops.aten.silu_backward.grad_input(below, total, grad_input=below)
        self._low.copy_(step.low - _BOUNDS)
        self._high.copy_(step.high + _BOUNDS)
        return step.loss
