"""Orthogonal initialisation with a given generator."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def orthogonal_(module: nn.Module, gain: float, generator: torch.Generator) -> None:
    """Make every weight below ``module`` orthogonal times ``gain``, and every bias 0.

    A weight is taken as the matrix [outputs, everything else], an LSTM's weight as one matrix for each of its
    four gates. Matrices are drawn in float32 on the generator's device, so that draws depend neither on the
    parameters' dtype nor on their device or memory format. Other kinds of module do not change.
    Source: Saxe et al. 2014.

    Raises:
        ValueError: if there is nothing to initialise below ``module``.
    """
    any_found = False
    for part in module.modules():
        if isinstance(part, nn.Linear | nn.Conv2d):
            any_found = True
            _orthogonal_rows_(part.weight, gain, generator)
            if part.bias is not None:
                nn.init.zeros_(part.bias)
        elif isinstance(part, nn.LSTMCell):
            any_found = True
            for weight in (part.weight_ih, part.weight_hh):
                for gate in weight.detach().chunk(4):
                    _orthogonal_rows_(gate, gain, generator)
            nn.init.zeros_(part.bias_ih)
            nn.init.zeros_(part.bias_hh)
    if not any_found:
        raise ValueError(f"{type(module).__name__} holds no Linear, Conv2d or LSTMCell to initialise")


def _orthogonal_rows_(weight: Tensor, gain: float, generator: torch.Generator) -> None:
    if weight.is_meta:  # a net that is built for its sizes alone
        return
    matrix = torch.empty(weight.shape[0], weight[0].numel(), device=generator.device)
    nn.init.orthogonal_(matrix, gain, generator=generator)
    with torch.no_grad():
        weight.copy_(matrix.view(weight.shape))
