"""A net and the moving average of its parameters."""

from __future__ import annotations

import copy
from typing import Generic, TypeVar

import torch
from torch import nn

Net = TypeVar("Net", bound=nn.Module)


class MovingAverage(nn.Module, Generic[Net]):
    """``net``, and its copy ``average``, whose buffers are the moving averages of ``net``'s parameters.

    A replica's checkpoint thus contains both. An evaluation uses the mean of each average over the replicas,
    as it does of every buffer.
    """

    def __init__(self, net: Net) -> None:
        super().__init__()
        self.net = net
        self.average: Net = copy.deepcopy(net)
        for part in self.average.modules():
            for name, parameter in list(part.named_parameters(recurse=False)):
                delattr(part, name)
                part.register_buffer(name, parameter.detach())

    @torch.no_grad()
    def follow_(self, decay: float, updates: int) -> None:
        """``average <- d average + (1 - d) net``, after each of the net's updates.

        updates: number t of updates made so far. d is min(decay, (1 + t) / (10 + t)), so that the initial
        parameters are soon forgotten.
        """
        share = 1.0 - min(decay, (1 + updates) / (10 + updates))
        for name, parameter in self.net.named_parameters():
            self.average.get_buffer(name).lerp_(parameter, share)
