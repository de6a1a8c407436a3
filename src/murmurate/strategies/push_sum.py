"""Push-sum: gossip with weights that preserve the mean (Kempe et al. 2003; Assran et al. 2019, SGP)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from murmurate.fabric.interface import Capability, Channel, Message
from murmurate.ranges import OpenUnitInterval, PositiveInt
from murmurate.replica.vector import Exchange, Replica
from murmurate.strategies.checkpoint_barrier import CheckpointBarrier
from murmurate.strategies.interface import Behaviour, MemberEvent, Strategy, mean_of_published
from murmurate.topology import Topology, topology

_TAG = "mass"  # shares of sum and weight
_LEAST_SHARE = 0.1  # of an equal share; smaller shares are not worth a message


@dataclass
class PushSum(Strategy):
    """Keep a sum x and a weight w; every ``period`` updates send shares to the out-peers; train z = x / w.

    Whatever the graph and the delays, the totals of x and of w over replicas and messages in flight stay
    constant, so no replica counts more than another, which unweighted gossip does not guarantee. An update
    adds the optimizer's whole step to x, as in stochastic gradient push. Differs: SGP averages in rounds;
    here no replica waits, so three rules keep weights away from 0, near which the change d / w of z by an
    optimizer step d would be huge. A peer that has published nothing since its last share gets none, so a
    stopped member does not drain the others. A sender keeps at least the weight ``least_weight``. And a share
    whose receiver has ended, or has a full queue, stays with its sender.

    period: own updates between two sends.
    topology: graph of the living members that gives the out-peers; a time-varying graph changes with this
        member's own sends.
    least_weight: the least weight that a member keeps when it sends. If that allows it, a member keeps as
        large a share as it sends to each out-peer.
    """

    topology: str = "exponential"
    period: PositiveInt = 1
    least_weight: OpenUnitInterval = 0.5

    name: ClassVar[str] = "push-sum"
    summary: ClassVar[str] = "update; send shares of sum and weight; train their quotient"
    paper: ClassVar[str] = "Kempe et al. 2003; Assran et al. 2019 (SGP)"
    needs: ClassVar[frozenset[Capability]] = frozenset({Capability.MAIL, Capability.REGISTER})
    behaviour: ClassVar[Behaviour] = Behaviour(
        carries="deltas",
        bounded_by="the receiver's own steps: each takes the shares that have arrived",
        on_death="its sum and weight are lost, and the shares in flight to it",
        on_slow="it gets no second share before it has taken a step",
        on_join="begins with a living peer's vector and weight 1",
    )

    _sum: Tensor = field(default_factory=lambda: torch.empty(0), init=False, repr=False, compare=False)
    _mail: CheckpointBarrier = field(init=False, repr=False, compare=False)
    _weight: float = field(default=1.0, init=False, repr=False, compare=False)
    _rounds: int = field(default=0, init=False, repr=False, compare=False)
    _agreed_at: int = field(default=0, init=False, repr=False, compare=False)
    # by peer: the version that it had published when a share was last sent to it
    _sent_version: dict[int, int] = field(default_factory=dict, init=False, repr=False, compare=False)
    _graph: Topology = field(init=False, repr=False, compare=False)

    def attach(self, replica: Replica, channel: Channel) -> None:
        self._graph, self._mail = topology(self.topology), CheckpointBarrier(_TAG)
        self._sum = replica.params.detach().clone()

    def step(self, replica: Replica, channel: Channel) -> Exchange:
        z = replica.params.detach()
        replica.update()
        # x <- x + (z' - x / w): the optimizer's step z' - z, added to the sum; exactly z' if w = 1
        self._sum.mul_(1 - 1 / self._weight).add_(z)
        alone = len(self._partners(channel)) == 1
        if replica.clock % self.period == 0:
            self._send(replica.clock // self.period - 1, channel)
        heard: set[int] = set()
        for _ in range(4 * channel.size):  # bounded, so that fast senders cannot prolong the step forever
            message = self._mail.receive(channel)
            if message is None:
                break
            self._take(message)
            heard.add(message.sender)
        if heard or alone:
            self._rounds += 1
            self._agreed_at = replica.clock
        torch.div(self._sum, self._weight, out=z)
        channel.publish(z)
        return Exchange(self._rounds, 1 + len(heard), replica.clock - self._agreed_at)

    def _send(self, turn: int, channel: Channel) -> None:
        """Send a share of (x, w) to each out-peer that has published since it was last sent one."""
        published = {peer: channel.version(peer) for peer in self._out_peers(turn, channel)}
        peers = [peer for peer, version in published.items() if version > self._sent_version.get(peer, -1)]
        if not peers:
            return
        equal_share = 1 / (1 + len(peers))
        share = min(equal_share, (1 - self.least_weight / self._weight) / len(peers))
        if share < _LEAST_SHARE * equal_share:
            return
        sum_share, weight_share = self._sum * share, self._weight * share
        for peer in peers:
            if channel.send(peer, _TAG, sum_share, note=weight_share, deadline_seconds=0.0):
                self._sum.sub_(sum_share)
                self._weight -= weight_share
                self._sent_version[peer] = published[peer]

    def _out_peers(self, turn: int, channel: Channel) -> list[int]:
        partners = self._partners(channel)
        position = partners.index(channel.rank)
        return [partners[k] for k in self._graph.out_peers(position, len(partners), turn)]

    def _partners(self, channel: Channel) -> list[int]:
        """The living members, except those that have ended and would not receive a share."""
        return [rank for rank in channel.living() if rank == channel.rank or not self._mail.has_ended(rank)]

    def _take(self, message: Message) -> None:
        """Add a received share."""
        self._sum.add_(message.x)
        self._weight += message.note

    def consensus(self, replica: Replica, channel: Channel) -> Tensor:
        """The mean of the de-biased vectors that the living members last published."""
        return mean_of_published(replica, channel)

    def drain(self, replica: Replica, channel: Channel, number: int, deadline_seconds: float) -> bool:
        """Afterwards no share is in flight, so the saved sums and weights of all replicas are complete."""
        living = channel.living()
        # also with those whose connection is interrupted a share may be in flight
        peers = [
            j
            for j in range(channel.size)
            if j != channel.rank and (j in living or not (channel.has_lost(j) or self._mail.has_ended(j)))
        ]
        marked = self._mail.send_markers(channel, number, peers, self._sum)
        drained = self._mail.drain(channel, number, peers, self._take, deadline_seconds)
        torch.div(self._sum, self._weight, out=replica.params.detach())
        replica.reload()
        return marked and drained

    def rewritten(self, replica: Replica, channel: Channel) -> None:
        """x <- w z, with the weight that this replica has."""
        torch.mul(replica.params.detach(), self._weight, out=self._sum)

    def joined(self, replica: Replica, channel: Channel) -> None:
        """Start with weight 1: the peer whose state was loaded keeps its own sum and weight."""
        self._sum.copy_(replica.params.detach())
        self._weight = 1.0

    def on_member(self, event: MemberEvent) -> None:
        self._sent_version.pop(event.rank, None)  # its replacement publishes from version 1 again
        self._mail.on_member(event)

    def state(self) -> dict[str, Any]:
        return {
            "sum": self._sum.clone(),
            "weight": self._weight,
            "rounds": self._rounds,
            "agreed_at": self._agreed_at,
        }

    def load(self, state: dict[str, Any]) -> None:
        self._sum.copy_(state["sum"])
        self._weight = float(state["weight"])
        self._rounds, self._agreed_at = int(state["rounds"]), int(state["agreed_at"])
