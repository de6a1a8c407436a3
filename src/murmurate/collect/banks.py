"""What a learner's bank weighs beside the others', where each learner draws from a bank of its own.

Zhang, eq. 5.4: item i of bank j is drawn with chance p_i / (L P_j), and from one replay it would be with
p_i / P, so its weight is (L P_j / P) (N p_i / P) ** -beta. A bank's own ones are (p_i / least p_j) ** -beta.
Over the greatest of all banks what is left is one factor for each bank,
P_j least_j ** -beta / max_k (P_k least_k ** -beta).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from murmurate.fabric.interface import Fabric, FabricFactory

_EVERY = 10  # draws between two looks: sums of many change slowly


def channel_of_banks(fabric: FabricFactory) -> Fabric:
    """What ``Banks`` talk through; every member makes it, whether it has a bank or not."""
    # whole numbers, as channels of floating-point numbers may be compressed
    return fabric.channel("banks", torch.zeros(2, dtype=torch.int64))


class Banks:
    """Tells the others what this bank holds, and reads what theirs do; nobody waits."""

    def __init__(self, channel: Fabric, learners: int) -> None:
        self._channel = channel
        self._others = [rank for rank in range(learners) if rank != channel.rank]
        self._draws = 0
        self._known: list[tuple[float, float]] = []

    def factor(self, total: float, least: float, beta: float) -> float:
        """In (0, 1]. total, least: of the priorities in this bank."""
        if self._draws % _EVERY == 0:
            self._channel.publish(torch.tensor([total, least], dtype=torch.float64).view(torch.int64))
            spoken = [rank for rank in self._others if self._channel.version(rank) > 0]
            living = set(self._channel.living())
            self._known = [_pair(self._channel.peek(rank)[0]) for rank in spoken if rank in living]
        self._draws += 1
        mine = _log(total, least, beta)
        return math.exp(mine - max([mine, *(_log(*other, beta) for other in self._known)]))


def _pair(x: Tensor) -> tuple[float, float]:
    total, least = x.view(torch.float64).tolist()
    return total, least


def _log(total: float, least: float, beta: float) -> float:
    return math.log(total) - beta * math.log(least)
