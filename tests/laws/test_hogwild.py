"""Hogwild: one vector, one set of moments, one count of steps; in turns it is solo on all gradients.

On the simulated fabric nobody runs during another's update, so each schedule is one order of updates:
replayed by a bare Replica it must come to the same bits.
"""

from __future__ import annotations

import functools

import pytest
import torch

from laws.problems import OPTIMIZERS, Point, Problem, same, slope
from murmurate.fabric.simulated.fabric import SimulatedFabric
from murmurate.replica.vector import Replica
from murmurate.replicator.replicator import Replicator
from murmurate.strategies.hogwild import Hogwild

UPDATES = 6
SHARED = [name for name in OPTIMIZERS if name != "dampened"]


def noted(problem, strategy, own_fabric):
    """Learn, and put into the log each gradient as it enters an update, and the step count it sees."""
    replicator = Replicator(strategy, own_fabric)
    replica = replicator.replicate(
        "model", problem.net(own_fabric.rank), OPTIMIZERS[problem.optimizer], **problem.options()
    )
    update = replica.update

    def noted_update():
        own_fabric.note("update", (replica.grad.clone(), replica.steps_taken()))
        update()

    replica.update = noted_update
    result = problem._run(replica, UPDATES, (own_fabric.rank,))
    fabric = replicator.bound_replicas["model"].channel
    fabric.mean_(torch.zeros(len(replica), dtype=replica.params.dtype))  # all have made their last update
    result.state = replica.state()
    result.strategy = replicator.bound_replicas["model"].strategy.state()
    return result


@pytest.mark.parametrize("optimizer", SHARED)
def test_in_turns_it_is_one_replica_on_all_gradients_in_that_order(optimizer):
    problem = Problem(optimizer=optimizer, clip=0.3, scheduled=True, grouped=True, float32=True)
    orders = set()
    for seed in range(6):
        fabric = SimulatedFabric(3, seed=seed)
        found = fabric.run([functools.partial(noted, problem, Hogwild())] * 3)
        updates = [(e.rank, *e.detail) for e in fabric.log if e.kind == "update"]
        orders.add(tuple(rank for rank, *_ in updates))
        oracle = Replica("model", problem.net(), OPTIMIZERS[optimizer], **problem.options())
        for count, (_, gradient, steps) in enumerate(updates):
            assert steps == count
            oracle.follow(gradient)
        expected = oracle.state()
        for result in found:
            assert torch.equal(result.strategy["clocks"], torch.full((3,), UPDATES))
            assert same(result.state["params"], expected["params"])
            assert same(result.state["optimizer"], expected["optimizer"])
    assert len(orders) == 6


@pytest.mark.parametrize("seed", range(50))
def test_no_update_is_lost_and_no_count(seed):
    """Constant gradients of whole numbers at a rate of 1/8: every sum is exact, in any order."""
    starts = torch.tensor([3.0, -2.0, 0.5], dtype=torch.float64)
    gradients = [torch.tensor([1.0 + r, -2.0 * r, 5.0], dtype=torch.float64) for r in range(4)]

    def member(own_fabric):
        replica = Replicator(Hogwild(), own_fabric).replicate(
            "x", Point(*starts.tolist()), lambda p: torch.optim.SGD(p, lr=0.125)
        )
        staleness = []
        for _ in range(UPDATES + own_fabric.rank):
            staleness.append(replica.follow(gradients[own_fabric.rank]).staleness)
        return replica.params, staleness, replica.steps_taken

    found = SimulatedFabric(4, seed=seed).run([member] * 4)
    counts = [UPDATES + rank for rank in range(4)]
    moved = sum(count * g for count, g in zip(counts, gradients, strict=True))
    for params, _, steps_taken in found:
        assert torch.equal(params.detach(), starts - 0.125 * moved)
        assert steps_taken() == sum(counts)
    # what one member finds new is what the others did: each sees at most all of it, and somebody sees some
    seen = [sum(staleness) for _, staleness, _ in found]
    assert all(s <= sum(counts) - count for s, count in zip(seen, counts, strict=True))
    assert sum(seen) > 0


