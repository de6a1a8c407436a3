"""A part of the laws on real processes: the same bits, and nothing lost, where nobody passes a scheduler."""

from __future__ import annotations

import functools
import os
import signal

import pytest
import torch

from laws.problems import Point, Problem, same, slope
from murmurate.fabric.processes.fabric import Died, run_members
from murmurate.fabric.simulated.fabric import SimulatedFabric
from murmurate.replica.vector import Replica
from murmurate.replicator.replicator import Replicator
from murmurate.strategies.all_reduce import AllReduce
from murmurate.strategies.gala import GALA
from murmurate.strategies.hogwild import Hogwild
from murmurate.strategies.local_sgd import LocalSGD
from waiting import until

UPDATES = 8
FULL = Problem(optimizer="adam", float32=True, clip=0.3, scheduled=True, grouped=True)
LOW = Problem(optimizer="rmsprop", bfloat16=True, clip=0.3)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.125)


def each(strategies, problem, fabric):
    """What this member becomes under each strategy, one run after the other on channels of their own."""
    results = []
    for number, strategy in enumerate(strategies):
        results.append(problem.learn(strategy, UPDATES, Renamed(fabric, f"{number}")))
    return results


class Renamed:
    """A fabric whose channels have names of their own, so that one process serves several runs."""

    def __init__(self, fabric, prefix):
        self._fabric, self._prefix = fabric, prefix

    def channel(self, name, like):
        return self._fabric.channel(f"{self._prefix}.{name}", like)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._fabric, name)


@pytest.mark.parametrize("problem", [FULL, LOW])
def test_alone_in_a_process_each_strategy_is_solo_to_the_bit(problem):
    strategies = [AllReduce(), LocalSGD(period=3), Hogwild(), GALA(staleness_bound=2)]
    (found,) = run_members(1, [functools.partial(each, strategies, problem)])
    expected = problem.alone(UPDATES)
    for result in found:
        assert same(result.path, expected.path)
        assert same(result.state, expected.state)


SYNCHRONOUS = [
    AllReduce(),
    LocalSGD(period=3),
    LocalSGD(period=2, outer_learning_rate=0.7, outer_momentum=0.9, outer_nesterov=True),
]


def test_synchronous_strategies_give_the_same_bits_twice():
    role = functools.partial(each, SYNCHRONOUS, FULL)
    first, second = run_members(3, [role] * 3), run_members(3, [role] * 3)
    for one, other in zip(first, second, strict=True):
        for a, b in zip(one, other, strict=True):
            assert same(a.path, b.path)
            assert same(a.state, b.state)
            assert same(a.exchanges, b.exchanges)


def test_all_reduce_is_one_replica_on_the_joined_batch():
    problem = Problem(optimizer="adam", clip=0.3)
    whole = problem.alone(UPDATES, range(3))
    for found in run_members(3, [functools.partial(problem.learn, AllReduce(), UPDATES)] * 3):
        torch.testing.assert_close(found.params, whole.params, rtol=1e-12, atol=1e-12)


def hogwild_in_turns(fabric):
    """Turn by turn: rank 0's update, rank 1's, ..., each seen by the next."""
    replicator = Replicator(Hogwild(), fabric)
    replica = replicator.replicate("model", FULL.net(fabric.rank), adam, **FULL.options())
    barrier = fabric.channel("turns", torch.zeros(1))
    for step in range(4):
        for rank in range(fabric.size):
            if rank == fabric.rank:
                replica.follow(gradient(rank, step, len(replica)))
            barrier.gather(torch.zeros(1))
    return replica.state(), replica.steps_taken()


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.02)


def gradient(rank, step, length):
    return torch.randn(length, generator=torch.Generator().manual_seed(100 * step + rank))


def test_hogwild_in_turns_is_one_replica_on_all_gradients():
    oracle = Replica("model", FULL.net(), adam, **FULL.options())
    for step in range(4):
        for rank in range(3):
            oracle.follow(gradient(rank, step, len(oracle)))
    expected = oracle.state()
    for state, steps in run_members(3, [hogwild_in_turns] * 3):
        assert steps == 12
        assert same(state["params"], expected["params"])
        assert same(state["optimizer"], expected["optimizer"])


def hogwild_racing(fabric):
    replicator = Replicator(Hogwild(), fabric)
    replica = replicator.replicate("x", Point(0.0, 0.0), sgd)
    channel = replicator.bound_replicas["x"].channel
    for _ in range(300):
        replica.follow(torch.ones(2, dtype=torch.float64))
    channel.gather(torch.zeros(2, dtype=torch.float64))
    return replica.steps_taken(), replica.params.detach().clone()


