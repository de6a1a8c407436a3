"""Parts that die, are stopped, or make other calls than the others, and how long one is waited for."""

from __future__ import annotations

import itertools

import pytest
import torch

from murmurate.bench._spatial_layers import in_parts
from murmurate.fabric.awake import AwakeClock
from murmurate.fabric.interface import FabricError
from murmurate.fabric.simulated.fabric import SimulatedFabric
from murmurate.replica.vector import Exchange, Replica
from murmurate.spatial import PartLost, Parts


def test_parts_that_make_other_calls_are_told_apart():
    def differ(parts):
        parts.sum(torch.zeros(3 + parts.rank))

    with pytest.raises(FabricError, match="all parts must run the same layers"):
        in_parts((2, 1), differ)


def test_a_dead_part_is_named():
    fabric = SimulatedFabric(4, 0, crashes={3: 5}, coroutines="threads")

    def train(member):
        parts = Parts.open(member, (2, 1))
        try:
            for _ in range(50):
                parts.sum(torch.ones(2))
        except PartLost as lost:
            return str(lost)
        return parts.replica

    results = fabric.run([train] * 4)

    assert results[:2] == [0, 0]
    assert "part 1 of replica 1 died" in results[2]


def test_a_part_that_takes_no_message_is_named():
    fabric = SimulatedFabric(2, 0, mail_capacity=1, coroutines="threads")

    def send(member):
        parts = Parts.open(member, (2, 1), deadline_seconds=0.0)
        if parts.rank == 0:
            parts.receive(parts.send([(1, torch.ones(1))] * 3), [])

    with pytest.raises(FabricError, match="part 0 of replica 0 waited 0 s for part 1"):
        fabric.run([send] * 2)


def test_no_deadline_comes_nearer_while_a_part_itself_is_stopped(monkeypatch):
    hours = itertools.count(0.0, 3600.0)  # each time that a part looks at the clock, an hour has passed
    monkeypatch.setattr("murmurate.spatial.parts.AwakeClock", lambda: AwakeClock(lambda: next(hours)))
    fabric = SimulatedFabric(2, 0, coroutines="threads")

    def gather(member):
        parts = Parts.open(member, (2, 1))
        if parts.rank == 1:
            member.compute(10.0)
        return len(parts.gather(torch.ones(1)))

    assert fabric.run([gather] * 2) == [2, 2]


def test_parts_wait_for_as_long_as_their_leader_waits_for_other_replicas():
    fabric = SimulatedFabric(2, 0, coroutines="threads")

    def update(member):
        parts = Parts.open(member, (2, 1), deadline_seconds=0.0)
        replica = Replica("net", torch.nn.Linear(1, 1), lambda p: torch.optim.SGD(p, lr=1.0))
        vector = parts.share(replica)

        def step(replica):
            member.compute(1000.0)
            replica.update()
            return Exchange(1, 2, 3)

        return vector.exchange(replica, step)

    assert fabric.run([update] * 2) == [Exchange(1, 2, 3)] * 2