def test_staleness_counts_what_others_did_since_the_own_last_step():
    """From the log: who updated between a member's two steps."""

    def member(own_fabric):
        replica = Replicator(Hogwild(), own_fabric).replicate(
            "x", Point(0.0, 1.0), lambda p: torch.optim.SGD(p, lr=0.1)
        )
        for step in range(UPDATES):
            exchange = replica.follow(slope(own_fabric.rank, step, replica.params.detach()))
            own_fabric.note("stepped", exchange)

    fabric = SimulatedFabric(3, seed=5)
    fabric.run([member] * 3)
    at = dict.fromkeys(range(3), 0)
    values = set()
    steps = [e for e in fabric.log if e.kind == "stepped"]
    for place, event in enumerate(steps):
        between = sum(e.rank != event.rank for e in steps[at[event.rank] : place])
        # a member may be held up between its update and its note, so the note can be late by one a peer
        assert abs(event.detail.staleness - between) <= 2
        at[event.rank] = place
        values.add(event.detail.staleness)
    assert len(values) > 1


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("optimizer", ["momentum", "rmsprop", "adam"])
def test_moments_are_one_in_shared_memory_or_one_each(optimizer, shared):
    """A momentum that rank 0 builds up moves rank 1, which has no gradient at all; or it does not."""

    def member(own_fabric):
        replicator = Replicator(Hogwild(shared_moments=shared), own_fabric)
        replica = replicator.replicate("x", Point(0.0, 0.0), OPTIMIZERS[optimizer])
        fabric = replicator.bound_replicas["x"].channel
        wait = functools.partial(fabric.gather, torch.zeros(2, dtype=torch.float64))
        if own_fabric.rank == 0:
            for _ in range(5):
                replica.follow(torch.tensor([1.0, -2.0], dtype=torch.float64))
        wait()
        moments = [v.clone() for s in replica.optimizer.state.values() for v in s.values()]
        wait()
        if own_fabric.rank == 0:
            for s in replica.optimizer.state.values():
                for value in s.values():
                    value.fill_(0.25)
        wait()
        after = [v.clone() for s in replica.optimizer.state.values() for v in s.values()]
        return replica.params.detach().clone(), moments, after

    (x, moments, after), (y, other, other_after) = SimulatedFabric(2, seed=0).run([member] * 2)
    assert torch.equal(x, y)
    assert float(x[1]) > 0
    if shared:
        assert same(moments, other)
        assert all(torch.equal(m, torch.full_like(m, 0.25)) for m in other_after)
    else:
        assert all(float(m.abs().sum()) == 0.0 for m in other_after)
        assert all(float(m.abs().sum()) > 0.0 for m in after)


def test_gradients_are_private():
    def member(own_fabric):
        replica = Replicator(Hogwild(), own_fabric).replicate(
            "x", Point(0.0, 0.0), lambda p: torch.optim.SGD(p, lr=0.1)
        )
        replica.follow(torch.full((2,), 1.0 + own_fabric.rank, dtype=torch.float64))
        return replica

    one, other = SimulatedFabric(2, seed=0).run([member] * 2)
    assert one.params.data_ptr() == other.params.data_ptr()
    assert one.grad.tolist() == [1.0, 1.0]
    assert other.grad.tolist() == [2.0, 2.0]


def test_the_schedule_follows_all_replicas_steps():
    def member(own_fabric):
        replica = Replicator(Hogwild(), own_fabric).replicate(
            "x", Point(0.0), lambda p: torch.optim.SGD(p, lr=1.0), schedule=lambda k: 2.0**-k
        )
        for _ in range(4):
            replica.follow(torch.tensor([1.0], dtype=torch.float64))
        return replica.params

    x, y = SimulatedFabric(2, seed=3).run([member] * 2)
    assert x.item() == y.item() == -sum(2.0**-k for k in range(8))


def test_a_first_step_that_cannot_be_shared_is_refused_with_the_remedy():
    def member(own_fabric, strategy):
        Replicator(strategy, own_fabric).replicate("x", Point(0.0), OPTIMIZERS["dampened"])

    with pytest.raises(ValueError, match="shared_moments=False"):
        SimulatedFabric(1, seed=0).run([functools.partial(member, strategy=Hogwild())])
    SimulatedFabric(1, seed=0).run([functools.partial(member, strategy=Hogwild(shared_moments=False))])


def test_a_crash_leaves_the_others_going_on():
    problem = Problem(optimizer="rmsprop")
    for call in (6, 8, 11):
        fabric = SimulatedFabric(3, seed=call, crashes={1: call})
        one, dead, two = fabric.run([functools.partial(problem.learn, Hogwild(), UPDATES)] * 3)
        assert isinstance(dead, BaseException)
        assert one.exchanges[-1].heard == 2
        assert len(one.path) == len(two.path) == UPDATES
