"""The master of DPSGD: v, and the pushes that have yet to be applied to it (Algorithm 1)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from murmurate.fabric.interface import Channel, Message
from murmurate.replica.optimizer_state import make_step
from murmurate.replica.vector import Replica
from murmurate.strategies.dpsgd.node import REPLY, leader_of


class Master:
    """The master. replica: its parameters are v. optimizer: updates v; its learning rate is rho. nodes: the
    ranks of each node. batch: M. delay_bound: D', or 0 for none.
    """

    def __init__(
        self,
        replica: Replica,
        optimizer: torch.optim.Optimizer,
        nodes: Sequence[Sequence[int]],
        batch: int = 1,
        delay_bound: int = 0,
    ) -> None:
        self.replica, self.optimizer, self.nodes = replica, optimizer, nodes
        self.pending: list[Tensor] = []
        self._batch, self._delay_bound = batch, delay_bound

    def take(self, push: Message, channel: Channel) -> bool:
        """Keep a node's push, apply M of them together, reply at once; returns whether the push was refused.

        The reply's note is the number of updates of v; negative if the push was refused.
        """
        is_late = 0 < self._delay_bound < self.replica.clock - push.note
        refused = is_late or not self.is_valid(push.x)
        if not refused:
            self.pending.append(push.x)
        if len(self.pending) == self._batch:
            self.apply_pending()
        version = -self.replica.clock if refused else self.replica.clock
        channel.send(push.sender, REPLY, self.reply_to(push.x), note=version)
        self.replied(push.sender, channel.living())
        return refused

    def is_valid(self, push: Tensor) -> bool:
        """Whether a push can be applied."""
        return len(push) == len(self.replica)

    def apply_pending(self) -> None:
        """v <- v + rho sum_m w_m (line 4)."""
        self.replica.grad.zero_()
        for push in self.pending:
            self.replica.grad.sub_(push)
        make_step(self.optimizer)
        self.pending.clear()
        self.replica.tick()

    def reply_to(self, push: Tensor) -> Tensor:
        """The reply, at most N numbers, from which the node of ``push`` gets the present v."""
        return self.replica.params.detach()

    def replied(self, rank: int, living: Sequence[int]) -> None:
        """Called when the present v has been sent to the node of ``rank``."""

    def resumed(self, channel: Channel) -> None:
        """When all members have loaded their states, send v to each node."""
        for leader in (leader_of(ranks, channel) for ranks in self.nodes):
            if leader is not None:
                channel.send(leader, REPLY, self.replica.values().detach(), note=self.replica.clock)

    def state(self) -> dict[str, Any]:
        momentum = self.optimizer.state[self.replica.params].get("momentum_buffer")
        pending = {str(number): push.clone() for number, push in enumerate(self.pending)}
        return {"unfolded": pending} | ({} if momentum is None else {"momentum": momentum.clone()})

    def load(self, state: dict[str, Any]) -> None:
        pending = state["unfolded"]
        self.pending = [pending[key] for key in sorted(pending, key=int)]
        if "momentum" in state:
            self.optimizer.state[self.replica.params]["momentum_buffer"] = state["momentum"].clone()
