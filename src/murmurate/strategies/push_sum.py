"""Push-sum: gossip whose weights keep the mean (Kempe et al. 2003; Assran et al. 2019, SGP)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from murmurate.fabric.interface import Capability, Channel, Message
from murmurate.replica.vector import Exchange, Replica
from murmurate.strategies.checkpoint_barrier import Cut
from murmurate.strategies.interface import MemberEvent, Strategy, mean_of_published, require
from murmurate.topology import Topology, topology

_TAG = "mass"
_WORTH_SENDING = 0.1  # of an equal share: a message costs the same whatever weight it carries


@dataclass
class PushSum(Strategy):
    """Keep a sum x and a weight w; every update send shares of both to the out-peers; live on z = x / w.

    Whatever the graph and the delays, the sums of x and of w over replicas and messages in flight stay
    what they are, so no replica counts for more than another: what unweighted gossip gets wrong. An update
    moves x by the optimizer's whole step, as in stochastic gradient push. Differs: SGP averages in rounds,
    here nobody waits, so three things keep weights away from 0, where a step of the optimizer, which
    moves z by 1 / w of itself, would be a leap. A peer that has published nothing since our last share gets
    none: a member that stands still does not drain the others. A share leaves no less than
    ``least_weight`` here. And what a peer's queue does not take stays here, as does what is for one that has
    ended.

    topology: whom to send to, over the living; time-varying graphs turn with the own sends.
    least_weight: an equal share for each out-peer and one for us, but never less than this for us.
    """

    topology: str = "exponential"
    period: int = 1
    least_weight: float = 0.5

    name: ClassVar[str] = "push-sum"
    summary: ClassVar[str] = "update; send shares of sum and weight; live on their quotient"
    paper: ClassVar[str] = "Kempe et al. 2003; Assran et al. 2019 (SGP)"
    needs: ClassVar[frozenset[Capability]] = frozenset({Capability.MAIL, Capability.REGISTER})
    carries: ClassVar[str] = "deltas"
    bounded_by: ClassVar[str] = "the receiver's own steps: one share of each sender in each"
    on_death: ClassVar[str] = "its sum and weight are gone, and nothing else"
    on_slow: ClassVar[str] = "it gets no second share before it has taken a step"
    on_join: ClassVar[str] = "begins with a living peer's vector and weight 1"

    _sum: Tensor = field(default_factory=lambda: torch.empty(0), init=False, repr=False, compare=False)
    _mail: Cut = field(default_factory=lambda: Cut(_TAG), init=False, repr=False, compare=False)
    _weight: float = field(default=1.0, init=False, repr=False, compare=False)
    _rounds: int = field(default=0, init=False, repr=False, compare=False)
    _agreed_at: int = field(default=0, init=False, repr=False, compare=False)
    _shown: dict[int, int] = field(default_factory=dict, init=False, repr=False, compare=False)
    _graph: Topology | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        require(self.period >= 1, f"period counts updates between sends and is at least 1, not {self.period}")
        right = 0 < self.least_weight < 1
        require(right, f"least_weight lies between 0 and 1, not at {self.least_weight}")

    def attach(self, replica: Replica, channel: Channel) -> None:
        self._graph = topology(self.topology)
        self._sum = replica.params.detach().clone()

    def step(self, replica: Replica, channel: Channel) -> Exchange:
        z = replica.params.detach()
        replica.update()
        # x <- x + (z' - x / w): the optimizer's step, on the sum; with w = 1 it is z' to the bit
        self._sum.mul_(1 - 1 / self._weight).add_(z)
        alone = len(self._partners(channel)) == 1
        if replica.clock % self.period == 0:
            self._send(replica.clock // self.period - 1, channel)
        heard: set[int] = set()
        for _ in range(4 * channel.size):
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
        """A share of (x, w) for each out-peer that has stepped since the last one."""
        shown = {peer: channel.version(peer) for peer in self._out_peers(turn, channel)}
        peers = [peer for peer, version in shown.items() if version > self._shown.get(peer, -1)]
        if not peers:
            return
        equal = 1 / (1 + len(peers))
        share = min(equal, (1 - self.least_weight / self._weight) / len(peers))
        if share < _WORTH_SENDING * equal:
            return
        part, weight = self._sum * share, self._weight * share
        for peer in peers:
            if channel.send(peer, _TAG, part, note=weight, deadline_seconds=0.0):
                self._sum.sub_(part)
                self._weight -= weight
                self._shown[peer] = shown[peer]

    def _out_peers(self, turn: int, channel: Channel) -> list[int]:
        if self._graph is None:
            raise RuntimeError("attach comes before step")
        partners = self._partners(channel)
        position = partners.index(channel.rank)
        return [partners[k] for k in self._graph.out_peers(position, len(partners), turn)]

    def _partners(self, channel: Channel) -> list[int]:
        """The living but those who take no further part: what is sent to them nobody would take."""
        return [rank for rank in channel.living() if rank == channel.rank or not self._mail.has_ended(rank)]

    def _take(self, message: Message) -> None:
        self._sum.add_(message.x)
        self._weight += message.note

    def consensus(self, replica: Replica, channel: Channel) -> Tensor:
        """The mean of what the living last published, each de-biased."""
        return mean_of_published(replica, channel)

    def settle(self, replica: Replica, channel: Channel, number: int, deadline_seconds: float) -> bool:
        """Nothing is in flight: the sums over what the replicas save are the sums over all there is."""
        peers = [j for j in channel.living() if j != channel.rank]
        told = self._mail.announce(channel, number, peers, self._sum)
        drained = self._mail.drain(channel, number, peers, self._take, deadline_seconds)
        torch.div(self._sum, self._weight, out=replica.params.detach())
        replica.reload()
        return told and drained

    def joined(self, replica: Replica, channel: Channel) -> None:
        """A part of the sum anew: the peer goes on with its own."""
        self._sum.copy_(replica.params.detach())
        self._weight = 1.0

    def on_member(self, event: MemberEvent) -> None:
        self._shown.pop(event.rank, None)  # who joins in its place publishes from version 1 again
        if event.kind == "joined":
            self._mail.forget(event.rank)

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
