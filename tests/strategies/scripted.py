"""A fabric that does what the test says, for tables of small histories: no threads, no schedule.

The test steps the members itself, one after the other, and decides which published versions have
arrived where and what happens while somebody waits.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from murmurate.fabric.interface import Capability, FabricError, Traffic
from murmurate.replicator.replicator import Replicator
from murmurate.strategies.interface import Strategy


class Script:
    """What all members see: everything published, how much of it has arrived where, who is dead."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.dead: set[int] = set()
        self.published: list[list[Tensor]] = [[] for _ in range(size)]
        self.held_back: dict[tuple[int, int], int] = {}  # (publisher, reader): newest version that arrived
        self.while_waiting: Callable[[], None] = lambda: None
        self.waits: list[tuple[int, float, bool]] = []  # (rank, deadline, whether it came in time)
        self.order: list[tuple[int, str]] = []

    def member(self, rank: int) -> ScriptedMember:
        return ScriptedMember(self, rank)

    def arrived(self, publisher: int, reader: int) -> int:
        limit = self.held_back.get((publisher, reader), math.inf)
        return int(min(len(self.published[publisher]), limit))


class ScriptedMember:
    """A ``Fabric`` and the one ``Channel`` it makes; only the register works."""

    capabilities = frozenset({Capability.REGISTER})

    def __init__(self, script: Script, rank: int) -> None:
        self.script, self.rank, self.size = script, rank, script.size
        self.traffic = Traffic()

    def channel(self, name: str, like: Tensor) -> ScriptedMember:
        return self

    def living(self) -> list[int]:
        return [rank for rank in range(self.size) if rank not in self.script.dead]

    def has_lost(self, rank: int) -> bool:
        return rank in self.script.dead

    def publish(self, x: Tensor) -> int:
        self.script.order.append((self.rank, "publish"))
        self.script.published[self.rank].append(x.detach().clone())
        return len(self.script.published[self.rank])

    def version(self, peer: int) -> int:
        return self.script.arrived(peer, self.rank)

    def peek(self, peer: int) -> tuple[Tensor, int]:
        version = self.version(peer)
        if version == 0:
            raise FabricError(f"rank {peer} has published nothing")
        self.script.order.append((self.rank, "peek"))
        return self.script.published[peer][version - 1], version

    def wait_newer(self, peers, seen, deadline_seconds: float) -> bool:
        def spoken() -> bool:
            return all(self.version(p) > v or p in self.script.dead for p, v in zip(peers, seen, strict=True))

        if not spoken():
            self.script.while_waiting()
        self.script.waits.append((self.rank, deadline_seconds, spoken()))
        return spoken()


class Number(nn.Module):
    """One parameter, so that a history is a column of numbers."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.tensor([value], dtype=torch.float64))


class Cast:
    """One member a rank, at ``starts``; ``step(rank, by)`` moves its number up by ``by`` and agrees."""

    def __init__(self, strategy: Strategy, starts: list[float], script: Script | None = None) -> None:
        self.script = script or Script(len(starts))
        self.replicas = []
        self.bound_replicas = []
        for rank, start in enumerate(starts):
            replicator = Replicator(strategy, self.script.member(rank))
            self.replicas.append(
                replicator.replicate("x", Number(start), lambda p: torch.optim.SGD(p, lr=1.0))
            )
            self.bound_replicas.append(replicator.bound_replicas["x"])

    def step(self, rank: int, by: float) -> tuple[float, int, int, int]:
        """(its number afterwards, round, heard, staleness)."""
        replica = self.replicas[rank]
        exchange = replica.follow(torch.tensor([-by], dtype=torch.float64))
        return (replica.params.item(), *exchange)
