"""Jin's bounds for gossiping SGD, computed and compared with what pull gossip does (thesis, chapter 3)."""

from __future__ import annotations

import functools
import itertools

import numpy as np
import pytest
import torch

from laws.jin import Bowl, draws, event, lam, left_over, printed_lambda
from laws.problems import Point
from murmurate.fabric.simulated.fabric import SimulatedFabric
from murmurate.replicator.replicator import Replicator
from murmurate.strategies.pull_gossip import PullGossip
from murmurate.strategies.push_gossip import PushGossip
from murmurate.strategies.synchronous_gossip import SynchronousGossip
from strategies.scripted import Script

RUNS = 12
TICKS = 800
EVERY = 10  # ticks between two lines of the log
LOGGED = np.arange(0, TICKS + 1, EVERY)
BOWLS = {
    "four": Bowl(size=4, beta=0.4),
    "eight": Bowl(beta=0.3),
    "eight, apart and away": Bowl(beta=0.3, alpha=0.1, start=0.2, spread=0.2),
}


@functools.cache
def measured(bowl):
    """(each run's disagreement [runs, log], its square distances from the optimum, the largest gradient)."""
    apart, away, largest = [], [], 0.0
    for seed in range(RUNS):
        path = list(bowl.ticks(seed, TICKS, EVERY))
        apart.append([np.square(x - x.mean(0)).sum() for x, _ in path])
        away.append([np.square(x).sum() for x, _ in path])
        largest = max(largest, path[-1][1])
    return np.array(apart), np.array(away), largest


@pytest.mark.parametrize("bowl", BOWLS.values(), ids=BOWLS)
def test_disagreement_stays_under_eq_3_7_and_within_a_factor_of_three_in_the_end(bowl):
    """What is left of the bound is ((1 - beta)^2 (1 - 1/p) + 1/p) (1 - 1/p) / lambda where noise leads:
    who steps is who mixes, and the bound takes the two to be independent. At beta = 1/2 that is less than
    a third from eight members on.
    """
    runs, _, largest = measured(bowl)
    apart = runs.mean(axis=0)
    bound = bowl.apart_bound(LOGGED, apart[0], largest, lam(bowl.size, bowl.beta))
    assert (apart <= bound * (1 + 1e-12)).all()
    second_half = slice(len(LOGGED) // 2, None)
    assert (3 * apart[second_half] >= bound[second_half]).all()


@pytest.mark.parametrize("name", ["four", "eight"])
def test_disagreement_is_what_the_average_over_all_draws_says(name):
    """Exactly, and not only under a bound; each tenth line, within four standard errors."""
    runs, *_ = measured(BOWLS[name])
    expected = BOWLS[name].expected_apart(TICKS)[::EVERY]
    for line in range(5, len(LOGGED), 10):
        assert standard_errors_off(runs[:, line], expected[line]) < 4


@pytest.mark.parametrize("bowl", BOWLS.values(), ids=BOWLS)
def test_the_distance_from_the_optimum_stays_under_eq_3_6(bowl):
    away = measured(bowl)[1].mean(axis=0)
    assert (away <= bowl.away_bound(LOGGED, away[0]) * (1 + 1e-12)).all()


def test_eq_3_6_is_near_where_no_member_mixes():
    """Mixing averages the noise, which the bound leaves out; without, it is met within a factor of three."""
    bowl = Bowl(size=4, beta=0.0, alpha=0.1, start=0.5)
    away = measured(bowl)[1].mean(axis=0)
    bound = bowl.away_bound(LOGGED, away[0])
    assert (away <= bound).all()
    assert (3 * away >= bound).all()


def test_mixing_alone_contracts_by_lambda_a_tick_and_not_by_the_printed_one():
    bowl = Bowl(size=4, beta=0.5, alpha=0.0, dimension=3, spread=1.0)
    runs = []
    for seed in range(200):
        squares = [np.square(x - x.mean(0)).sum() for x, _ in bowl.ticks(seed, 12)]
        runs.append(np.array(squares) / squares[0])
    runs = np.array(runs)
    for tick in range(1, 13):
        assert standard_errors_off(runs[:, tick], lam(4, 0.5) ** tick) < 4
        assert standard_errors_off(runs[:, tick], printed_lambda(4, 0.5) ** tick) > 4


# -- lambda -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3, 4, 7, 16])
@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 0.8, 1.0])
@pytest.mark.parametrize("with_self", [True, False])
def test_lambda_by_enumerating_all_draws(size, beta, with_self):
    pairs = draws(size, with_self)
    mean = np.mean([left_over(event(size, i, j, beta)) for i, j in pairs], axis=0)
    values = np.linalg.eigvalsh(mean)
    factor = lam(size, beta, with_self)
    np.testing.assert_allclose(np.sort(values), np.sort([0.0] + [factor] * (size - 1)), rtol=0, atol=1e-12)
    np.testing.assert_allclose(mean @ np.ones(size), 0.0, rtol=0, atol=1e-12)
    if with_self and beta > 0:
        assert abs(printed_lambda(size, beta) - factor) > 1e-4


