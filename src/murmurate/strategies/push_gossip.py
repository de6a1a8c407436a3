"""Push gossip: send the parameters to one random peer, which averages what it receives (Jin 2018, Alg. 6)."""

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

_TAG = "theta"
_MOST_MESSAGES = 64  # per member, received in one step, so that a fast peer cannot prolong it forever


@dataclass
class PushGossip(Strategy):
    """Update; every ``period`` (tau) updates send to one random peer, and average the vectors received.

    period: tau, own updates between two messages.
    mixing: None averages the member's vector and the k received ones, 1/(1 + k) each, as Algorithm 6 does; a
        number beta mixes them in one after another by ascending rank,
        theta_i <- (1 - beta) theta_i + beta theta_j.
    stale: whether to send and average before the update instead of after it (section 3.6).
    topology: the peers that may be drawn: ``complete`` is all, as in the paper; ``ring``, ``exponential`` and
        others limit them to the out-peers in that graph of the living members; a time-varying graph changes
        with this member's own rounds.
    with_self: whether a member may also draw itself; then it sends nothing.
    seed: seed of the draws; each member has its own stream.

    Each peer counts once in a step (section 3.3), with its newest message: a slow member does not mix one
    peer's queued vectors one after another. No replica waits: a vector for which a peer's queue is full is
    not sent, but counted in ``refused``.
    """

    mixing: UnitInterval | None = None
    period: PositiveInt = 1
    stale: bool = False
    with_self: bool = False
    topology: str = "complete"
    seed: Seed = 0

    name: ClassVar[str] = "push-gossip"
    summary: ClassVar[str] = "update; every tau updates send to one random peer; average the vectors received"
    paper: ClassVar[str] = "Jin 2018, Algorithm 6 and section 3.6"
    needs: ClassVar[frozenset[Capability]] = frozenset({Capability.MAIL, Capability.REGISTER})
    behaviour: ClassVar[Behaviour] = Behaviour(
        carries="state",
        bounded_by="the reader's own steps: of a peer's messages only the newest counts",
        on_death="targets are drawn from the living",
        on_slow="its queue fills, and it is then skipped",
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
            heard += self._gossip(replica, channel)
        replica.update()
        if due and not self.stale:
            heard += self._gossip(replica, channel)
        channel.publish(replica.params)
        return Exchange(self._rounds, heard, replica.clock - self._agreed_at)

    def draw(self, rank: int, living: Sequence[int], turn: int = 0) -> int:
        """The target, uniform over the peers that may be drawn; ``rank`` itself where there are none.

        turn: number of this exchange, which a time-varying graph depends on.
        """
        peers = self._graph.out_peers(living.index(rank), len(living), turn)
        candidates = sorted([living[k] for k in peers] + [rank] * self.with_self)
        if not candidates:
            return rank
        return candidates[int(torch.randint(len(candidates), (), generator=self._draws))]

    def _gossip(self, replica: Replica, channel: Channel) -> int:
        """Send to one peer, and average the vectors received; returns how many were received."""
        target = self.draw(channel.rank, channel.living(), replica.clock // self.period)
        x = replica.params.detach()
        if target != channel.rank:
            self.refused += not channel.send(target, _TAG, x, deadline_seconds=0.0)
        newest: dict[int, Tensor] = {}
        for _ in range(_MOST_MESSAGES * channel.size):
            message = channel.receive(_TAG)
            if message is None:
                break
            newest[message.sender] = message.x
        for count, sender in enumerate(sorted(newest), start=1):
            x.lerp_(newest[sender], 1 / (1 + count) if self.mixing is None else self.mixing)
        if newest or target == channel.rank:  # drawing itself also counts as a round
            self._rounds += 1
            # with ``stale`` the update follows the mix, and does not count as staleness
            self._agreed_at = replica.clock + self.stale
        return len(newest)

    def consensus(self, replica: Replica, channel: Channel) -> Tensor:
        return mean_of_published(replica, channel)

    def joined(self, replica: Replica, channel: Channel) -> None:
        """Use new draws instead of repeating those of the peer whose state was loaded."""
        self._draws = derive_generator(self.seed, f"gossip from update {replica.clock}", channel.rank)

    def state(self) -> dict[str, Any]:
        return {
            "draws": self._draws.get_state(),
            "rounds": self._rounds,
            "agreed_at": self._agreed_at,
            "refused": self.refused,
        }

    def load(self, state: dict[str, Any]) -> None:
        self._draws.set_state(state["draws"])
        self.refused = int(state["refused"])
        self._rounds, self._agreed_at = int(state["rounds"]), int(state["agreed_at"])
