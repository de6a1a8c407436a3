"""The scripted fabric with mail: what was sent is delivered when the test says so."""

from __future__ import annotations

from collections import defaultdict, deque

import torch

from laws.problems import Point
from murmurate.fabric.interface import Capability, Message
from murmurate.replicator.replicator import Replicator
from murmurate.strategies.interface import Strategy
from strategies.scripted import Script, ScriptedMember


class MailScript(Script):
    """``capacity`` messages a stream; ``on_the_way`` (sender, receiver) keeps those pairs' messages back."""

    def __init__(self, size: int, capacity: int = 64) -> None:
        super().__init__(size)
        self.capacity = capacity
        self.queues: dict[tuple[int, int, str], deque[Message]] = defaultdict(deque)
        self.on_the_way: set[tuple[int, int]] = set()
        self.sent: list[tuple[int, int, float]] = []  # (sender, receiver, note)

    def member(self, rank: int) -> MailMember:
        return MailMember(self, rank)


class MailMember(ScriptedMember):
    """Register and mail; messages come by ascending rank of their senders. A wait finds what is there."""

    capabilities = frozenset({Capability.REGISTER, Capability.MAIL})
    script: MailScript

    def send(self, to, tag, x, note=0.0, deadline_seconds=None) -> bool:
        queue = self.script.queues[self.rank, to, tag]
        if to in self.script.dead or len(queue) >= self.script.capacity:
            return False
        self.script.sent.append((self.rank, to, note))
        queue.append(Message(self.rank, x.detach().clone(), note))
        return True

    def receive(self, tag):
        for sender in range(self.size):
            queue = self.script.queues[sender, self.rank, tag]
            if queue and (sender, self.rank) not in self.script.on_the_way:
                return queue.popleft()
        return None

    def wait(self, tag, deadline_seconds):
        return self.receive(tag)


class MailCast:
    """One member a rank, at the numbers ``starts``; see ``scripted.Cast``."""

    def __init__(self, strategy: Strategy, starts: list[float], capacity: int = 64, seeds=None) -> None:
        self.script = MailScript(len(starts), capacity)
        self.replicas, self.bound_replicas = [], []
        for rank, start in enumerate(starts):
            replicator = Replicator(strategy, self.script.member(rank))
            self.replicas.append(
                replicator.replicate("x", Point(start), lambda p: torch.optim.SGD(p, lr=1.0))
            )
            self.bound_replicas.append(replicator.bound_replicas["x"])

    def step(self, rank: int, by: float) -> tuple[float, int, int, int]:
        """(its number afterwards, round, heard, staleness)."""
        exchange = self.replicas[rank].follow(torch.tensor([-by], dtype=torch.float64))
        return (self.replicas[rank].params.item(), *exchange)

    def draws(self, rank: int, *peers: int) -> None:
        """Script whom ``rank`` draws from now on."""
        rest = iter(peers)
        self.bound_replicas[rank].strategy.draw = lambda own, living, turn: next(rest)
