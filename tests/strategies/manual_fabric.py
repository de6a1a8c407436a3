"""A fabric for tables of strategies with a centre: one thread, mail that arrives at once or when told.

The test steps the members itself. While a learner waits, the centre serves, or whatever the test says.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable

import torch
from torch import Tensor

from murmurate.fabric.interface import Capability, Message, Traffic
from murmurate.replicator.replicator import Replicator
from murmurate.strategies.interface import Strategy
from strategies.scripted import Number


class ManualFabric:
    """What all members see: mail in order, shared memory, registers, who is dead."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.dead: set[int] = set()
        self.mail: dict[tuple[int, str], deque[Message]] = defaultdict(deque)
        self.memory: dict[str, Tensor] = {}
        self.shown: dict[int, list[Tensor]] = defaultdict(list)
        self.sent: list[tuple[int, int, str, list[float], float]] = []  # (from, to, tag, x, note)
        self.while_waiting: Callable[[], None] = lambda: None
        self.waited: list[float] = []

    def member(self, rank: int) -> ManualMember:
        return ManualMember(self, rank)


class ManualMember:
    """A ``Fabric`` and the one ``Channel`` it makes; everything but the collectives works."""

    capabilities = frozenset(Capability) - {Capability.COLLECTIVE}

    def __init__(self, fabric: ManualFabric, rank: int) -> None:
        self.fabric, self.rank, self.size = fabric, rank, fabric.size
        self.traffic = Traffic()

    def channel(self, name: str, like: Tensor) -> ManualMember:
        return self

    def living(self) -> list[int]:
        return [rank for rank in range(self.size) if rank not in self.fabric.dead]

    def has_lost(self, rank: int) -> bool:
        return rank in self.fabric.dead

    def send(self, to, tag, x, note=0.0, deadline_seconds=None) -> bool:
        if to in self.fabric.dead:
            return False
        self.fabric.sent.append((self.rank, to, tag, x.tolist(), float(note)))
        self.fabric.mail[to, tag].append(Message(self.rank, x.detach().clone(), float(note)))
        return True

    def receive(self, tag: str) -> Message | None:
        waiting = self.fabric.mail[self.rank, tag]
        return waiting.popleft() if waiting else None

    def wait(self, tag: str, deadline_seconds: float) -> Message | None:
        if not self.fabric.mail[self.rank, tag] and self.rank != self.size - 1:
            self.fabric.while_waiting()
        found = self.receive(tag)
        if found is None:
            self.traffic.waiting_seconds += deadline_seconds
            self.fabric.waited.append(deadline_seconds)
        return found

    def publish(self, x: Tensor) -> int:
        self.fabric.shown[self.rank].append(x.detach().clone())
        return len(self.fabric.shown[self.rank])

    def version(self, peer: int) -> int:
        return len(self.fabric.shown[peer])

    def peek(self, peer: int) -> tuple[Tensor, int]:
        return self.fabric.shown[peer][-1], len(self.fabric.shown[peer])

    def shared(self, key: str, like: Tensor) -> Tensor:
        return self.fabric.memory.setdefault(key, like.detach().clone())


class Company:
    """``learners`` and a centre, all starting at ``start``; the centre serves when told, or when waited for.

    ``served`` turns the second off: then answers come only after ``serve``.
    """

    def __init__(
        self, strategy: Strategy, learners: int, start=0.0, optimizer=None, served=True, **options
    ) -> None:
        self.fabric = ManualFabric(learners + 1)
        make = optimizer or (lambda p: torch.optim.SGD(p, lr=1.0))
        self.bound_replicas = []
        for rank in range(learners + 1):
            replicator = Replicator(strategy, self.fabric.member(rank))
            replicator.replicate("x", Number(start), make, **options)
            self.bound_replicas.append(replicator.bound_replicas["x"])
        self.centre = self.bound_replicas[-1]
        if served:
            self.fabric.while_waiting = self.serve

    def serve(self) -> int:
        """Serve until there is nothing more; how many were served."""
        count = 0
        with torch.no_grad():
            while self.centre.strategy.serve(self.centre.replica, self.centre.channel):
                count += 1
        return count

    def step(self, rank: int, gradient: float) -> tuple[float, int, int, int]:
        """(its number afterwards, round, heard, staleness)."""
        replica = self.bound_replicas[rank].replica
        exchange = replica.follow(torch.tensor([gradient], dtype=torch.float64))
        return (self.value(rank), *exchange)

    def value(self, rank: int = -1) -> float:
        """A member's number; the centre's if not said otherwise."""
        return float(self.bound_replicas[rank].replica.params.item())

    def drain(self, rank: int, number: int, deadline_seconds: float = 0.1) -> bool:
        bound = self.bound_replicas[rank]
        with torch.no_grad():
            return bound.strategy.drain(bound.replica, bound.channel, number, deadline_seconds)
