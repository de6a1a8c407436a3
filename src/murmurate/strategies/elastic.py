"""Elastic averaging: replicas and a centre pull at each other (Zhang et al. 2015; Jin, Algorithm 4)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from murmurate.errors import Refusal
from murmurate.fabric.interface import Capability, Channel, FabricError, Message
from murmurate.replica.vector import Exchange, Replica
from murmurate.strategies.checkpoint_barrier import Cut
from murmurate.strategies.interface import (
    MemberEvent,
    Strategy,
    centre_of,
    replicas_of,
    require,
    shown_by_centre,
)
from murmurate.strategies.reply import answer, clear, demand_centre

_PUSH, _REPLY = "theta", "centre"
_IDLE_SECONDS = 0.002
_LOST = "what all had in common"


def moving_rate(given: float | None, replicas: int) -> float:
    """beta; by default 0.8 / p (Jin, section 3.4)."""
    return 0.8 / replicas if given is None else given


@dataclass
class Elastic(Strategy):
    """Every ``period`` (tau) move towards the centre and the centre towards us, by the same; update.

    The client sends theta_i; the centre answers with theta~ as it was and moves by
    beta (theta_i - theta~); the client moves back by the same, so what one gains the other loses. (Differs:
    Algorithm 4 takes two messages, between which the centre may move.) The gradient of the update that
    follows is of theta_i before the move, as in Zhang's Algorithm 1. (Differs: Jin's takes it after.)

    moving_rate: beta; None is 0.8 / p with p replicas.
    wait: for the answer, as printed; False goes on, and moves when it is there.
    deadline_seconds: how long sending and waiting may take; the outcome is to go on, and to move later.
    """

    moving_rate: float | None = None
    period: int = 10
    wait: bool = True
    deadline_seconds: float = 10.0

    name: ClassVar[str] = "elastic"
    summary: ClassVar[str] = "every tau pull towards the centre and the centre towards us; update"
    paper: ClassVar[str] = "Zhang et al. 2015 (EASGD); Jin, Algorithm 4"
    needs: ClassVar[frozenset[Capability]] = frozenset({Capability.MAIL, Capability.REGISTER})
    centre: ClassVar[bool] = True
    carries: ClassVar[str] = "deltas"
    bounded_by: ClassVar[str] = "period, plus the answer's delay"
    on_death: ClassVar[str] = "the others go on; without its centre the run stops and can be resumed"
    on_slow: ClassVar[str] = "nobody waits for it"
    on_join: ClassVar[str] = "takes a living peer's parameters; its next move is towards the centre"

    _sent: Tensor = field(default_factory=lambda: torch.empty(0), init=False, repr=False, compare=False)
    _pushes: Cut = field(default_factory=lambda: Cut(_PUSH), init=False, repr=False, compare=False)
    _beta: float = field(default=0.0, init=False, repr=False, compare=False)
    _awaited: bool = field(default=False, init=False, repr=False, compare=False)
    _rounds: int = field(default=0, init=False, repr=False, compare=False)
    _moved_at: int = field(default=0, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        require(self.period >= 1, f"period counts updates between moves and is at least 1, not {self.period}")
        right = self.moving_rate is None or 0 <= self.moving_rate <= 1
        require(right, f"moving_rate is a weight from 0 to 1, not {self.moving_rate}")

    def attach(self, replica: Replica, channel: Channel) -> None:
        self._beta = moving_rate(self.moving_rate, channel.size - 1)
        self._sent = replica.params.detach().clone()

    def step(self, replica: Replica, channel: Channel) -> Exchange:
        demand_centre(channel, _LOST)
        due = replica.clock > 0 and replica.clock % self.period == 0
        if due and not self._awaited:
            self._push(replica, channel)
        patience = self.deadline_seconds if due and self.wait else 0.0
        moved = self._awaited and self._move(replica, channel, patience)
        replica.update()
        # the update that follows a move belongs to it
        return Exchange(self._rounds, 1 + moved, replica.clock - 1 - self._moved_at)

    def _push(self, replica: Replica, channel: Channel) -> None:
        self._sent.copy_(replica.params.detach())
        clear(channel, _REPLY)
        centre, patience = centre_of(channel), self.deadline_seconds
        self._awaited = channel.send(centre, _PUSH, self._sent, deadline_seconds=patience)
        if not self._awaited:
            demand_centre(channel, _LOST)

    def _move(self, replica: Replica, channel: Channel, deadline_seconds: float) -> bool:
        """theta_i <- theta_i - beta (theta_i - theta~), if the answer is there."""
        if deadline_seconds:
            message = answer(channel, _REPLY, deadline_seconds, _LOST)
        else:
            message = channel.receive(_REPLY)
        if message is None:
            return False
        self._awaited = False
        replica.params.detach().sub_(self._sent.sub_(message.x), alpha=self._beta)
        self._rounds += 1
        self._moved_at = replica.clock
        return True

    # -- the centre ---------------------------------------------------------------------------------

    def serve(self, replica: Replica, channel: Channel) -> bool:
        """theta~ <- theta~ + beta (theta_i - theta~)"""
        message = self._pushes.receive(channel, _IDLE_SECONDS)
        if message is not None:
            self._pull(message, replica, channel)
        return message is not None

    def _pull(self, message: Message, replica: Replica, channel: Channel) -> None:
        centre = replica.params.detach()
        if channel.send(message.sender, _REPLY, centre):  # towards the dead nobody moves
            centre.add_(message.x.sub_(centre), alpha=self._beta)
            replica.tick()

    def consensus(self, replica: Replica, channel: Channel) -> Tensor:
        return shown_by_centre(replica, channel)

    def on_member(self, event: MemberEvent) -> None:
        if event.kind == "joined":
            self._pushes.forget(event.rank)

    # -- state --------------------------------------------------------------------------------------

    def settle(self, replica: Replica, channel: Channel, number: int, deadline_seconds: float) -> bool:
        """No move is half made across the cut: a client takes its answer first."""
        if channel.rank != centre_of(channel):
            whole = not self._awaited or self._answered(replica, channel, deadline_seconds)
            told = self._pushes.announce(channel, number, [centre_of(channel)], self._sent)
            return whole and told
        return self._pushes.drain(
            channel,
            number,
            replicas_of(channel),
            lambda one: self._pull(one, replica, channel),
            deadline_seconds,
        )

    def _answered(self, replica: Replica, channel: Channel, deadline_seconds: float) -> bool:
        try:
            return self._move(replica, channel, deadline_seconds)
        except FabricError:
            return False  # the next step says so

    def state(self) -> dict[str, Any]:
        return {"rounds": self._rounds, "moved_at": self._moved_at}

    def load(self, state: dict[str, Any]) -> None:
        self._rounds, self._moved_at = int(state["rounds"]), int(state["moved_at"])
        self._awaited = False


@dataclass
class SynchronousElastic(Strategy):
    """Elastic averaging in common rounds: every member keeps its own copy of the centre.

    theta~ <- theta~ + beta sum_i (theta_i - theta~);
    theta_i <- theta_i - beta (theta_i - theta~) - eta grad f_i(theta_i), with theta of before on the right.

    moving_rate: beta; None is 0.8 / p with p replicas. Refused above 1 / p, where the centre would overshoot.
    """

    moving_rate: float | None = None
    period: int = 10

    name: ClassVar[str] = "synchronous-elastic"
    summary: ClassVar[str] = "every tau all pull towards the centre and it towards all; update"
    paper: ClassVar[str] = "Zhang et al. 2015, eq. 2.3 (EASGD)"
    needs: ClassVar[frozenset[Capability]] = frozenset({Capability.COLLECTIVE})
    synchronous: ClassVar[bool] = True
    carries: ClassVar[str] = "state"
    bounded_by: ClassVar[str] = "period"
    on_death: ClassVar[str] = "the centre is pulled by the living, from the very round on"
    on_slow: ClassVar[str] = (
        "waited for up to a deadline; then it is replaced (launcher local) or the run stops"
    )
    on_join: ClassVar[str] = "takes part from the next common round on, with a living peer's state"

    _centre: Tensor = field(default_factory=lambda: torch.empty(0), init=False, repr=False, compare=False)
    _beta: float = field(default=0.0, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        require(self.period >= 1, f"period counts updates between moves and is at least 1, not {self.period}")
        right = self.moving_rate is None or 0 <= self.moving_rate <= 1
        require(right, f"moving_rate is a weight from 0 to 1, not {self.moving_rate}")

    def attach(self, replica: Replica, channel: Channel) -> None:
        self._beta = moving_rate(self.moving_rate, channel.size)
        if self._beta * channel.size > 1 + 1e-9:
            raise Refusal(
                f"moving_rate {self._beta:g} with {channel.size} replicas takes the centre beyond the mean: "
                f"use at most {1 / channel.size:g}, or leave it out for {moving_rate(None, channel.size):g}."
            )
        self._centre = replica.params.detach().clone()

    def step(self, replica: Replica, channel: Channel) -> Exchange:
        heard = 1
        if replica.clock > 0 and replica.clock % self.period == 0:
            mean = replica.params.detach().clone()
            heard = channel.mean_(mean)
            before = self._centre.clone()
            self._centre.lerp_(mean, heard * self._beta)
            replica.params.detach().lerp_(before, self._beta)
        replica.update()
        # the update that follows a move belongs to it
        rounds, since = divmod(max(replica.clock - 1, 0), self.period)
        return Exchange(rounds, heard, since)

    def consensus(self, replica: Replica, channel: Channel) -> Tensor:
        return self._centre.clone()

    def state(self) -> dict[str, Any]:
        return {"centre": self._centre.clone()}

    def load(self, state: dict[str, Any]) -> None:
        self._centre.copy_(state["centre"])