@pytest.mark.parametrize("with_self", [True, False])
@pytest.mark.parametrize("beta", [0.5, 0.3])
def test_over_all_draws_the_strategy_leaves_exactly_lambda(with_self, beta):
    """Every (i, j) once, each mixed by the strategy itself: the mean square left is lambda, to rounding."""
    size = 4
    start = np.array([[3.0], [-1.0], [2.0], [-4.0]])
    left = []
    for i, j in draws(size, with_self):
        script = Script(size)
        members = []
        for rank in range(size):
            strategy = PullGossip(mixing=beta, with_self=with_self, seed=seed_that_draws(i, j, with_self))
            replicator = Replicator(strategy, script.member(rank))
            members.append(
                replicator.replicate("x", Point(*start[rank]), lambda p: torch.optim.SGD(p, lr=1.0))
            )
            replicator.publish()
        members[i].follow(torch.zeros(1, dtype=torch.float64))
        x = np.array([m.params.item() for m in members])
        np.testing.assert_allclose(x, event(size, i, j, beta) @ start[:, 0], rtol=0, atol=1e-15)
        left.append(np.square(x - x.mean()).sum())
    assert np.mean(left) == pytest.approx(lam(size, beta, with_self) * np.square(start).sum(), abs=1e-12)


@functools.cache
def seed_that_draws(i, j, with_self, size=4):
    for seed in itertools.count():
        strategy = attached(PullGossip(with_self=with_self, seed=seed), i, size)
        if strategy.draw(i, range(size)) == j:
            return seed


def attached(strategy, rank, size):
    strategy.attach(None, Script(size).member(rank))
    return strategy


def standard_errors_off(samples, expected):
    """How many standard errors the mean of ``samples`` [n] lies from ``expected``."""
    samples = np.asarray(samples, dtype=np.float64)
    return abs(samples.mean() - expected) / (samples.std(ddof=1) / np.sqrt(len(samples)))


@pytest.mark.parametrize("kind", [PullGossip, PushGossip])
@pytest.mark.parametrize("with_self", [True, False])
def test_the_strategys_own_draws_are_uniform_and_give_lambda(kind, with_self):
    """40,000 ticks. What a push does, seen from its receiver, is the event of a pull."""
    size, beta, rounds = 5, 0.5, 40_000
    members = [attached(kind(with_self=with_self, seed=9), rank, size) for rank in range(size)]
    clock = np.random.default_rng(4).integers(size, size=rounds)
    living = range(size)
    drawn = np.array([members[i].draw(i, living) for i in clock])
    table = {pair: left_over(event(size, *pair, beta)) for pair in draws(size, True)}
    for u in np.eye(size) - 1 / size:
        each = {pair: u @ matrix @ u for pair, matrix in table.items()}
        pairs = zip(clock, drawn, strict=True) if kind is PullGossip else zip(drawn, clock, strict=True)
        left = [each[pair] for pair in pairs]
        assert standard_errors_off(left, lam(size, beta, with_self) * (u @ u)) < 4
    for i in range(size):
        for j in range(size):
            share = 0.0 if i == j and not with_self else 1 / (size - (not with_self))
            hits = drawn[clock == i] == j
            assert (not hits.any()) if share == 0 else standard_errors_off(hits, share) < 4


def synchronous_event(drawn, beta):
    """M_I of eq. 3.22 [n, n]: everybody i mixes in drawn[i]."""
    size = len(drawn)
    matrix = (1 - beta) * np.eye(size)
    for i, j in enumerate(drawn):
        matrix[i, j] += beta
    return matrix


