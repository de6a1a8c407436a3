"""The master of DPSGD: v, and the pushes that wait to be folded into it (Algorithm 1)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from murmurate.fabric.interface import Channel, Message
from murmurate.replica.vector import Replica
from murmurate.strategies.dpsgd.node import REPLY, leader_of


class Master:
    """optimizer: of v; its rate is rho. nodes: their ranks. batch: M. delay_bound: D, or 0."""

    def __init__(
        self,
        replica: Replica,
        optimizer: torch.optim.SGD,
        nodes: Sequence[Sequence[int]],
        batch: int = 1,
        delay_bound: int = 0,
    ) -> None:
        self.replica, self.optimizer, self.nodes = replica, optimizer, nodes
        self.unfolded: list[Tensor] = []
        self._batch, self._delay_bound = batch, delay_bound

    def take(self, push: Message, channel: Channel) -> bool:
        """Keep what a node pushed, fold when M are there, answer at once; whether it was refused.

        The answer's note counts updates of v; a minus says that the push was refused.
        """
        late = 0 < self._delay_bound < self.replica.clock - push.note
        refused = late or not self.accepts(push.x)
        if not refused:
            self.unfolded.append(push.x)
        if len(self.unfolded) == self._batch:
            self.fold()
        version = -self.replica.clock if refused else self.replica.clock
        channel.send(push.sender, REPLY, self.answer(push.x), note=version)
        self.answered(push.sender, channel.living())
        return refused

    def accepts(self, push: Tensor) -> bool:
        """Whether what a node pushed can be folded."""
        return len(push) == len(self.replica)

    def fold(self) -> None:
        """v <- v + rho sum_m w_m (line 4)."""
        self.replica.grad.zero_()
        for push in self.unfolded:
            self.replica.grad.sub_(push)
        self.optimizer.step()
        self.unfolded.clear()
        self.replica.tick()

    def answer(self, push: Tensor) -> Tensor:
        """[n] what the node that pushed needs to have the present v."""
        return self.replica.params.detach()

    def answered(self, rank: int, living: Sequence[int]) -> None:
        """The node of ``rank`` has been sent the present v."""

    def resumed(self, channel: Channel) -> None:
        """All have loaded: answer each node once."""
        for leader in (leader_of(ranks, channel) for ranks in self.nodes):
            if leader is not None:
                channel.send(leader, REPLY, self.replica.values().detach(), note=self.replica.clock)

    def state(self) -> dict[str, Any]:
        momentum = self.optimizer.state[self.replica.params].get("momentum_buffer")
        unfolded = {str(number): push.clone() for number, push in enumerate(self.unfolded)}
        return {"unfolded": unfolded} | ({} if momentum is None else {"momentum": momentum.clone()})

    def load(self, state: dict[str, Any]) -> None:
        left = state["unfolded"]
        self.unfolded = [left[key] for key in sorted(left, key=int)]
        if "momentum" in state:
            self.optimizer.state[self.replica.params]["momentum_buffer"] = state["momentum"].clone()
