"""A ledger of push-sum: every share sent and received, every optimizer's step, and what all of it sums to.

Members of a simulated fabric run one at a time, so between two fabric calls the ledger is whole.
"""

from __future__ import annotations

import functools
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from laws.problems import Point, slope
from murmurate.fabric.simulated.fabric import MailFaults, SimulatedFabric
from murmurate.replicator.replicator import Replicator
from murmurate.strategies.push_sum import PushSum

DIMENSION = 3


def share(x, w) -> np.ndarray:
    """(x, w) as one row [d + 1]."""
    return np.append(x.detach().numpy().copy(), w)


@dataclass
class Ledger:
    """What all members have, what travels, and what steps of optimizers have added to the sum so far."""

    size: int
    strategies: dict[int, PushSum] = field(default_factory=dict)
    flying: dict[tuple[int, int], deque] = field(default_factory=lambda: defaultdict(deque))
    put_in: np.ndarray = field(default_factory=lambda: np.zeros(DIMENSION + 1))
    dead: dict[int, np.ndarray] = field(default_factory=dict)  # what each had when last seen
    largest_error: float = 0.0
    checks: int = 0
    told: list[tuple[int, str, int]] = field(default_factory=list)  # (member, kind, of whom)

    def has(self, rank: int) -> np.ndarray:
        strategy = self.strategies[rank]
        return share(strategy._sum, strategy._weight)

    def total(self, without: tuple[int, ...] = ()) -> np.ndarray:
        """The sums over replicas plus messages in flight, but for what ``without`` have or are sent."""
        rows = [self.has(rank) for rank in self.strategies if rank not in without]
        rows += [x for (_, to), queue in self.flying.items() if to not in without for x in queue]
        return np.sum(rows, axis=0)

    def lost_with(self, rank: int) -> np.ndarray:
        """What a dead member had, and what will never reach it."""
        rows = [x for (_, to), queue in self.flying.items() if to == rank for x in queue]
        return np.sum([self.has(rank), *rows], axis=0)

    def check(self) -> None:
        if len(self.strategies) == self.size:
            error = np.abs(self.total() - self.put_in).max()
            self.largest_error = max(self.largest_error, float(error))
            self.checks += 1


class Weighed:
    """A channel that enters each share into the ledger: once if it was taken, once when it comes."""

    def __init__(self, channel, ledger: Ledger) -> None:
        self._channel, self._ledger = channel, ledger

    def send(self, to, tag, x, note=0.0, deadline_seconds=None):
        sent = self._channel.send(to, tag, x, note, deadline_seconds)
        if sent and note >= 0:
            self._ledger.flying[self._channel.rank, to].append(share(x, note))
        return sent

    def receive(self, tag):
        return self._take(self._channel.receive(tag))

    def wait(self, tag, deadline_seconds):
        return self._take(self._channel.wait(tag, deadline_seconds))

    def _take(self, message):
        if message is not None and message.note >= 0:
            due = self._ledger.flying[message.sender, self._channel.rank].popleft()
            np.testing.assert_array_equal(share(message.x, message.note), due)  # each once, in order
        return message

    def __getattr__(self, name):
        return getattr(self._channel, name)


def weighed(strategy: PushSum, own_fabric, ledger: Ledger, start: np.ndarray, make_optimizer):
    """(replicator, replica) of one member that starts at ``start`` [d] and enters all into ``ledger``."""
    replicator = Replicator(strategy, own_fabric)
    replica = replicator.replicate("x", Point(*[0.0] * DIMENSION), make_optimizer)
    bound = replicator.bound_replicas["x"]
    replica.params.data.copy_(torch.from_numpy(start))
    bound.strategy.attach(replica, bound.channel)
    bound.channel = Weighed(bound.channel, ledger)
    ledger.strategies[own_fabric.rank] = bound.strategy
    ledger.put_in = ledger.put_in + ledger.has(own_fabric.rank)
    on_member, update = bound.strategy.on_member, replica.update

    def told(event):
        ledger.told.append((own_fabric.rank, event.kind, event.rank))
        on_member(event)

    def entered():
        before = replica.params.detach().clone()
        update()
        ledger.put_in = ledger.put_in + share(replica.params.detach() - before, 0.0)

    bound.strategy.on_member, replica.update = told, entered
    return replicator, replica


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05)


@dataclass(frozen=True)
class Shares:
    """A push-sum run on the simulated fabric, its ledger checked after every step of every member."""

    size: int = 4
    updates: int = 10
    topology: str = "exponential"
    make_optimizer: Callable = sgd
    still: bool = False  # gradients of zero
    haste: float = 1e-4
    faults: MailFaults = field(
        default_factory=lambda: MailFaults(loss=0.2, duplication=0.2, reordering=0.3, resend_seconds=2e-4)
    )

    def starts(self, seed: int) -> np.ndarray:
        return np.random.default_rng([seed, 5]).normal(size=(self.size, DIMENSION))

    def gradient(self, rank, step, replica):
        if self.still:
            return torch.zeros(DIMENSION, dtype=torch.float64)
        return slope(rank, step, replica.params.detach())

    def member(self, seed: int, ledger: Ledger, own_fabric):
        strategy = PushSum(topology=self.topology)
        start = self.starts(seed)[own_fabric.rank]
        _, replica = weighed(strategy, own_fabric, ledger, start, self.make_optimizer)
        pace = np.random.default_rng([seed, own_fabric.rank])
        exchanges = []
        for step in range(self.updates):
            own_fabric.compute(pace.uniform(0, self.haste))
            exchanges.append(replica.follow(self.gradient(own_fabric.rank, step, replica)))
            ledger.check()
        return exchanges, replica.params.detach().numpy().copy()

    def on(self, fabric: SimulatedFabric, seed: int):
        """(ledger, results by rank)."""
        ledger = Ledger(self.size)
        return ledger, fabric.run([functools.partial(self.member, seed, ledger)] * self.size)

    def run(self, seed: int, **faults):
        """(fabric, ledger, results by rank)."""
        fabric = SimulatedFabric(
            self.size, seed=seed, latency=(0.0, 2e-4), mail_faults=self.faults, mail_capacity=3, **faults
        )
        return fabric, *self.on(fabric, seed)
