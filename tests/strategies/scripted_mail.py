"""The scripted fabric with mail: what was sent is delivered when the test says so."""

from __future__ import annotations

from collections import defaultdict

from murmurate.fabric.interface import Capability, Message
from murmurate.strategies.interface import Strategy
from strategies.scripted import Cast, Script, ScriptedMember


class MailScript(Script):
    """``capacity`` messages a stream; ``on_the_way`` (sender, receiver) keeps those pairs' messages back."""

    def __init__(self, size: int, capacity: int = 64) -> None:
        super().__init__(size)
        self.capacity = capacity
        # by receiver and tag, in the order of sending
        self.queues: dict[tuple[int, str], list[Message]] = defaultdict(list)
        self.on_the_way: set[tuple[int, int]] = set()
        self.sent: list[tuple[int, int, float]] = []  # (sender, receiver, note)

    def member(self, rank: int) -> MailMember:
        return MailMember(self, rank)


class MailMember(ScriptedMember):
    """Register and mail; messages come in the order in which they were sent. A wait finds what is there."""

    capabilities = frozenset({Capability.REGISTER, Capability.MAIL})
    script: MailScript

    def send(self, to, tag, x, note=0.0, deadline_seconds=None) -> bool:
        queue = self.script.queues[to, tag]
        waiting = sum(message.sender == self.rank for message in queue)
        if to in self.script.dead or waiting >= self.script.capacity:
            return False
        self.script.sent.append((self.rank, to, note))
        queue.append(Message(self.rank, x.detach().clone(), note))
        return True

    def receive(self, tag):
        queue = self.script.queues[self.rank, tag]
        for position, message in enumerate(queue):
            if (message.sender, self.rank) not in self.script.on_the_way:
                return queue.pop(position)
        return None

    def wait(self, tag, deadline_seconds):
        return self.receive(tag)


class MailCast(Cast):
    """A cast whose messages, at most ``capacity`` a stream, are delivered when the test says so."""

    def __init__(self, strategy: Strategy, starts: list[float], capacity: int = 64) -> None:
        super().__init__(strategy, starts, MailScript(len(starts), capacity))

    def draws(self, rank: int, *peers: int) -> None:
        """Script whom ``rank`` draws from now on."""
        rest = iter(peers)
        self.bound_replicas[rank].strategy.draw = lambda own, living, turn: next(rest)
