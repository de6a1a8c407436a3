"""Pull gossip: mix with the parameters of one random peer (Jin 2018, chapter 3, Algorithm 5)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from murmurate.fabric.interface import Capability, Channel
from murmurate.ranges import PositiveInt, Seed, UnitInterval
from murmurate.replica.vector import Exchange, Replica
from murmurate.spec import derive_generator
from murmurate.strategies.interface import Behaviour, Strategy, mean_of_published
from murmurate.topology import Topology, topology


@dataclass
class PullGossip(Strategy):
    """Update; every ``period`` (tau) updates mix with the vector that one random peer last published.

    period: tau, own updates between two mixes.
    mixing: beta of eq. 3.5: theta_i <- (1 - beta) theta_i + beta theta_j.
    stale: whether to mix before the update (eq. 3.61) instead of after it (eq. 3.66).
    topology: the peers that may be drawn: ``complete`` is all, as in the paper; ``ring``, ``exponential`` and
        others limit them to the in-peers in that graph of the living members; a time-varying graph changes
        with this member's own rounds.
    with_self: whether a member may also draw itself, as in the paper's analysis; then it mixes nothing.
    seed: seed of the draws; each member has its own stream.

    No replica waits: a peer that has published nothing yet is not mixed with.
    """

    mixing: UnitInterval = 0.5
    period: PositiveInt = 1
    stale: bool = False
    with_self: bool = False
    topology: str = "complete"
    seed: Seed = 0

    name: ClassVar[str] = "pull-gossip"
    summary: ClassVar[str] = "update; every tau updates mix with one random peer"
    paper: ClassVar[str] = "Jin 2018, Algorithm 5 and section 3.6"
    needs: ClassVar[frozenset[Capability]] = frozenset({Capability.REGISTER})
    behaviour: ClassVar[Behaviour] = Behaviour(
        carries="state",
        bounded_by="nothing: the age of the vector that a peer last published",
        on_death="draws are from the living",
        on_slow="its last vector is used again",
        on_join="it may be drawn from then on",
    )

    _draws: torch.Generator = field(default_factory=torch.Generator, init=False, repr=False, compare=False)
    _graph: Topology = field(init=False, repr=False, compare=False)
    _rounds: int = field(default=0, init=False, repr=False, compare=False)
    _agreed_at: int = field(default=0, init=False, repr=False, compare=False)

    def attach(self, replica: Replica, channel: Channel) -> None:
        self._graph = topology(self.topology)
        self._draws = derive_generator(self.seed, "gossip", channel.rank)

    def step(self, replica: Replica, channel: Channel) -> Exchange:
        due = (replica.clock + 1) % self.period == 0
        heard = 1
        if due and self.stale:
            heard += self._mix(replica, channel)
        replica.update()
        if due and not self.stale:
            heard += self._mix(replica, channel)
        channel.publish(replica.params)
        return Exchange(self._rounds, heard, replica.clock - self._agreed_at)

    def draw(self, rank: int, living: Sequence[int], turn: int = 0) -> int:
        """j of eq. 3.5, uniform over the peers that may be drawn; ``rank`` itself where there are none.

        turn: number of this exchange, which a time-varying graph depends on.
        """
        peers = self._graph.in_peers(living.index(rank), len(living), turn)
        candidates = sorted([living[k] for k in peers] + [rank] * self.with_self)
        if not candidates:
            return rank
        return candidates[int(torch.randint(len(candidates), (), generator=self._draws))]

    def _mix(self, replica: Replica, channel: Channel) -> int:
        """theta_i <- (1 - beta) theta_i + beta theta_j; returns 1 if there was a theta_j, else 0."""
        peer = self.draw(channel.rank, channel.living(), replica.clock // self.period)
        heard = peer != channel.rank and channel.version(peer) > 0
        if heard:
            replica.params.detach().lerp_(channel.peek(peer)[0], self.mixing)
        if heard or peer == channel.rank:  # drawing itself also counts as a round
            self._rounds += 1
            # with ``stale`` the update follows the mix, and does not count as staleness
            self._agreed_at = replica.clock + self.stale
        return int(heard)

    def consensus(self, replica: Replica, channel: Channel) -> Tensor:
        return mean_of_published(replica, channel)

    def resumed(self, replica: Replica, channel: Channel) -> None:
        """Publish again: the register is empty after a resume, and a peer may step first."""
        channel.publish(replica.params)

    def joined(self, replica: Replica, channel: Channel) -> None:
        """Use new draws instead of repeating those of the peer whose state was loaded."""
        self._draws = derive_generator(self.seed, f"gossip from update {replica.clock}", channel.rank)

    def state(self) -> dict[str, Any]:
        return {"draws": self._draws.get_state(), "rounds": self._rounds, "agreed_at": self._agreed_at}

    def load(self, state: dict[str, Any]) -> None:
        self._draws.set_state(state["draws"])
        self._rounds, self._agreed_at = int(state["rounds"]), int(state["agreed_at"])
