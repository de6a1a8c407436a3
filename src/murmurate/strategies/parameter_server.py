"""Parameter server: accumulate gradients, push them to a centre, pull its parameters.

Downpour (Jin 2018, Algorithm 3); DA3C (Mohamad et al., Algorithms 6 and 7); with ``local_steps=False`` the
asynchronous replicator of TF-Replicator.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from murmurate.fabric.interface import Capability, Channel, Message
from murmurate.ranges import NonNegativeInt, PositiveInt, Seconds
from murmurate.replica.vector import Exchange, Replica
from murmurate.strategies.checkpoint_barrier import CheckpointBarrier
from murmurate.strategies.interface import Behaviour, MemberEvent, Strategy, centre_of
from murmurate.strategies.reply import discard_replies, require_centre, wait_for_reply

_PUSH, _REPLY = "gradient", "parameters"  # tags
_LOST = "the optimizer"  # what is lost with the centre


@dataclass
class ParameterServer(Strategy):
    """Every ``period`` (tau) updates push the accumulated gradient, then pull the centre's parameters.

    The centre updates with the user's optimizer; clipping and schedules act there, on the pushed gradient.
    In between a client takes plain SGD steps at the optimizer's learning rate, which the pull overwrites.
    A client has at most one push without a reply; meanwhile gradients accumulate for the next.

    period: tau, own updates between two pushes.
    local_steps: whether a client takes those steps; else its parameters do not change between pulls.
    wait: whether to pull right after the push, as in the paper; else the client goes on learning until the
        reply arrives.
    delay_bound: D'; the centre refuses a gradient that was computed at parameters from more than D' of the
        centre's updates ago, and counts it in ``refused``; the client goes on from the new parameters. 0:
        none is refused.
    deadline_seconds: longest time for a push or a pull. Afterwards the client goes on with its own
        parameters, and takes the reply when it arrives.
    """

    period: PositiveInt = 1
    local_steps: bool = True
    wait: bool = True
    delay_bound: NonNegativeInt = 0
    deadline_seconds: Seconds = 10.0

    name: ClassVar[str] = "parameter-server"
    summary: ClassVar[str] = "every tau updates push the accumulated gradient, and pull; the centre updates"
    paper: ClassVar[str] = "Jin 2018, Algorithm 3 (Downpour); DA3C; TF-Replicator's async replicator"
    needs: ClassVar[frozenset[Capability]] = frozenset({Capability.MAIL, Capability.REGISTER})
    centre: ClassVar[bool] = True
    centre_steps: ClassVar[bool] = True
    counts_all: ClassVar[bool] = True
    behaviour: ClassVar[Behaviour] = Behaviour(
        carries="deltas",
        bounded_by="delay_bound: older gradients are refused",
        on_death="the others go on; without its centre the run stops and can be resumed",
        on_slow="no replica waits for it; its gradient is old, and refused beyond delay_bound",
        on_join="takes a living peer's parameters; its first pull brings the centre's",
    )

    _rank: int = field(default=0, init=False, repr=False, compare=False)
    _gradient: Tensor = field(default_factory=lambda: torch.empty(0), init=False, repr=False, compare=False)
    _summed: int = field(default=0, init=False, repr=False, compare=False)  # gradients in the sum
    # version of the parameters at which the first of them was computed
    _oldest: int = field(default=0, init=False, repr=False, compare=False)
    _pushes: CheckpointBarrier = field(init=False, repr=False, compare=False)
    # number of the centre's updates in the parameters that were pulled last
    _version: int = field(default=0, init=False, repr=False, compare=False)
    _awaited: bool = field(default=False, init=False, repr=False, compare=False)
    _rounds: int = field(default=0, init=False, repr=False, compare=False)
    _pulled_at: int = field(default=0, init=False, repr=False, compare=False)

    def attach(self, replica: Replica, channel: Channel) -> None:
        self._rank, self._pushes = channel.rank, CheckpointBarrier(_PUSH)
        self._gradient = torch.zeros_like(replica.grad)
        # schedules count an update of the centre as ``period`` updates, one for each gradient summed in it
        if channel.rank == centre_of(channel):
            replica.count_steps_by(lambda: replica.clock * self.period)
        else:
            replica.count_steps_by(lambda: self._version * self.period + replica.clock - self._pulled_at)

    def step(self, replica: Replica, channel: Channel) -> Exchange:
        require_centre(channel, _LOST)
        if self._summed == 0:
            self._oldest = self._version
        self._gradient.add_(replica.grad)
        self._summed += 1
        if self.local_steps:
            replica.step_plainly()
        else:
            replica.tick()
        pulled = self._awaited and self._pull(channel.receive(_REPLY), replica)
        if replica.clock % self.period == 0 and self._summed and not self._awaited:
            self._push(channel)
            if self._awaited and self.wait:
                pulled |= self._pull(wait_for_reply(channel, _REPLY, self.deadline_seconds, _LOST), replica)
        self._rounds += pulled
        return Exchange(self._rounds, 1 + pulled, replica.clock - self._pulled_at)

    def _push(self, channel: Channel) -> None:
        discard_replies(channel, _REPLY)
        centre, deadline = centre_of(channel), self.deadline_seconds
        self._awaited = channel.send(centre, _PUSH, self._gradient, self._oldest, deadline_seconds=deadline)
        if self._awaited:
            self._clear_gradient()
        else:
            require_centre(channel, _LOST)

    def _pull(self, message: Message | None, replica: Replica) -> bool:
        if message is None:
            return False
        self._awaited = False
        replica.params.detach().copy_(message.x)
        self._version, self._pulled_at = abs(int(message.note)), replica.clock
        if message.note < 0:
            self.refused += 1
            self._clear_gradient()  # the gradients since that push were computed at equally old parameters
        return True

    def _clear_gradient(self) -> None:
        self._gradient.zero_()
        self._summed = 0

    # -- the centre ---------------------------------------------------------------------------------

    def serve(self, replica: Replica, channel: Channel) -> bool:
        """Apply one gradient to the centre's parameters, and reply with them."""
        return self._pushes.serve(channel, functools.partial(self._apply, replica=replica, channel=channel))

    def _apply(self, message: Message, replica: Replica, channel: Channel) -> None:
        """Apply a gradient or refuse it, and reply. The reply's note is the centre's number of updates;
        negative if the gradient was refused."""
        refused = 0 < self.delay_bound < replica.clock - message.note
        if refused:
            self.refused += 1
        else:
            replica.grad.copy_(message.x)
            replica.update()
        version = -replica.clock if refused else replica.clock
        channel.send(message.sender, _REPLY, replica.params.detach(), note=version)

    def on_member(self, event: MemberEvent) -> None:
        self._pushes.on_member(event)

    # -- state --------------------------------------------------------------------------------------

    def drain(self, replica: Replica, channel: Channel, number: int, deadline_seconds: float) -> bool:
        """The centre applies the gradients that were pushed before. A reply in flight need not be saved: the
        next one replaces it."""
        apply = functools.partial(self._apply, replica=replica, channel=channel)
        return self._pushes.drain_to_centre(channel, number, apply, deadline_seconds, replica.params.detach())

    def state(self) -> dict[str, Any]:
        return {
            "rank": self._rank,
            "gradient": self._gradient.clone(),
            "summed": self._summed,
            "oldest": self._oldest,
            "version": self._version,
            "rounds": self._rounds,
            "pulled_at": self._pulled_at,
            "refused": self.refused,
        }

    def load(self, state: dict[str, Any]) -> None:
        self._version, self._rounds = int(state["version"]), int(state["rounds"])
        self._pulled_at, self.refused = int(state["pulled_at"]), int(state["refused"])
        self._awaited = False
        self._clear_gradient()
        if int(state["rank"]) == self._rank:  # a peer whose state was loaded pushes its gradient itself
            self._gradient.copy_(state["gradient"])
            self._summed, self._oldest = int(state["summed"]), int(state["oldest"])
