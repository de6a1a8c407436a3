"""Parameter server: accumulate gradients, push them to a centre, pull its parameters.

Downpour (Jin, Algorithm 3); DA3C (Mohamad et al., Algorithms 6 and 7); with ``local_steps=False`` the
asynchronous replicator of TF-Replicator.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from murmurate.fabric.interface import Capability, Fabric, FabricError, Letter
from murmurate.strategies._cut import Cut
from murmurate.strategies.interface import Strategy, centre_of, replicas_of, require, shown_by_centre
from murmurate.vector import Exchange, Replica

_PUSH, _REPLY = "gradient", "parameters"
_IDLE_SECONDS = 0.02


@dataclass
class ParameterServer(Strategy):
    """Every ``period`` (tau) push the accumulated gradient, then pull the parameters of the centre.

    The centre updates with the user's optimizer; clipping and schedules act there, on what was pushed.
    In between a client takes plain SGD steps at the optimizer's learning rate, which the pull overwrites.

    local_steps: False leaves the parameters alone between pulls.
    wait: pull right after the push, as printed; False goes on learning until the answer is there.
    delay_bound: D; the centre refuses a gradient of parameters more than D folds old, and counts it in
        ``refused``. 0: none is refused.
    deadline_seconds: how long a push or a pull may take. Its outcome is to go on with the own parameters;
        the answer is taken when it comes.
    """

    period: int = 1
    local_steps: bool = True
    wait: bool = True
    delay_bound: int = 0
    deadline_seconds: float = 10.0

    name: ClassVar[str] = "parameter-server"
    summary: ClassVar[str] = "every tau push the accumulated gradient, pull; the centre updates"
    paper: ClassVar[str] = "Jin, Algorithm 3 (Downpour); DA3C; TF-Replicator's async replicator"
    needs: ClassVar[frozenset[Capability]] = frozenset({Capability.MAIL, Capability.REGISTER})
    centre: ClassVar[bool] = True
    counts_all: ClassVar[bool] = True
    carries: ClassVar[str] = "deltas"
    bounded_by: ClassVar[str] = "delay_bound: older gradients are refused"
    on_death: ClassVar[str] = "the others go on; without its centre the run stops and can be resumed"
    on_slow: ClassVar[str] = "nobody waits for it; its gradient is old, and refused beyond delay_bound"
    on_join: ClassVar[str] = "pulls the centre's parameters before its first step"

    refused: int = field(default=0, init=False, repr=False, compare=False)
    _gradient: Tensor = field(default_factory=lambda: torch.empty(0), init=False, repr=False, compare=False)
    _pushes: Cut = field(default_factory=lambda: Cut(_PUSH), init=False, repr=False, compare=False)
    _version: int = field(default=0, init=False, repr=False, compare=False)  # folds in what was pulled last
    _awaited: int = field(default=0, init=False, repr=False, compare=False)  # pushes without an answer
    _rounds: int = field(default=0, init=False, repr=False, compare=False)
    _pulled_at: int = field(default=0, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        require(
            self.period >= 1, f"period counts updates between pushes and is at least 1, not {self.period}"
        )
        require(self.delay_bound >= 0, f"delay_bound counts folds and is at least 0, not {self.delay_bound}")

    def attach(self, replica: Replica, fabric: Fabric) -> None:
        self._gradient = torch.zeros_like(replica.grad)
        if fabric.rank == centre_of(fabric):
            # a fold stands for as many updates as gradients were summed in it
            replica.steps_taken = lambda: replica.clock * self.period

    def step(self, replica: Replica, fabric: Fabric) -> Exchange:
        self._gradient.add_(replica.grad)
        if self.local_steps:
            replica.step_plainly()
        else:
            replica.tick()
        if replica.clock % self.period == 0:
            self._push(fabric)
        heard = 1 + self._pull(replica, fabric)
        return Exchange(self._rounds, heard, replica.clock - self._pulled_at)

    def _push(self, fabric: Fabric) -> None:
        centre = centre_of(fabric)
        sent = fabric.send(
            centre, _PUSH, self._gradient, note=self._version, deadline_seconds=self.deadline_seconds
        )
        if sent:
            self._gradient.zero_()
            self._awaited += 1
        elif centre not in fabric.living():
            raise FabricError("the centre died, and with it the optimizer. Go on from the last checkpoint.")

    def _pull(self, replica: Replica, fabric: Fabric) -> int:
        """Take the newest answer, and with ``wait`` the one to the newest push."""
        newest = None
        while self._awaited:
            due = self.wait and self._gradient_is_out(replica)
            letter = fabric.wait(_REPLY, self.deadline_seconds) if due else fabric.receive(_REPLY)
            if letter is None:
                break
            self._awaited -= 1
            newest = letter
        if newest is None:
            return 0
        replica.params.copy_(newest.x)
        self._version = abs(int(newest.note))
        self.refused += newest.note < 0
        self._pulled_at = replica.clock
        self._rounds += 1
        return 1

    def _gradient_is_out(self, replica: Replica) -> bool:
        return replica.clock % self.period == 0

    def serve(self, replica: Replica, fabric: Fabric) -> bool:
        """Fold one gradient into the centre's parameters, and answer with them."""
        letter = self._pushes.receive(fabric, _IDLE_SECONDS)
        if letter is not None:
            self._fold(letter, replica, fabric)
        return letter is not None

    def _fold(self, letter: Letter, replica: Replica, fabric: Fabric) -> None:
        accepted = not self.delay_bound or replica.clock - letter.note <= self.delay_bound
        if accepted:
            replica.grad.copy_(letter.x)
            replica.update()
        else:
            self.refused += 1
        folds = max(replica.clock, 1)
        fabric.send(letter.sender, _REPLY, replica.params, note=folds if accepted else -folds)

    def consensus(self, replica: Replica, fabric: Fabric) -> Tensor:
        return shown_by_centre(replica, fabric)

    def settle(self, replica: Replica, fabric: Fabric, number: int, deadline_seconds: float) -> bool:
        """Gradients pushed before the cut are folded; an answer in flight is replaced by the next."""
        if fabric.rank == centre_of(fabric):
            return self._pushes.drain(
                fabric,
                number,
                replicas_of(fabric),
                lambda one: self._fold(one, replica, fabric),
                deadline_seconds,
            )
        self._pushes.announce(fabric, number, [centre_of(fabric)], replica.params)
        return True

    def state(self) -> dict[str, Any]:
        return {
            "gradient": self._gradient.clone(),
            "version": self._version,
            "rounds": self._rounds,
            "pulled_at": self._pulled_at,
            "refused": self.refused,
        }

    def load(self, state: dict[str, Any]) -> None:
        self._gradient.copy_(state["gradient"])
        self._version, self._rounds = int(state["version"]), int(state["rounds"])
        self._pulled_at, self.refused = int(state["pulled_at"]), int(state["refused"])
        self._awaited = 0
