"""An ensemble of probabilistic models of a world's dynamics (Chua et al. 2018; Janner et al. 2019)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from murmurate.nets.batched_mlp import BatchedMLP, truncated_normal_


class DynamicsEnsemble(nn.Module):
    """E nets that predict means and log variances of D numbers from I inputs, which are standardised.

    The parameters ``low`` and ``high`` [D] are for bounding the log variances
    (``losses.gaussian_nll.soft_bounds``). elites: how many members are used for predictions; the buffer
    ``elite`` contains their indices.

    Raises ``ValueError`` for more elites than members.
    """

    input_mean: Tensor
    input_scale: Tensor
    elite: Tensor

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        members: int,
        elites: int,
        layers: int,
        hidden: int,
        generator: torch.Generator,
    ) -> None:
        super().__init__()
        if elites > members:
            raise ValueError(f"{elites} elites cannot be chosen from {members} members")
        widths = (inputs, *[hidden] * layers, 2 * outputs)
        self.net = BatchedMLP(members, widths, F.silu, initialize=truncated_normal_, generator=generator)
        self.low = nn.Parameter(torch.full((outputs,), -10.0))
        self.high = nn.Parameter(torch.full((outputs,), 0.5))
        self.register_buffer("input_mean", torch.zeros(inputs))
        self.register_buffer("input_scale", torch.ones(inputs))
        self.register_buffer("elite", torch.arange(elites))

    @torch.no_grad()
    def standardise_by(self, mean: Tensor, variance: Tensor) -> None:
        """Use these statistics [I] of the inputs from now on; inputs that hardly vary are not scaled."""
        scale = variance.clamp_min(0).sqrt()
        self.input_mean.copy_(mean)
        self.input_scale.copy_(torch.where(scale < 1e-6, torch.ones_like(scale), scale))

    def standardised(self, inputs: Tensor) -> Tensor:
        return (inputs - self.input_mean) / self.input_scale

    def forward(self, inputs: Tensor) -> Tensor:
        """Raw inputs [B, I], or [E, B, I], to means and unbounded log variances [E, B, 2 D]."""
        output: Tensor = self.net(self.standardised(inputs))
        return output

    @torch.no_grad()
    def predict(self, inputs: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Means and unbounded log variances [B, D], each row predicted by one elite.

        Differs: elites are not drawn independently for each row, but a random permutation gives each elite an
        equal share of the rows, so that no row is computed more than once.
        """
        size, elites = len(inputs), len(self.elite)
        order = torch.randperm(size, generator=generator, device=generator.device).to(inputs.device)
        rows_each = -(-size // elites)
        # the rows may not fill the last elite's share: the first rows of ``order`` are then repeated
        rows = order[torch.arange(rows_each * elites, device=order.device) % size].view(elites, rows_each)
        x = self.standardised(inputs)[rows]
        for layer, (weight, bias) in enumerate(zip(self.net.weights, self.net.biases, strict=True)):
            x = torch.baddbmm(bias[self.elite], x, weight[self.elite])
            if layer < len(self.net.weights) - 1:
                x = self.net.activation(x)
        output = torch.empty(size, x.shape[-1], dtype=x.dtype, device=x.device)
        output[order] = x.flatten(0, 1)[:size]
        mean, log_variance = output.chunk(2, -1)
        return mean, log_variance
