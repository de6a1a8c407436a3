"""Pull, push, synchronous gossip, push-sum and GALA under the laws that hold for all of them."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

from laws.mass import Shares
from laws.problems import Point, Problem, same, slope
from laws.test_solo import UPDATES, alone, solo, variant, words
from murmurate.fabric.simulated.fabric import Crashed, MailFaults, Partition, SimulatedFabric
from murmurate.replicator.replicator import Replicator
from murmurate.strategies.gala import GALA
from murmurate.strategies.pull_gossip import PullGossip
from murmurate.strategies.push_gossip import PushGossip
from murmurate.strategies.push_sum import PushSum
from murmurate.strategies.synchronous_gossip import SynchronousGossip

ALONE = [
    PullGossip(),
    PullGossip(mixing=0.3, stale=True, with_self=True),
    PullGossip(period=4),
    PushGossip(),
    PushGossip(mixing=0.3, stale=True, with_self=True),
    SynchronousGossip(),
    SynchronousGossip("push", stale=True, with_self=True, period=2),
    SynchronousGossip(topology="ring"),
    PushSum(),
    PushSum(topology="complete", least_weight=0.1),
    PushSum(topology="random-matching"),
]


# -- one replica is solo ----------------------------------------------------------------------------


@pytest.mark.parametrize(("strategy", "name", "optimizer"), alone(ALONE))
def test_bit_for_bit(strategy, name, optimizer):
    expected = solo(name, optimizer)
    (found,) = SimulatedFabric(1, seed=3).run(
        [functools.partial(variant(name, optimizer).learn, strategy, UPDATES)]
    )
    assert same(found.path, expected.path)
    assert same(found.state, expected.state)


@pytest.mark.parametrize("strategy", ALONE, ids=words)
def test_alone_it_is_always_in_agreement_with_itself(strategy):
    (found,) = SimulatedFabric(1, seed=0).run([functools.partial(Problem().learn, strategy, UPDATES)])
    period = 1 if isinstance(strategy, PushSum) else strategy.period
    assert [e.round for e in found.exchanges] == [k // period for k in range(1, UPDATES + 1)]
    assert [e.staleness for e in found.exchanges] == [k % period for k in range(1, UPDATES + 1)]
    assert all(e.heard == 1 for e in found.exchanges)


# -- mixing alone -----------------------------------------------------------------------------------


def mixing_alone(strategy, starts, rounds, member):
    """[rounds, d]: zero gradients, in common rounds: nobody goes on before all have stepped."""
    replicator = Replicator(strategy, member)
    replica = replicator.replicate("x", Point(*[0.0] * starts.shape[1]), lambda p: torch.optim.SGD(p, lr=1.0))
    replica.params.data.copy_(torch.from_numpy(starts[member.rank]))
    path = []
    for _ in range(rounds):
        replica.follow(torch.zeros(len(replica), dtype=torch.float64))
        path.append(replica.params.detach().numpy().copy())
    return path


def round_matrix(drawn, direction, mixing):
    """[n, n] of one synchronous round; Algorithm 5 and eq. 3.22, or Algorithm 6."""
    size = len(drawn)
    matrix = np.eye(size)
    for i, j in enumerate(drawn):
        if direction == "pull":
            matrix[i, i] -= mixing or 0.5
            matrix[i, j] += mixing or 0.5
        elif i != j and mixing is None:
            matrix[j, i] += 1.0
        elif i != j:
            matrix[j] = (1 - mixing) * matrix[j] + mixing * np.eye(size)[i]
    return matrix / matrix.sum(axis=1, keepdims=True)


@pytest.mark.parametrize("strategy", [
    SynchronousGossip(),
    SynchronousGossip(mixing=0.2, with_self=True, seed=5),
    SynchronousGossip("push", seed=1),
    SynchronousGossip("push", with_self=True, stale=True),
    SynchronousGossip("push", mixing=0.3),
    SynchronousGossip(topology="ring"),
    SynchronousGossip(topology="random-matching", mixing=0.4),
    SynchronousGossip("push", topology="exponential", with_self=True),
    SynchronousGossip("push", topology="one-peer-exponential"),
], ids=words)  # fmt: skip
@pytest.mark.parametrize("size", [2, 3, 5])
def test_synchronous_rounds_are_the_products_of_their_matrices(strategy, size):
    """And from what the first round contracts least, exactly that is left."""
    matrices = [
        round_matrix(strategy.drawn(size, number), strategy.direction, strategy.mixing)
        for number in range(1, 7)
    ]
    away = matrices[0] - matrices[0].mean(axis=0)
    _, values, v = np.linalg.svd(away)
    starts = np.ascontiguousarray(v[:2].T)
    role = functools.partial(mixing_alone, strategy, starts, len(matrices))
    found = np.stack(SimulatedFabric(size, seed=2, latency=(0.0, 1e-4)).run([role] * size), axis=1)
    expected = starts
    for matrix, x in zip(matrices, found, strict=True):
        expected = matrix @ expected
        np.testing.assert_allclose(x, expected, rtol=0, atol=1e-14)
    left = found[0] - found[0].mean(axis=0)
    np.testing.assert_allclose(np.linalg.norm(left, axis=0), values[:2], rtol=0, atol=1e-13)


# -- schedules with faults --------------------------------------------------------------------------

SCHEDULES = 200
FAULTY = {
    "pull": PullGossip(mixing=0.4),
    "pull, stale, itself too": PullGossip(stale=True, with_self=True, period=2),
    "push": PushGossip(),
    "push, stale, a weight": PushGossip(mixing=0.3, stale=True, with_self=True),
    "synchronous pull": SynchronousGossip(deadline_seconds=1e3),
    "synchronous push": SynchronousGossip("push", deadline_seconds=1e3),
    "gala": GALA(topology="exponential", staleness_bound=3, deadline_seconds=1e-3),
    "gala, turning": GALA(topology="random-matching", staleness_bound=0),
}


def faulty(size, seed):
    """Another fault, or three, for each schedule: late, lost, doubled, overtaken mail, a crash, a cut."""
    drawn = np.random.default_rng([17, seed])
    faults = MailFaults(
        loss=drawn.choice([0.0, 0.3]),
        duplication=drawn.choice([0.0, 0.3]),
        reordering=drawn.choice([0.0, 0.5]),
        resend_seconds=3e-4,
    )
    crashes = {int(drawn.integers(size)): int(drawn.integers(3, 60))} if seed % 2 else {}
    cut = Partition((), 1e-4, float(drawn.uniform(2e-4, 2e-3)), island=frozenset({0}))
    return SimulatedFabric(
        size,
        seed=seed,
        latency=(0.0, float(drawn.choice([1e-5, 2e-4, 1e-3]))),
        crashes=crashes,
        partitions=[cut] if seed % 3 == 0 else [],
        mail_faults=faults,
        mail_capacity=int(drawn.choice([1, 4, 64])),
    )


def learning(strategy, updates, seen, member):
    """Learn at a pace of one's own; a log of each step's vector before and after, and its exchange."""
    replicator = Replicator(strategy, member)
    replica = replicator.replicate("x", Point(1.0, -0.5), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.5))
    pace = np.random.default_rng([member.rank, updates])
    exchanges = []
    for step in range(updates):
        member.compute(pace.uniform(0, 1e-4))
        exchanges.append(replica.follow(slope(member.rank, step, replica.params.detach())))
        seen.append(replica.params.detach().numpy().copy())
    replicator.publish()
    return exchanges, replica.params.detach().numpy().copy()


def quarters():
    """Two hundred schedules for each strategy; of each two hundred, one quarter in turn is not slow."""
    return [
        pytest.param(name, quarter, marks=() if quarter == row % 4 else pytest.mark.slow)
        for row, name in enumerate(FAULTY)
        for quarter in range(4)
    ]


@pytest.mark.parametrize(("name", "quarter"), quarters())
def test_two_hundred_schedules_with_faults(name, quarter):
    """Nobody hangs (the fabric raises on that), all that live end, finite, with counters that make sense."""
    strategy, size, updates, schedules = FAULTY[name], 3, 6, SCHEDULES // 4
    crashed = agreed = 0
    for seed in range(quarter * schedules, (quarter + 1) * schedules):
        fabric, seen = faulty(size, seed), []
        found = fabric.run([functools.partial(learning, strategy, updates, seen)] * size)
        assert np.isfinite(seen).all()
        assert np.abs(seen).max() < 10  # from within 1 of 0, towards 0, 1 and 2
        for one in found:
            if isinstance(one, Crashed):
                crashed += 1
                continue
            check_counters(one[0], size)
            agreed += one[0][-1].round
        assert fabric.virtual_seconds < 5.0
    assert schedules / 8 < crashed <= schedules / 2
    assert agreed > schedules


def check_counters(exchanges, size):
    rounds = [0, *(e.round for e in exchanges)]
    for clock, (before, after, exchange) in enumerate(zip(rounds, rounds[1:], exchanges, strict=False), 1):
        assert 0 <= after - before <= 1
        assert 1 <= exchange.heard <= size
        assert 0 <= exchange.staleness <= clock
        if after > before:
            assert exchange.staleness == 0
        if exchange.heard > 1:
            assert after == before + 1


def staying(strategy, updates, member):
    replicator = Replicator(strategy, member)
    replica = replicator.replicate("x", Point(0.0), lambda p: torch.optim.SGD(p, lr=1.0))
    replica.params.data.fill_(float(member.rank))
    bound = replicator.bound_replicas["x"]
    bound.strategy.attach(replica, bound.channel)
    pace = np.random.default_rng([member.rank, updates])
    path = [replica.params.item()]
    for _ in range(updates):
        member.compute(pace.uniform(0, 1e-4))
        replica.follow(torch.zeros(1, dtype=torch.float64))
        path.append(replica.params.item())
    return path


TURNING = SynchronousGossip("push", mixing=0.4, topology="one-peer-exponential", deadline_seconds=1e3)
AVERAGES = FAULTY | {"synchronous push, turning": TURNING, "push-sum": PushSum()}


@pytest.mark.parametrize("strategy", AVERAGES.values(), ids=AVERAGES)
def test_without_gradients_no_member_leaves_the_hull_of_the_starts(strategy):
    """Whatever is lost, late or dead: a mix is an average of what some member was."""
    nearer = 0
    for seed in range(24):
        found = faulty(3, seed).run([functools.partial(staying, strategy, 8)] * 3)
        paths = np.array([path for path in found if not isinstance(path, Crashed)])
        assert (paths >= -1e-12).all()
        assert (paths <= 2 + 1e-12).all()
        nearer += np.ptp(paths[:, -1]) < np.ptp(paths[:, 0])
    assert nearer >= 18


@pytest.mark.parametrize("schedules", [SCHEDULES // 3, pytest.param(SCHEDULES, marks=pytest.mark.slow)])
def test_many_schedules_with_faults_of_push_sum(schedules):
    """The ledger of ``laws/mass.py``, and what is left when one has died."""
    crashed = 0
    for seed in range(schedules):
        fabric = faulty(3, seed)
        case = Shares(size=3, updates=6, topology=("ring", "exponential", "complete")[seed % 3])
        ledger, found = case.on(fabric, seed)
        assert ledger.largest_error < 1e-12
        for rank, one in enumerate(found):
            if isinstance(one, Crashed):
                crashed += 1
                if len(ledger.strategies) == 3:
                    np.testing.assert_allclose(
                        ledger.total(without=(rank,)),
                        ledger.put_in - ledger.lost_with(rank),
                        rtol=0,
                        atol=1e-12,
                    )
                continue
            assert np.isfinite(one[1]).all()
            assert np.abs(one[1]).max() < 10
            check_counters(one[0], 3)
    assert schedules / 8 < crashed <= schedules / 2


# -- least squares ----------------------------------------------------------------------------------


class LeastSquares:
    """|A x - b|^2 / (2 rows), the same for all; gradients with Gaussian noise of a known variance."""

    def __init__(self) -> None:
        drawn = np.random.default_rng(3)
        a, self.noise = drawn.normal(size=(40, 4)) * [0.8, 0.9, 1.0, 1.2], 0.5
        b = a @ np.array([1.0, -2.0, 0.5, 3.0]) + drawn.normal(size=40)
        self.optimum = np.linalg.lstsq(a, b, rcond=None)[0]
        self.a, self.b = torch.from_numpy(a), torch.from_numpy(b)
        curvatures = np.linalg.eigvalsh(a.T @ a / 40)
        self.m, self.L = curvatures[0], curvatures[-1]

    def gradient(self, x, generator):
        noise = self.noise * torch.randn(4, generator=generator, dtype=torch.float64)
        return self.a.T @ (self.a @ x - self.b) / 40 + noise

    def ball(self, alpha):
        """Of one replica (eq. 3.6 over p): alpha sigma^2 (m + L)/(2 m L).

        It holds for every mix that is an average: E|sum_j p_j y_j|^2 <= max_j E|y_j|^2.
        """
        return alpha * 4 * self.noise**2 * (self.m + self.L) / (2 * self.m * self.L)


SQUARES = LeastSquares()
ALPHA = 0.1


def fitting(strategy, seed, updates, member):
    replicator = Replicator(strategy, member)
    replica = replicator.replicate("x", Point(4.0, 4.0, -4.0, -4.0), lambda p: torch.optim.SGD(p, lr=ALPHA))
    generator = torch.Generator().manual_seed(100 * seed + member.rank)
    pace = np.random.default_rng([seed, member.rank])
    away = []
    for _ in range(updates):
        member.compute(pace.uniform(0, 1e-4) * (1 + member.rank % 2))
        replica.follow(SQUARES.gradient(replica.params.detach(), generator))
        away.append(float(np.square(replica.params.detach().numpy() - SQUARES.optimum).sum()))
    return away


FITTING = {
    "pull": PullGossip(),
    "pull, stale": PullGossip(stale=True, period=3),
    "push": PushGossip(),
    "push, a weight": PushGossip(mixing=0.3),
    "synchronous pull": SynchronousGossip(),
    "synchronous push": SynchronousGossip("push"),
    "synchronous pull, ring": SynchronousGossip(topology="ring"),
    "push-sum": PushSum(),
    "push-sum, ring": PushSum(topology="ring"),
    "gala": GALA(),
    "gala, turning": GALA(topology="random-matching"),
}


@pytest.mark.parametrize("name", FITTING)
def test_least_squares_to_its_optimum_within_the_ball(name):
    strategy, updates = FITTING[name], 240
    # a step of push-sum moves z by 1 / w of itself
    alpha = ALPHA / (strategy.least_weight if isinstance(strategy, PushSum) else 1.0)
    assert alpha <= 2 / (SQUARES.m + SQUARES.L)
    fabric = SimulatedFabric(4, seed=0, latency=(0.0, 5e-5))
    run = np.array(fabric.run([functools.partial(fitting, strategy, 0, updates)] * 4))
    away = run[:, 2 * updates // 3 :].mean()
    ball = SQUARES.ball(alpha)
    assert away <= ball
    assert away >= ball / 40  # noise that is there, and a ball not drawn around the moon
    assert run[:, 0].mean() > 100 * ball
