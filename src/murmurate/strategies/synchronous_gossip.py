"""Gossip in common rounds: all members draw the same pairs, so each knows who sends to whom.

Jin 2018, Algorithms 5 and 6 with synchronous rounds (Theorem 2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from murmurate.fabric.interface import Capability, Channel, FabricError, Message
from murmurate.ranges import PositiveInt, Seconds, Seed, UnitInterval
from murmurate.replica.vector import Exchange, Replica
from murmurate.spec import derive_generator
from murmurate.strategies.interface import Behaviour, MemberEvent, Strategy
from murmurate.topology import topology

_TAG = "theta"


@dataclass
class SynchronousGossip(Strategy):
    """Update; every ``period`` (tau) updates each member draws a peer, and waits for the round's messages.

    period: tau, updates between two rounds. seed: seed of the draws, the same in all members.
    deadline_seconds: longest wait for a round's messages, and for space in a peer's queue.
    direction: ``pull``: i mixes in the vector of the j that it drew (eq. 3.10); ``push``: i sends its vector
        to j, which averages all that it received (Algorithm 6).
    mixing: beta; None is 0.5 for pull; for push it averages the own and the k received vectors, 1/(1 + k)
        each, as Algorithm 6 does. A number for push mixes them in one after another by ascending rank,
        theta_i <- (1 - beta) theta_i + beta theta_j.
    stale: whether to exchange the vectors from before the update (section 3.6).
    with_self: whether a member may also draw itself, as any of all p members (Theorem 2); then it mixes
    nothing.
    topology: the peers that may be drawn: ``complete`` is all, as in the paper; ``ring``, ``exponential`` and
        others limit them to the graph's in-peers (pull) or out-peers (push); a time-varying graph changes
        with the rounds. Dead members stay in the graph, as all members must draw the same peers.
    """

    direction: Literal["pull", "push"] = "pull"
    mixing: UnitInterval | None = None
    period: PositiveInt = 1
    stale: bool = False
    with_self: bool = False
    topology: str = "complete"
    deadline_seconds: Seconds = 60.0
    seed: Seed = 0

    name: ClassVar[str] = "synchronous-gossip"
    summary: ClassVar[str] = "update; every tau updates mix with one random peer in a common round"
    paper: ClassVar[str] = "Jin 2018, Algorithms 5 and 6, Theorem 2"
    needs: ClassVar[frozenset[Capability]] = frozenset({Capability.MAIL, Capability.COLLECTIVE})
    synchronous: ClassVar[bool] = True
    behaviour: ClassVar[Behaviour] = Behaviour(
        carries="state",
        bounded_by="the round: 0",
        on_death="pull: members that drew it mix nothing in that round; push: no vector comes from it",
        on_slow="waited for up to a deadline; then replaced (murmurate train, local or ray) or the run stops",
        on_join="takes part from the next common round on, with a living peer's state",
    )

    _rounds: int = field(default=0, init=False, repr=False, compare=False)
    # messages of later rounds
    _early: list[Message] = field(default_factory=list, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.direction not in ("pull", "push"):
            raise ValueError(f"direction is pull or push, not {self.direction}")

    def attach(self, replica: Replica, channel: Channel) -> None:
        topology(self.topology)  # refuses an unknown name here, before the first round

    def step(self, replica: Replica, channel: Channel) -> Exchange:
        due = (replica.clock + 1) % self.period == 0
        heard = 1
        if due and self.stale:
            heard += self._round(replica, channel)
        replica.update()
        if due and not self.stale:
            heard += self._round(replica, channel)
        return Exchange(self._rounds, heard, replica.clock % self.period)

    def drawn(self, size: int, number: int) -> list[int]:
        """The peer that each of ``size`` members draws in round ``number``; the same list on all members."""
        draws = derive_generator(self.seed, f"gossip round {number}")
        if self.topology != "complete":
            graph = topology(self.topology)
            peers = graph.out_peers if self.direction == "push" else graph.in_peers
            table = [sorted([*peers(i, size, number), *[i] * self.with_self]) for i in range(size)]
            numbers = torch.randint(1 << 62, (size,), generator=draws).tolist()
            return [
                row[n % len(row)] if row else i for i, (row, n) in enumerate(zip(table, numbers, strict=True))
            ]
        if self.with_self:
            return torch.randint(size, (size,), generator=draws).tolist()
        if size == 1:
            return [0]
        offsets = torch.randint(size - 1, (size,), generator=draws).tolist()
        return [j + (j >= i) for i, j in enumerate(offsets)]

    def _round(self, replica: Replica, channel: Channel) -> int:
        """Make the next round; returns the number of vectors that were mixed in."""
        self._rounds += 1
        pairs = [(i, j) for i, j in enumerate(self.drawn(channel.size, self._rounds)) if i != j]
        transfers = pairs if self.direction == "push" else [(j, i) for i, j in pairs]
        x = replica.params.detach()
        for sender, receiver in transfers:
            if sender == channel.rank:
                self._send(receiver, x, channel)
        senders = sorted(sender for sender, receiver in transfers if receiver == channel.rank)
        messages = self._await(senders, channel)
        weight = 0.5 if self.mixing is None and self.direction == "pull" else self.mixing
        for count, message in enumerate(messages, start=1):
            x.lerp_(message.x, 1 / (1 + count) if weight is None else weight)
        return len(messages)

    def _send(self, receiver: int, x: Tensor, channel: Channel) -> None:
        sent = channel.send(receiver, _TAG, x, note=self._rounds, deadline_seconds=self.deadline_seconds)
        if not sent and receiver in channel.living():
            raise FabricError(
                f"rank {channel.rank} could not send to rank {receiver} in gossip round {self._rounds}: "
                f"its queue stayed full for {self.deadline_seconds:g} s. It is alive but not reading: look "
                "at its log."
            )

    def _await(self, senders: Sequence[int], channel: Channel) -> list[Message]:
        """This round's messages in the order of their senders; lost senders are not waited for."""
        received = {x.sender: x for x in self._early if x.note == self._rounds}
        self._early = [x for x in self._early if x.note > self._rounds]
        waited_seconds = 0.0
        while missing := [j for j in senders if j not in received]:
            message = channel.wait(_TAG, 0.05)
            if message is None:
                # deaths are read before the last receive, so that no message of a dead sender is missed
                dead = [j for j in missing if channel.has_lost(j)]
                message = channel.receive(_TAG)
                if message is None:
                    senders = [j for j in senders if j not in dead]
                    missing = [j for j in missing if j not in dead]
                    waited_seconds += 0.05
            if message is not None and message.note == self._rounds:
                received[message.sender] = message
            elif message is not None and message.note > self._rounds:
                self._early.append(message)
            if missing and waited_seconds > self.deadline_seconds:
                raise FabricError(
                    f"rank {channel.rank} waited {self.deadline_seconds:g} s for rank(s) {missing} in round "
                    f"{self._rounds} of gossip. They are alive but silent: look at their logs or output."
                )
        return [received[j] for j in senders if j in received]

    def consensus(self, replica: Replica, channel: Channel) -> Tensor:
        mean = replica.params.detach().clone()
        channel.mean_(mean)
        return mean

    def on_member(self, event: MemberEvent) -> None:
        self._early = [message for message in self._early if message.sender != event.rank]

    def state(self) -> dict[str, Any]:
        return {"rounds": self._rounds}

    def load(self, state: dict[str, Any]) -> None:
        self._rounds = int(state["rounds"])
