"""Elastic averaging: replicas and a centre attract each other (Zhang et al. 2015; Jin 2018, Algorithm 4)."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from murmurate.errors import Refusal
from murmurate.fabric.interface import Capability, Channel, FabricError, Message
from murmurate.ranges import PositiveInt, Seconds, UnitInterval, rounded_down
from murmurate.replica.vector import Exchange, Replica
from murmurate.strategies.checkpoint_barrier import CheckpointBarrier
from murmurate.strategies.interface import Behaviour, MemberEvent, Strategy, centre_of
from murmurate.strategies.reply import discard_replies, require_centre, wait_for_reply

_PUSH, _REPLY = "theta", "centre"  # tags
_LOST = "the centre's parameters"  # what is lost with the centre


def moving_rate(given: float | None, replicas: int) -> float:
    """beta; by default 0.8 / p (Jin 2018, section 3.4)."""
    return 0.8 / replicas if given is None else given


@dataclass
class Elastic(Strategy):
    """Every ``period`` (tau) the replica and the centre move towards each other by the same amount; update.

    The client sends theta_i; the centre replies with theta~ as it was and moves by beta (theta_i - theta~);
    the client moves by as much towards the centre, so theta_i + theta~ stays the same. (Differs: Algorithm 4
    takes two messages, between which the centre may move.) The update that follows uses the gradient at
    theta_i before the move, as in Algorithm 1 of EASGD (Zhang, Choromanska and LeCun 2015). (Differs: Jin
    2018 computes it after the move.)

    period: tau, own updates between two moves.
    moving_rate: beta; None is 0.8 / p with p replicas.
    wait: whether to wait for the reply, as in the paper; else the replica goes on, and moves when it arrives.
    deadline_seconds: longest time for sending and waiting; afterwards the replica goes on, and moves later.
    """

    moving_rate: UnitInterval | None = None
    period: PositiveInt = 10
    wait: bool = True
    deadline_seconds: Seconds = 10.0

    name: ClassVar[str] = "elastic"
    summary: ClassVar[str] = "every tau replica and centre move towards each other; update"
    paper: ClassVar[str] = "Zhang et al. 2015 (EASGD); Jin 2018, Algorithm 4"
    needs: ClassVar[frozenset[Capability]] = frozenset({Capability.MAIL, Capability.REGISTER})
    centre: ClassVar[bool] = True
    behaviour: ClassVar[Behaviour] = Behaviour(
        carries="deltas",
        bounded_by="period, plus the delay of the reply",
        on_death="the others go on; without its centre the run stops and can be resumed",
        on_slow="no replica waits for it",
        on_join="takes a living peer's parameters; its next move is towards the centre",
    )

    # the vector of the last push
    _sent: Tensor = field(default_factory=lambda: torch.empty(0), init=False, repr=False, compare=False)
    _pushes: CheckpointBarrier = field(init=False, repr=False, compare=False)
    _beta: float = field(default=0.0, init=False, repr=False, compare=False)
    _awaited: bool = field(default=False, init=False, repr=False, compare=False)
    _rounds: int = field(default=0, init=False, repr=False, compare=False)
    # the clock at the last move
    _moved_at: int = field(default=0, init=False, repr=False, compare=False)

    def attach(self, replica: Replica, channel: Channel) -> None:
        self._pushes = CheckpointBarrier(_PUSH)
        self._beta = moving_rate(self.moving_rate, channel.size - 1)
        self._sent = replica.params.detach().clone()

    def step(self, replica: Replica, channel: Channel) -> Exchange:
        require_centre(channel, _LOST)
        due = replica.clock > 0 and replica.clock % self.period == 0
        if due and not self._awaited:
            self._push(replica, channel)
        deadline = self.deadline_seconds if due and self.wait else 0.0
        moved = self._awaited and self._move(replica, channel, deadline)
        replica.update()
        # staleness does not count the update that directly follows a move
        return Exchange(self._rounds, 1 + moved, replica.clock - 1 - self._moved_at)

    def _push(self, replica: Replica, channel: Channel) -> None:
        self._sent.copy_(replica.params.detach())
        discard_replies(channel, _REPLY)
        centre, deadline = centre_of(channel), self.deadline_seconds
        self._awaited = channel.send(centre, _PUSH, self._sent, deadline_seconds=deadline)
        if not self._awaited:
            require_centre(channel, _LOST)

    def _move(self, replica: Replica, channel: Channel, deadline_seconds: float) -> bool:
        """theta_i <- theta_i - beta (theta_i - theta~), if the reply has arrived."""
        message = wait_for_reply(channel, _REPLY, deadline_seconds, _LOST)
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
        return self._pushes.serve(channel, functools.partial(self._answer, replica=replica, channel=channel))

    def _answer(self, message: Message, replica: Replica, channel: Channel) -> None:
        centre = replica.params.detach()
        # a dead client will not move, so neither must the centre
        if channel.send(message.sender, _REPLY, centre):
            centre.add_(message.x.sub_(centre), alpha=self._beta)
            replica.tick()

    def on_member(self, event: MemberEvent) -> None:
        self._pushes.on_member(event)

    # -- state --------------------------------------------------------------------------------------

    def drain(self, replica: Replica, channel: Channel, number: int, deadline_seconds: float) -> bool:
        """No move is incomplete at the checkpoint: a client receives its reply first."""
        finished = not self._awaited or self._finish_move(replica, channel, deadline_seconds)
        answer = functools.partial(self._answer, replica=replica, channel=channel)
        drained = self._pushes.drain_to_centre(channel, number, answer, deadline_seconds, self._sent)
        return finished and drained

    def _finish_move(self, replica: Replica, channel: Channel, deadline_seconds: float) -> bool:
        try:
            return self._move(replica, channel, deadline_seconds)
        except FabricError:
            return False  # the next step raises it

    def state(self) -> dict[str, Any]:
        return {"rounds": self._rounds, "moved_at": self._moved_at}

    def load(self, state: dict[str, Any]) -> None:
        self._rounds, self._moved_at = int(state["rounds"]), int(state["moved_at"])
        self._awaited = False


@dataclass
class SynchronousElastic(Strategy):
    """Elastic averaging in common rounds: every member keeps a copy of the centre.

    theta~ <- theta~ + beta sum_i (theta_i - theta~);
    theta_i <- theta_i - beta (theta_i - theta~) - eta grad f_i(theta_i); both right sides use the values from
    before the move.

    period: common updates between two moves.
    moving_rate: beta; None is 0.8 / p with p replicas. Refused above 1 / p, where the centre would overshoot.
    """

    moving_rate: UnitInterval | None = None
    period: PositiveInt = 10

    name: ClassVar[str] = "synchronous-elastic"
    summary: ClassVar[str] = "every tau all replicas and the centre move towards each other; update"
    paper: ClassVar[str] = "Zhang et al. 2015, eq. 2.3 (EASGD)"
    needs: ClassVar[frozenset[Capability]] = frozenset({Capability.COLLECTIVE})
    synchronous: ClassVar[bool] = True
    behaviour: ClassVar[Behaviour] = Behaviour(
        carries="state",
        bounded_by="period",
        on_death="from that round on the centre is pulled by the living",
        on_slow="waited for up to a deadline; then replaced (murmurate train, local or ray) or the run stops",
        on_join="takes part from the next common round on, with a living peer's state",
    )

    _centre: Tensor = field(default_factory=lambda: torch.empty(0), init=False, repr=False, compare=False)
    _beta: float = field(default=0.0, init=False, repr=False, compare=False)

    def check(self, replicas: int, *, shrinks: float = 0.0) -> None:
        beta = moving_rate(self.moving_rate, replicas)
        if beta * replicas > 1 + 1e-9:
            raise Refusal(
                f"moving_rate {beta:g} with {replicas} replicas takes the centre beyond the mean: "
                f"use at most {rounded_down(1 / replicas, 6):g}, or leave it out for "
                f"{moving_rate(None, replicas):g}."
            )

    def attach(self, replica: Replica, channel: Channel) -> None:
        self.check(channel.size)
        self._beta = moving_rate(self.moving_rate, channel.size)
        self._centre = replica.params.detach().clone()

    def step(self, replica: Replica, channel: Channel) -> Exchange:
        heard = 1
        # with every tau-th update, so that rounds also end where batches of several updates do
        if (replica.clock + 1) % self.period == 0:
            mean = replica.params.detach().clone()
            heard = channel.mean_(mean)
            centre_before = self._centre.clone()
            self._centre.lerp_(mean, heard * self._beta)
            replica.params.detach().lerp_(centre_before, self._beta)
        replica.update()
        rounds, staleness = divmod(replica.clock, self.period)
        return Exchange(rounds, heard, staleness)

    def consensus(self, replica: Replica, channel: Channel) -> Tensor:
        return self._centre.clone()

    def state(self) -> dict[str, Any]:
        return {"centre": self._centre.clone()}

    def load(self, state: dict[str, Any]) -> None:
        self._centre.copy_(state["centre"])
