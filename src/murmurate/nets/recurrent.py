"""A recurrent core between torso and heads."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class LSTMCore(nn.Module):
    """One LSTM layer. Its memory [B, 2 H] is the hidden and the cell state side by side.

    Memory is always returned in float32, so that stored memories have one dtype. Parameters are in cuDNN's
    order (input weights, hidden weights, input bias, hidden bias) and never moved by ``flatten_parameters``,
    so they may be views into a flat vector. Source: Hochreiter and Schmidhuber 1997 with the forget gate of
    Gers et al. 2000, as torch implements it.
    """

    def __init__(self, in_features: int, width: int) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(in_features, width)
        self.memory_size = 2 * width

    def initial_memory(self, batch: int) -> Tensor:
        """Zeros [batch, 2 H] on the parameters' device."""
        return torch.zeros(batch, self.memory_size, device=self.cell.weight_hh.device)

    def forward(self, x: Tensor, memory: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
        """Run over time; the memory is reset where an episode begins.

        Args:
            x: features [T, B, I].
            memory: recurrent state before step 0 [B, 2 H].
            first: bool [T, B]; True resets the memory before step t.

        Returns:
            Features [T, B, H] of the parameters' dtype and the memory after step T [B, 2 H], float32.

        Raises:
            ValueError: if the shapes do not match.
        """
        if x.dim() != 3 or first.shape != x.shape[:2] or memory.shape != (x.shape[1], self.memory_size):
            raise ValueError(
                f"x [T, B, I], memory [B, {self.memory_size}] and first [T, B] do not match: they are "
                f"{list(x.shape)}, {list(memory.shape)} and {list(first.shape)}"
            )
        dtype = self.cell.weight_hh.dtype
        h, c = memory.to(dtype).chunk(2, dim=-1)
        outputs = []
        for x_t, reset in zip(x.to(dtype), first.unsqueeze(-1), strict=True):
            h, c = self.cell(x_t, (h.masked_fill(reset, 0.0), c.masked_fill(reset, 0.0)))
            outputs.append(h)
        return torch.stack(outputs), torch.cat([h, c], dim=-1).float()
