"""Target networks: copies of a net that follow it slowly, for targets that are nearly stationary."""

from __future__ import annotations

import copy
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

Net = TypeVar("Net", bound=nn.Module)


class TargetNetwork(Generic[Net]):
    """A copy of ``net`` that moves towards it after every few updates of this replica.

    Under strategies with common rounds it moves only at the end of a round, when all replicas have the same
    parameters, so that they all have the same target (the objective must be constant within a round; Zhang,
    section 5.2), and then as far as all moves that were due together. For a move after every F rounds
    of H updates, ``every`` is F x H.

    every: updates of this replica between two moves; 0: it moves only by ``reset``.
    polyak: the share of the way to ``net`` that a move goes: 1 copies the net (Mnih et al. 2015); a small
        share, such as 0.005, makes a moving average (Lillicrap et al. 2016).

    Raises ``ValueError`` for values out of range.
    """

    def __init__(self, net: Net, *, every: int = 1, polyak: float = 1.0) -> None:
        if every < 0:
            raise ValueError(f"target_every is {every}; it must be at least 0")
        if not 0 < polyak <= 1:
            raise ValueError(f"polyak is {polyak}; it must be above 0 and at most 1")
        self.source, self.every, self.polyak = net, every, polyak
        self.net: Net = copy.deepcopy(net).requires_grad_(False)
        self.since = 0  # updates since the last move
        self.reset_due = False  # at the end of the round
        self.in_round = False  # within a common round replicas have different nets
        # lists, as walking through the modules takes as long as the move; a replica may move the parameters'
        # memory, but never replaces the parameters
        self._source_parameters: list[Tensor] = list(net.parameters())
        self._parameters: list[Tensor] = list(self.net.parameters())
        # moved in float32: small moves of bfloat16 parameters would be rounded off
        self._exact = [p.float() if p.element_size() < 4 else p for p in self._parameters]
        self._rounded = [
            (p, exact) for p, exact in zip(self._parameters, self._exact, strict=True) if p is not exact
        ]
        self._has_buffers = any(True for _ in net.buffers())

    def __call__(self, observation: Tensor) -> Tensor:
        values: Tensor = self.net(observation)
        return values

    def after_update(self, staleness: int, common_rounds: bool) -> None:
        """Count an update of this replica, and move if a move is due.

        staleness: staleness of the update's ``Exchange``; 0 ends a round. common_rounds: the replica's.
        """
        self.since += 1
        self.in_round = common_rounds and staleness > 0
        if self.in_round:
            return
        if self.reset_due:
            self.reset()
        elif 0 < self.every <= self.since:
            moves = self.since // self.every  # more than one where a round is longer
            self._blend(self.polyak if moves == 1 else 1 - (1 - self.polyak) ** moves)
            # an average keeps its pace over rounds of any length; from a copy, the count begins anew
            self.since = 0 if self.polyak == 1 else self.since % self.every

    def reset(self) -> None:
        """Copy the net, whatever ``polyak`` is: now, or within a common round at its end."""
        self.reset_due = self.in_round
        if not self.in_round:
            self._blend(1.0)
            self.since = 0

    @torch.no_grad()
    def _blend(self, share: float) -> None:
        new_values = self._source_parameters
        if self._rounded:
            new_values = [new.to(old.dtype) for new, old in zip(new_values, self._exact, strict=True)]
        if share == 1:
            torch._foreach_copy_(self._exact, new_values)
        else:
            torch._foreach_lerp_(self._exact, new_values, share)
        for parameter, exact in self._rounded:
            parameter.copy_(exact)
        if self._has_buffers:
            for buffer, new_buffer in zip(self.net.buffers(), self.source.buffers(), strict=True):
                buffer.copy_(new_buffer)

    def state(self) -> dict[str, Any]:
        exact = [exact for _, exact in self._rounded] if self.polyak < 1 else []
        rounds = {"in_round": int(self.in_round), "reset_due": int(self.reset_due)}
        return {"net": dict(self.net.state_dict()), "since": self.since, "exact": exact, **rounds}

    @torch.no_grad()
    def load(self, state: dict[str, Any]) -> None:
        self.net.load_state_dict(state["net"])
        for parameter, exact in self._rounded:
            exact.copy_(parameter)
        if self.polyak < 1:
            for (_, exact), saved in zip(self._rounded, state["exact"], strict=True):
                exact.copy_(saved)
        self.since = int(state["since"])
        # both are missing in older checkpoints
        self.in_round, self.reset_due = bool(state.get("in_round")), bool(state.get("reset_due"))
