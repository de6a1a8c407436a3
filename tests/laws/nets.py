"""Nets with every kind of weight, for tests of the vector."""

from __future__ import annotations

import torch
from torch import nn


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def drawn(module, seed=0):
    """``module`` with parameters from a generator of its own."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
    return module


class Pixels(nn.Module):
    """Two convolutions, a norm with buffers, an LSTM and a head: every kind of weight that nets have."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.second = nn.Conv2d(4, 2, 3, bias=False)
        self.lstm = nn.LSTM(8, 5)
        self.head = nn.Linear(5, 2)

    def forward(self, x):
        x = torch.tanh(self.norm(self.first(x)))
        x = self.second(x).flatten(1)
        return self.head(self.lstm(x[:, None])[0][:, 0])


def pixels(channels_last=False, seed=0):
    net = drawn(Pixels().double(), seed)
    return net.to(memory_format=torch.channels_last) if channels_last else net


def picture_loss(net, step):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(4, 3, 6, 6, generator=generator, dtype=torch.float64)
    return (net(x) - 1.0).square().mean()
