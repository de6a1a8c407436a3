"""Local SGD: local updates; after every H of them, replicas average their parameters.

SPO (Zhang 2022, Algorithm 5). With an outer optimizer the change of the mean since the last round is used as
a gradient (Reddi et al. 2021, FedOpt; DiLoCo); with rate 1 and no momentum this gives the plain mean.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from murmurate.errors import Refusal
from murmurate.fabric.interface import Capability, Channel
from murmurate.ranges import NonNegativeFloat, PositiveInt, UnitInterval
from murmurate.replica.optimizer_state import construct, make_step
from murmurate.replica.vector import Exchange, Replica
from murmurate.strategies.interface import Behaviour, Strategy


@dataclass
class LocalSGD(Strategy):
    """Update; every ``period`` (H) updates average the parameters over the replicas.

    period: H, own updates between two averagings.
    outer_learning_rate: None takes the mean itself; with a number,
        ``torch.optim.SGD(lr=outer_learning_rate, momentum=outer_momentum, nesterov=outer_nesterov)``
        steps from the last agreed vector v with the gradient v - mean.
    outer_momentum: momentum of that outer optimizer. outer_nesterov: whether its momentum is
        Nesterov's.

    Optimizer moments stay local.
    """

    period: PositiveInt = 10
    outer_learning_rate: NonNegativeFloat | None = None
    outer_momentum: UnitInterval = 0.0
    outer_nesterov: bool = False

    name: ClassVar[str] = "local-sgd"
    summary: ClassVar[str] = "update; every H updates average the parameters"
    paper: ClassVar[str] = "SPO; Zhang 2022, Algorithm 5"
    needs: ClassVar[frozenset[Capability]] = frozenset({Capability.COLLECTIVE})
    synchronous: ClassVar[bool] = True
    behaviour: ClassVar[Behaviour] = Behaviour(
        carries="state",
        bounded_by="period",
        on_death="from that round on the mean is over the living",
        on_slow="waited for up to a deadline; then replaced (murmurate train, local or ray) or the run stops",
        on_join="takes part from the next common round on, with a living peer's state",
    )

    _outer: torch.optim.Optimizer | None = field(default=None, init=False, repr=False, compare=False)
    _agreed: Tensor = field(default_factory=lambda: torch.empty(0), init=False, repr=False, compare=False)

    def check(self, replicas: int, *, shrinks: float = 0.0) -> None:
        if self.outer_learning_rate is None and (self.outer_momentum or self.outer_nesterov):
            raise Refusal(
                "outer_momentum and outer_nesterov are of the outer optimizer, and there is none without its "
                "learning rate. Set outer_learning_rate to 0.7, or leave them out."
            )
        if self.outer_nesterov and not self.outer_momentum:
            raise Refusal(
                "outer_nesterov is a kind of outer momentum, and outer_momentum is 0. Set outer_momentum to "
                "0.9, or leave out outer_nesterov."
            )

    def attach(self, replica: Replica, channel: Channel) -> None:
        if self.outer_learning_rate is not None:
            self._agreed = torch.nn.Parameter(replica.params.detach().clone())
            make_outer = functools.partial(
                torch.optim.SGD,
                lr=self.outer_learning_rate,
                momentum=self.outer_momentum,
                nesterov=self.outer_nesterov,
            )
            self._outer = construct(make_outer, [self._agreed])

    def step(self, replica: Replica, channel: Channel) -> Exchange:
        replica.update()
        heard = 1
        if replica.clock % self.period == 0:
            heard = channel.mean_(replica.params)
            if self._outer is not None:
                self._agreed.grad = self._agreed.detach() - replica.params.detach()
                make_step(self._outer)
                replica.params.copy_(self._agreed)
        rounds, staleness = divmod(replica.clock, self.period)
        return Exchange(round=rounds, heard=heard, staleness=staleness)

    def consensus(self, replica: Replica, channel: Channel) -> Tensor:
        mean = replica.params.detach().clone()
        channel.mean_(mean)
        return mean

    def rewritten(self, replica: Replica, channel: Channel) -> None:
        """After a round, which made all replicas equal, the outer optimizer goes on from there as well."""
        if self._outer is not None and replica.clock % self.period == 0:
            self._agreed.data.copy_(replica.params)

    def state(self) -> dict[str, Any]:
        if self._outer is None:
            return {}
        momentum = self._outer.state[self._agreed].get("momentum_buffer")
        return {
            "agreed": self._agreed.detach().clone(),
            **({} if momentum is None else {"momentum": momentum.clone()}),
        }

    def load(self, state: dict[str, Any]) -> None:
        if self._outer is not None:
            self._agreed.data.copy_(state["agreed"])
            self._outer.state.clear()
            if "momentum" in state:
                self._outer.state[self._agreed]["momentum_buffer"] = state["momentum"].clone()
