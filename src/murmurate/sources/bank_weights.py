"""Importance weights across learners that each draw from a replay (a "bank") of their own.

Zhang 2022, eq. 5.4: let the priorities of bank j sum to P_j, and those of all L banks, with N items, to P.
Item i of bank j is drawn with probability p_i / (L P_j); from a single replay it would be drawn with
probability p_i / P. So its weight is (L P_j / P) (N p_i / P) ** -beta, which is proportional to
P_j p_i ** -beta. Weights are divided by the greatest weight in the last batches of all banks. Dividing by the
greatest weight of any stored item would let one item with an error near 0 shrink the update steps of all
learners.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from murmurate.fabric.interface import Channel

_EXCHANGE_EVERY = 10  # draws between two exchanges: the greatest weight changes slowly
# shape and dtype of the channel: an integer, because channels of floating-point numbers may be compressed
CHANNEL_LIKE = torch.zeros(1, dtype=torch.int64)


class BankWeights:
    """Publishes the greatest weight in this bank's batches, and reads other banks' without waiting."""

    def __init__(self, channel: Channel, learners: int) -> None:
        self._channel = channel
        self._other_ranks = [rank for rank in range(learners) if rank != channel.rank]
        self._draws = 0
        self._others_greatest: list[float] = []

    def weigh(self, weights: Tensor, total: float, least: float, beta: float) -> None:
        """Convert a batch's weights [B], which are (p / least) ** -beta, in place to those that a single
        replay would give, at most 1. total, least: sum and minimum of the priorities in this bank."""
        log_scale = math.log(total) - beta * math.log(least)
        greatest = log_scale + math.log(float(weights.max()))
        if self._draws % _EXCHANGE_EVERY == 0:
            own_greatest = torch.tensor([greatest], dtype=torch.float64)
            self._channel.publish(own_greatest.view(torch.int64))
            have_published = [rank for rank in self._other_ranks if self._channel.version(rank) > 0]
            living = set(self._channel.living())
            self._others_greatest = [
                _float_from_bits(self._channel.peek(rank)[0]) for rank in have_published if rank in living
            ]
        self._draws += 1
        weights.mul_(math.exp(log_scale - max([greatest, *self._others_greatest])))


def _float_from_bits(bits: Tensor) -> float:
    return float(bits.view(torch.float64))