@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_synchronous_second_moment_by_enumerating_all_rounds(size):
    """Eq. 3.24: E[M'M] = (I + 11'/p)/2."""
    rounds = itertools.product(range(size), repeat=size)
    moments = [synchronous_event(drawn, 0.5) for drawn in rounds]
    mean = np.mean([m.T @ m for m in moments], axis=0)
    np.testing.assert_allclose(mean, (np.eye(size) + 1 / size) / 2, rtol=0, atol=1e-12)


@pytest.mark.parametrize("with_self", [True, False])
def test_the_rounds_of_synchronous_gossip_are_uniform_and_independent(with_self):
    """40,000 draws: each peer as often, and what a round leaves is what all rounds leave on average."""
    size, rounds = 4, 10_000
    strategy = SynchronousGossip(with_self=with_self, seed=2)
    drawn = [tuple(strategy.drawn(size, number)) for number in range(1, rounds + 1)]
    peers = [[j for j in range(size) if with_self or j != i] for i in range(size)]
    possible = list(itertools.product(*peers))
    moment = {one: left_over(synchronous_event(one, 0.5)) for one in possible}
    for u in np.eye(size):
        left = {one: u @ matrix @ u for one, matrix in moment.items()}
        assert standard_errors_off([left[one] for one in drawn], np.mean(list(left.values()))) < 4
    for i in range(size):
        for j in peers[i]:
            hits = [one[i] == j for one in drawn]
            assert standard_errors_off(hits, 1 / len(peers[i])) < 4


def in_rounds(bowl, rounds, seed, member):
    """[rounds, d]: one member's vector after each synchronous round."""
    strategy = SynchronousGossip(with_self=True, seed=seed)
    replica = Replicator(strategy, member).replicate(
        "x", Point(*[bowl.start] * bowl.dimension), lambda p: torch.optim.SGD(p, lr=bowl.alpha)
    )
    noise = torch.Generator().manual_seed(100 * seed + member.rank)
    path = []
    for _ in range(rounds):
        xi = torch.randn(bowl.dimension, generator=noise, dtype=torch.float64)
        replica.follow(bowl.curvatures * replica.params.detach() + xi)
        path.append(replica.params.detach().numpy().copy())
    return path


def test_theorem_2_the_distance_in_synchronous_rounds():
    """Eq. 3.11, with the curvatures' m and L; and exactly what the average over all rounds' draws says.

    With M = (I + sum_i e_i e_j_i')/2: E|M y|^2 = |y|^2 / 2 + (sum y)^2 / 2p, and E(sum M y)^2 = (sum y)^2 +
    (|y|^2 - (sum y)^2 / p)/4, where y is after the update, (1 - alpha h) x - alpha xi.
    """
    bowl, rounds = Bowl(size=4, alpha=0.1, start=1.0), 40
    p, runs, expected = bowl.size, [], []
    for seed in range(RUNS):
        role = functools.partial(in_rounds, bowl, rounds, seed)
        x = np.array(SimulatedFabric(p, seed=seed).run([role] * p))
        runs.append([np.square(y).sum(axis=(0, 2)) for y in (x, x - x.mean(axis=0))])
    away, apart = np.array(runs).swapaxes(0, 1)
    shrink, fresh = 1 - bowl.alpha * bowl.curvatures.numpy(), p * bowl.alpha**2
    square = np.full(bowl.dimension, p * bowl.start**2)
    sum_square = p * square
    for _ in range(rounds):
        y, sum_y = shrink**2 * square + fresh, shrink**2 * sum_square + fresh
        square, sum_square = y / 2 + sum_y / (2 * p), sum_y + (y - sum_y / p) / 4
        expected.append((square.sum(), (square - sum_square / p).sum()))
    kappa = bowl.m * bowl.L / (bowl.m + bowl.L)
    ball = p * bowl.alpha * bowl.variance / (2 * kappa)
    start = p * bowl.start**2 * bowl.dimension
    bound = (1 - 2 * bowl.alpha * kappa) ** np.arange(1, rounds + 1) * start + ball
    assert (away.mean(axis=0) <= bound).all()
    for k in range(0, rounds, 4):
        assert standard_errors_off(away[:, k], expected[k][0]) < 4
        assert standard_errors_off(apart[:, k], expected[k][1]) < 4
