"""Hogwild's own parts by hand: one vector for all, counts that only grow."""

from __future__ import annotations

import torch

from laws.problems import Point
from murmurate.fabric.simulated.fabric import SimulatedFabric
from murmurate.replicator.replicator import Replicator
from murmurate.strategies.hogwild import Hogwild


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.5)


def test_two_members_by_hand():
    """Turns 0, 1, 1, 0: the number, round, heard and staleness after each."""

    def member(fabric):
        replica = Replicator(Hogwild(), fabric).replicate("x", Point(10.0), sgd)
        barrier = fabric.channel("turns", torch.zeros(1))
        lines = []
        for turn, by in ((0, 2.0), (1, 4.0), (1, 1.0), (0, 3.0)):
            if turn == fabric.rank:
                exchange = replica.follow(torch.tensor([by], dtype=torch.float64))
                lines.append((replica.params.item(), *exchange))
            barrier.gather(torch.zeros(1))
        return lines

    first, second = SimulatedFabric(2, seed=0).run([member] * 2)
    assert first == [(9.0, 1, 2, 0), (5.0, 2, 2, 2)]
    assert second == [(7.0, 1, 2, 1), (6.5, 2, 2, 0)]


def on_turns(fabric):
    """(replica, its strategy, a channel on which members take turns)."""
    replicator = Replicator(Hogwild(), fabric)
    replica = replicator.replicate("x", Point(0.0), sgd)
    return replica, replicator.bound_replicas["x"].strategy, fabric.channel("turns", torch.zeros(1))


def test_a_late_load_does_not_turn_back_what_others_have_counted_since():
    def member(fabric):
        replica, strategy, barrier = on_turns(fabric)
        saved = {"clocks": torch.tensor([5, 7])}
        if fabric.rank == 0:
            strategy.load(saved)
            replica.clock = 5
            replica.follow(torch.zeros(1, dtype=torch.float64))
        barrier.gather(torch.zeros(1))
        if fabric.rank == 1:
            strategy.load(saved)
        barrier.gather(torch.zeros(1))
        return replica.steps_taken(), strategy.state()["clocks"].tolist()

    assert SimulatedFabric(2, seed=0).run([member] * 2) == [(13, [6, 7])] * 2


def test_clocks_of_parts_saved_at_different_moments_only_grow():
    """Rank 0 saved when rank 1 had made 100 updates, and rank 1 itself after 90."""

    def member(fabric):
        replica, strategy, barrier = on_turns(fabric)
        strategy.load({"clocks": torch.tensor([100, 100 - 10 * fabric.rank])})
        replica.clock = 100 - 10 * fabric.rank
        barrier.gather(torch.zeros(1))
        seen = []
        for turn in (0, 1, 0):
            if fabric.rank == turn:
                staleness = replica.follow(torch.zeros(1, dtype=torch.float64)).staleness
                seen.append((staleness, replica.steps_taken()))
            barrier.gather(torch.zeros(1))
        return seen

    assert SimulatedFabric(2, seed=0).run([member] * 2) == [[(0, 201), (0, 202)], [(1, 201)]]


def test_state_is_a_copy():
    def member(fabric):
        replicator = Replicator(Hogwild(), fabric)
        replica = replicator.replicate("x", Point(0.0), sgd)
        kept = replicator.bound_replicas["x"].strategy.state()
        replica.follow(torch.zeros(1, dtype=torch.float64))
        return kept["clocks"].tolist()

    assert SimulatedFabric(1, seed=0).run([member]) == [[0]]
