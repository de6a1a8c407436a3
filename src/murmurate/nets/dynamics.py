"""An ensemble of probabilistic models of a world's dynamics (Chua et al. 2018; Janner et al. 2019)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from murmurate.nets.batched_mlp import BatchedMLP, truncated_normal_


class DynamicsEnsemble(nn.Module):
    """E nets that predict means and log variances of D numbers from I inputs, which are standardised.

    inputs, outputs: I and D. members: E. elites: how many members are used for predictions; the buffer
    ``elite`` contains their indices. layers, hidden: number and width of the hidden layers. The parameters
    ``low`` and ``high`` [D] are for bounding the log variances (``losses.gaussian_nll.soft_bounds``).

    Raises ``ValueError`` unless there are at least one elite and as many members as elites.
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
        if not 1 <= elites <= members:
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
        """Use these statistics [I] of the inputs from now on. Inputs whose standard deviation is below 1e-6
        are not scaled."""
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
        """Means and unbounded log variances [B, D] from raw inputs [B, I], each row predicted by one elite.

        generator: draws by which one. Differs: elites are not drawn independently for each row. The shuffled
        rows are dealt out to the shuffled elites, whose numbers of rows differ by at most 1, so that no elite
        has to compute all rows.
        """
        size, elites = len(inputs), len(self.elite)
        order, elite_order = (
            torch.randperm(count, generator=generator, device=generator.device).to(inputs.device)
            for count in (size, elites)
        )
        members = self.elite[elite_order]
        rows_each = -(-size // elites)
        # an elite that gets one row fewer than others repeats another row, whose second result is dropped
        places = torch.arange(rows_each * elites, device=order.device)
        rows = order[places % size].view(rows_each, elites).T
        x = self.standardised(inputs)[rows]
        for layer, (weight, bias) in enumerate(zip(self.net.weights, self.net.biases, strict=True)):
            x = torch.baddbmm(bias[members], x, weight[members])
            if layer < len(self.net.weights) - 1:
                x = self.net.activation(x)
        output = torch.empty(size, x.shape[-1], dtype=x.dtype, device=x.device)
        output[order] = x.transpose(0, 1).flatten(0, 1)[:size]
        mean, log_variance = output.chunk(2, -1)
        return mean, log_variance
