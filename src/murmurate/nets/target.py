"""Target networks: copies of a net that follow it slowly, so that what is learnt towards stands still."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn


class TargetNetwork:
    """A copy of ``net`` that moves towards it after every so many own updates.

    Under strategies with common rounds it moves only where a round ends, when all replicas have the same
    parameters: ``every`` is then F x H for F rounds of H updates, and all replicas have the same target (the
    objective must stand still within a round; Zhang, section 5.2). Elsewhere it moves after ``every`` own
    updates.

    every: own updates between two moves; 0 leaves it to ``move``.
    polyak: share of the way that a move goes: 1 is a copy (Mnih et al. 2015), 0.005 a moving average
        (Lillicrap et al. 2016).

    Raises ``ValueError`` for values that make no sense.
    """

    def __init__(self, net: nn.Module, *, every: int = 1, polyak: float = 1.0) -> None:
        if every < 0:
            raise ValueError(f"target_every is {every}; it counts updates, or is 0")
        if not 0 < polyak <= 1:
            raise ValueError(f"polyak is {polyak}; a share of the way lies above 0 and is at most 1")
        self.source, self.every, self.polyak = net, every, polyak
        self.net = copy.deepcopy(net).requires_grad_(False)
        self.since = 0  # own updates since it moved

    def __call__(self, observation: Tensor) -> Tensor:
        values: Tensor = self.net(observation)
        return values

    def follow(self, staleness: int, common_rounds: bool) -> bool:
        """Count an own update, and move if it is time to; returns whether it moved.

        staleness: of the update's ``Exchange``; 0 ends a round. common_rounds: the replica's.
        """
        self.since += 1
        if common_rounds and staleness:
            return False
        if not 0 < self.every <= self.since:
            return False
        self.move()
        self.since = 0
        return True

    @torch.no_grad()
    def move(self) -> None:
        """Go ``polyak`` of the way to the net, whatever the count is. Buffers are copied."""
        for own, new in zip(self.net.parameters(), self.source.parameters(), strict=True):
            if self.polyak == 1:
                own.copy_(new)
            else:
                own.lerp_(new, self.polyak)
        for buffer, new_buffer in zip(self.net.buffers(), self.source.buffers(), strict=True):
            buffer.copy_(new_buffer)

    def state(self) -> dict[str, Any]:
        return {"net": dict(self.net.state_dict()), "since": self.since}

    def load(self, state: dict[str, Any]) -> None:
        self.net.load_state_dict(state["net"])
        self.since = int(state["since"])
