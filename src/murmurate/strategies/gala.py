"""GALA: gossip with fixed peers, without waiting (Assran et al., NeurIPS 2019, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor

from murmurate.fabric.interface import Capability, Channel
from murmurate.ranges import NonNegativeInt, Seconds
from murmurate.replica.vector import Exchange, Replica
from murmurate.strategies.interface import Behaviour, MemberEvent, Strategy, mean_of_published
from murmurate.topology import Topology, topology


@dataclass
class GALA(Strategy):
    """Update; publish to the out-peers; average once every in-peer has published.

    topology: topology of the living members: ``ring`` (directed, the paper's), ``exponential``, ...
    staleness_bound: tau of section 3: after more own updates than this since the last averaging, wait. 0
        never waits, and then Proposition 2 has no finite tau.
    deadline_seconds: longest time for such a wait. Afterwards the replica goes on without averaging, and
        waits again only after another ``staleness_bound`` updates. (Differs: the paper blocks, on a dead peer
        forever.)
    """

    topology: str = "ring"
    staleness_bound: NonNegativeInt = 100
    deadline_seconds: Seconds = 0.5

    name: ClassVar[str] = "gala"
    summary: ClassVar[str] = "update; publish without waiting; average once every in-peer has published"
    paper: ClassVar[str] = "Assran et al. 2019, Algorithm 1"
    needs: ClassVar[frozenset[Capability]] = frozenset({Capability.REGISTER})
    averages_published: ClassVar[bool] = True
    behaviour: ClassVar[Behaviour] = Behaviour(
        carries="state",
        bounded_by="staleness_bound, and a wait that ends after deadline_seconds",
        on_death="no replica waits; the graph is computed anew over the living",
        on_slow="not averaged with until it publishes; waited for only beyond staleness_bound",
        on_join="begins with a living peer's state; the graph is computed anew with it",
    )

    # by in-peer: the version of its vector that was averaged last
    _seen: dict[int, int] = field(default_factory=dict, init=False, repr=False, compare=False)
    _round: int = field(default=0, init=False, repr=False, compare=False)
    # the clock at the last averaging, and the clock after which a step waits
    _agreed_at: int = field(default=0, init=False, repr=False, compare=False)
    _wait_after: int = field(default=0, init=False, repr=False, compare=False)
    _graph: Topology = field(init=False, repr=False, compare=False)

    def attach(self, replica: Replica, channel: Channel) -> None:
        self._graph = topology(self.topology)
        self._wait_after = self.staleness_bound

    def step(self, replica: Replica, channel: Channel) -> Exchange:
        replica.update()  # line 4
        channel.publish(replica.params)  # line 5
        peers = self._in_peers(channel)
        if self.staleness_bound and replica.clock > self._wait_after:
            channel.wait_newer(peers, [self._seen.get(j, 0) for j in peers], self.deadline_seconds)
            self._wait_after = replica.clock + self.staleness_bound
        heard = 1
        # a member without in-peers (it is alone, or left out of a matching) also completes the round
        if all(channel.version(j) > self._seen.get(j, 0) for j in peers):  # line 6
            heard += self._average(replica.params, peers, channel)  # line 7
            self._agreed_at = replica.clock
            self._wait_after = replica.clock + self.staleness_bound
        return Exchange(round=self._round, heard=heard, staleness=replica.clock - self._agreed_at)

    def _average(self, x: Tensor, peers: Sequence[int], channel: Channel) -> int:
        """x <- (x + sum_j m_j) / (1 + |N_in|); messages are read in place. Returns |N_in|."""
        for number, j in enumerate(peers, start=1):
            message, self._seen[j] = channel.peek(j)
            x.lerp_(message, 1 / (1 + number))  # a running mean, with one pass over x for each message
        self._round += 1
        return len(peers)

    def _in_peers(self, channel: Channel) -> list[int]:
        """N_in, among the living members; a time-varying graph follows this member's own rounds."""
        living = channel.living()
        position = living.index(channel.rank)
        return [living[k] for k in self._graph.in_peers(position, len(living), self._round)]

    def consensus(self, replica: Replica, channel: Channel) -> Tensor:
        """The mean of this member's parameters and the vectors that other living members last published."""
        return mean_of_published(replica, channel)

    def on_member(self, event: MemberEvent) -> None:
        self._seen.pop(event.rank, None)

    def state(self) -> dict[str, Any]:
        # without ``_seen``: in the channel of a resumed run, versions count from 1 again
        return {"round": self._round, "agreed_at": self._agreed_at, "patient_until": self._wait_after}

    def load(self, state: dict[str, Any]) -> None:
        self._round = int(state["round"])
        self._agreed_at = int(state["agreed_at"])
        self._wait_after = int(state["patient_until"])
