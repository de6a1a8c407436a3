"""The deep residual torso of IMPALA (Espeholt et al. 2018, Figure 3, right)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from murmurate.nets._images import check_images, for_images

_CHANNELS, _WIDTH = (16, 32, 32), 256  # of the sections, and of the fully connected layer


class ResidualBlock(nn.Module):
    """x + conv(relu(conv(relu(x)))), with filters of 3 x 3 pixels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.second(torch.relu(self.first(torch.relu(x))))
        return out


class ResidualTorso(nn.Module):
    """Three sections, each a convolution, a max-pooling with stride 2 and two residual blocks; then a fully
    connected layer. 15 convolutions in all.

    Args:
        shape: (C, H, W) of an observation.
    """

    def __init__(self, shape: Sequence[int]) -> None:
        super().__init__()
        inputs, rows, columns = shape
        self.shape = torch.Size(shape)
        self.out_features = _WIDTH
        self.sections = nn.ModuleList()
        for outputs in _CHANNELS:
            convolution = nn.Conv2d(inputs, outputs, 3, padding=1)
            pooling = nn.MaxPool2d(3, 2, padding=1)
            self.sections.append(
                nn.Sequential(convolution, pooling, ResidualBlock(outputs), ResidualBlock(outputs))
            )
            inputs, rows, columns = outputs, (rows + 1) // 2, (columns + 1) // 2
        self.linear = nn.Linear(inputs * rows * columns, _WIDTH)
        for weight in self.parameters():
            if weight.dim() == 4:  # faster on a CPU and on tensor cores
                weight.data = weight.data.contiguous(memory_format=torch.channels_last)

    def forward(self, observation: Tensor) -> Tensor:
        """uint8 [B, C, H, W] to features [B, 256] of the parameters' dtype.

        Raises:
            ValueError: on another shape or dtype.
        """
        check_images(observation, self.shape)
        x = observation.contiguous(memory_format=torch.channels_last).to(self.linear.weight.dtype) / 255
        for section in self.sections:
            x = section(x)
        return torch.relu(self.linear(torch.relu(x).flatten(1)))


TORSOS = {"impala2018": for_images("impala2018", ResidualTorso)}
