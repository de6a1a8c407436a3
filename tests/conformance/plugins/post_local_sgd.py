"""Post-local SGD (Lin et al. 2020): mean the gradients at first, later the parameters every few updates."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from murmurate.fabric.interface import Capability, Channel
from murmurate.ranges import NonNegativeInt, PositiveInt
from murmurate.replica.vector import Exchange, Replica
from murmurate.strategies.interface import Behaviour, Strategy


@dataclass
class PostLocalSGD(Strategy):
    """switch: updates with a mean gradient. period: H, updates between two means after them."""

    switch: NonNegativeInt = 4
    period: PositiveInt = 2

    name: ClassVar[str] = "post-local-sgd"
    summary: ClassVar[str] = "mean the gradient for a while; then update alone, and mean every H updates"
    paper: ClassVar[str] = "Lin et al. 2020, Algorithm 1"
    needs: ClassVar[frozenset[Capability]] = frozenset({Capability.COLLECTIVE})
    synchronous: ClassVar[bool] = True
    behaviour: ClassVar[Behaviour] = Behaviour(
        carries="state",
        bounded_by="period",
        on_death="from that round on the mean is over the living",
        on_slow="waited for up to a deadline; then it is replaced (launcher local) or the run stops",
        on_join="takes part from the next common round on, with a living peer's state",
    )

    _period: int = field(default=1, init=False, repr=False, compare=False)  # at the last update

    def step(self, replica: Replica, channel: Channel) -> Exchange:
        self._period = 1 if replica.clock < self.switch else self.period
        if replica.clock < self.switch:
            heard = channel.mean_(replica.grad)
            replica.update()
            return Exchange(replica.clock, heard, 0)
        replica.update()
        late = replica.clock - self.switch
        if late % self.period:
            return Exchange(self.switch + late // self.period, 1, late % self.period)
        heard = channel.mean_(replica.params.detach())
        return Exchange(self.switch + late // self.period, heard, 0)

    def consensus(self, replica: Replica, channel: Channel) -> Tensor:
        mean = replica.params.detach().clone()
        channel.mean_(mean)
        return mean

    def fields(self) -> dict[str, float | Tensor]:
        return {"period": self._period}