def test_hogwild_racing_loses_no_count_and_shares_one_vector():
    (steps, x), *others = run_members(3, [hogwild_racing] * 3)
    assert steps == 900
    assert -0.125 * 900 <= float(x[0]) <= -0.125 * 300
    assert all(n == 900 and torch.equal(x, y) for n, y in others)


def gossip(fabric):
    """Step until all have made 60 updates, so that whoever is slow always has living peers to hear."""
    strategy = GALA(staleness_bound=10, deadline_seconds=0.5)
    replica = Replicator(strategy, fabric).replicate("x", Point(1.0, -1.0, 0.0), sgd)
    done = fabric.channel("done", torch.zeros(1)).shared("done", torch.zeros(fabric.size))
    exchanges = []
    while float(done.min()) < 60:
        exchanges.append(replica.follow(slope(fabric.rank, len(exchanges), replica.params.detach())))
        done[fabric.rank] = len(exchanges)
    return exchanges, replica.params.detach().clone()


def test_gala_members_meet_without_a_baton():
    for exchanges, x in run_members(3, [gossip] * 3):
        assert exchanges[-1].round >= 3  # whoever is ahead waits after ten updates
        stale, rounds = 0, 0
        for exchange in exchanges:
            met = exchange.round > rounds
            stale, rounds = (0 if met else stale + 1), rounds + met
            assert tuple(exchange) == (rounds, 1 + met, stale)
        assert bool(torch.isfinite(x).all())


def die(strategy, fabric):
    """Rank 1 is killed within its third step; the others finish theirs."""
    replicator = Replicator(strategy, fabric)
    replica = replicator.replicate("x", Point(1.0, -1.0, 0.0), sgd)
    update, exchanges = replica.update, []

    def deadly():
        if fabric.rank == 1 and len(exchanges) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        update()

    replica.update = deadly
    for step in range(30):
        exchanges.append(replica.follow(slope(fabric.rank, step, replica.params.detach())))
        if fabric.rank != 1 and step == 4:
            until(lambda: 1 not in fabric.living(), "the news of rank 1's death")
    return exchanges, replica.params.detach().clone()


@pytest.mark.parametrize(
    "strategy", [AllReduce(), LocalSGD(period=2), Hogwild(), GALA()], ids=lambda s: s.name
)
def test_a_killed_member_delays_no_member(strategy):
    one, dead, two = run_members(3, [functools.partial(die, strategy)] * 3)
    assert dead == Died(1, -signal.SIGKILL)
    for exchanges, x in (one, two):
        assert len(exchanges) == 30
        assert max(e.heard for e in exchanges[-2:]) == 2 or strategy.name == "gala"  # who waits for nobody
        assert bool(torch.isfinite(x).all())
    if strategy.synchronous:
        assert torch.equal(one[1], two[1])


def test_real_processes_and_simulated_ones_give_the_same_bits_where_members_meet():
    """Two members: a sum of two is rounded alike in every order."""
    role = functools.partial(each, SYNCHRONOUS, FULL)
    real, simulated = run_members(2, [role] * 2), SimulatedFabric(2, seed=0).run([role] * 2)
    for one, other in zip(real, simulated, strict=True):
        assert all(same(a.path, b.path) for a, b in zip(one, other, strict=True))


# -- members as functions -----------------------------------------------------------------------------


def share_and_die(fabric):
    """Rank 0 shares "early" and dies before it shares "late"; rank 1 asks only when it knows."""
    channel = fabric.channel("x", torch.zeros(2))
    mine = torch.full((2,), 1.0 + fabric.rank)
    if fabric.rank == 0:
        channel.shared("early", mine)
        os.kill(os.getpid(), signal.SIGKILL)
    until(lambda: 0 not in fabric.living(), "the news of rank 0's death")
    return channel.shared("early", mine).clone(), channel.shared("late", mine).clone()


def test_what_a_dead_member_shared_stays_and_what_it_did_not_the_next_shares():
    dead, (early, late) = run_members(2, [share_and_die] * 2)
    assert dead == Died(0, -signal.SIGKILL)
    assert early.tolist() == [1.0, 1.0]
    assert late.tolist() == [2.0, 2.0]


def give_back_a_function(fabric):
    return lambda: fabric


def test_a_result_that_cannot_be_pickled_is_an_error():
    with pytest.raises(RuntimeError, match="rank 0: its result cannot be sent back"):
        run_members(1, [give_back_a_function])
    with pytest.raises(ValueError, match="1 functions for 2 members"):
        run_members(2, [give_back_a_function])
