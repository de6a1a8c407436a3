"""Push gossip: send the parameters to one random peer, who averages what it gets (Jin, Algorithm 6)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from murmurate.fabric.interface import Capability, Fabric
from murmurate.spec import derive_generator
from murmurate.strategies.interface import Strategy, mean_of_published, require
from murmurate.vector import Exchange, Replica

_TAG = "theta"


@dataclass
class PushGossip(Strategy):
    """Update; every ``period`` (tau) updates send to one random peer, and average what came.

    mixing: None averages the own vector and the k received ones, 1/(1 + k) each, as Algorithm 6 does; a
        number beta mixes them in one after another, theta_i <- (1 - beta) theta_i + beta theta_j.
    stale: send and average before the update instead of after it (section 3.6).
    with_self: draw the target from all p members; a draw of oneself sends nothing.

    Nobody waits: what does not fit into a peer's queue is not sent, and counted in ``refused``.
    """

    mixing: float | None = None
    period: int = 1
    stale: bool = False
    with_self: bool = False
    seed: int = 0

    name: ClassVar[str] = "push-gossip"
    summary: ClassVar[str] = "update; every tau updates send to one random peer; average what came"
    paper: ClassVar[str] = "Jin, Algorithm 6 and section 3.6"
    needs: ClassVar[frozenset[Capability]] = frozenset({Capability.MAIL, Capability.REGISTER})
    carries: ClassVar[str] = "state"
    bounded_by: ClassVar[str] = "the length of the queue"
    on_death: ClassVar[str] = "targets are drawn from the living"
    on_slow: ClassVar[str] = "its queue fills, and is then passed over"
    on_join: ClassVar[str] = "it is drawn from then on"

    refused: int = field(default=0, init=False, repr=False, compare=False)
    _draws: torch.Generator = field(default_factory=torch.Generator, init=False, repr=False, compare=False)
    _rounds: int = field(default=0, init=False, repr=False, compare=False)
    _agreed_at: int = field(default=0, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        right = self.mixing is None or 0 <= self.mixing <= 1
        require(right, f"mixing is a weight from 0 to 1, not {self.mixing}")
        require(self.period >= 1, f"period counts updates between sends and is at least 1, not {self.period}")

    def attach(self, replica: Replica, fabric: Fabric) -> None:
        self._draws = derive_generator(self.seed, "gossip", fabric.rank)

    def step(self, replica: Replica, fabric: Fabric) -> Exchange:
        due = (replica.clock + 1) % self.period == 0
        heard = 1
        if due and self.stale:
            heard += self._gossip(replica, fabric)
        replica.update()
        if due and not self.stale:
            heard += self._gossip(replica, fabric)
        fabric.publish(replica.params)
        return Exchange(self._rounds, heard, replica.clock - self._agreed_at)

    def _gossip(self, replica: Replica, fabric: Fabric) -> int:
        """Send to one, average with all that came; returns from how many."""
        candidates = [j for j in fabric.living() if self.with_self or j != fabric.rank]
        target = fabric.rank
        if candidates:
            target = candidates[int(torch.randint(len(candidates), (), generator=self._draws))]
        if target != fabric.rank:
            self.refused += not fabric.send(target, _TAG, replica.params, deadline_seconds=0.0)
        heard: set[int] = set()
        count = 0
        # what comes while this is read waits for the next time, so that a fast peer cannot hold us here
        for _ in range(4 * fabric.size):
            letter = fabric.receive(_TAG)
            if letter is None:
                break
            count += 1
            heard.add(letter.sender)
            replica.params.lerp_(letter.x, 1 / (1 + count) if self.mixing is None else self.mixing)
        if count or fabric.size == 1 or target == fabric.rank:
            self._rounds += 1
            self._agreed_at = replica.clock + self.stale
        return len(heard)

    def consensus(self, replica: Replica, fabric: Fabric) -> Tensor:
        return mean_of_published(replica, fabric)

    def state(self) -> dict[str, Any]:
        return {"draws": self._draws.get_state(), "rounds": self._rounds, "agreed_at": self._agreed_at}

    def load(self, state: dict[str, Any]) -> None:
        self._draws.set_state(state["draws"])
        self._rounds, self._agreed_at = int(state["rounds"]), int(state["agreed_at"])
