"""Elastic averaging under many schedules: what one gains the other loses, whatever dies or is saved when.

Gradients are whole numbers and the rate is 1/8, so that what is lost or counted twice is far above rounding.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

from laws.centre import (
    CURVATURES,
    ETA,
    GOAL,
    START,
    Exact,
    LeastSquares,
    check_death_is_told,
    check_exchanges,
    gradient_of,
    over_curvatures,
    solve,
    stationary,
    troubled,
    unit,
)
from laws.problems import HOW, OPTIMIZERS, Point, Problem, same
from murmurate.fabric.simulated.fabric import SimulatedFabric
from murmurate.replica.vector import Exchange, Replica
from murmurate.replicator.replicator import Replicator
from murmurate.strategies.elastic import Elastic, SynchronousElastic

UPDATES = 8
KINDS = [Elastic(period=1), Elastic(period=3, wait=False), Elastic(moving_rate=0.5, period=2)]
NAMES = ["every step", "no wait", "half"]


class TestSolo:
    @pytest.mark.parametrize("optimizer", OPTIMIZERS)
    @HOW
    def test_with_zero_pull_it_is_solo_to_the_bit(self, optimizer, how):
        problem = Problem(optimizer=optimizer, **how)
        expected = problem.alone(UPDATES)
        start = torch.cat([p.detach().flatten() for p in problem.net().parameters()])
        for wait in (True, False):
            strategy = Elastic(moving_rate=0.0, period=1, wait=wait)
            learner, centre = SimulatedFabric(2, seed=3).run(
                [functools.partial(solve, problem, strategy, UPDATES)] * 2
            )
            assert same(learner.path, expected.path)
            assert same(learner.state, expected.state)
            assert learner.exchanges[-1].round >= 1  # though they did exchange
            assert sorted(centre.params.tolist()) == pytest.approx(sorted(start.tolist()))

    @pytest.mark.parametrize("optimizer", OPTIMIZERS)
    def test_in_common_rounds_too(self, optimizer):
        problem = Problem(optimizer=optimizer, float32=True, clip=0.3, scheduled=True, grouped=True)
        expected = problem.alone(UPDATES)
        for strategy in (
            SynchronousElastic(moving_rate=0.0, period=1),
            SynchronousElastic(period=UPDATES + 1),
        ):
            (found,) = SimulatedFabric(1, seed=0).run([functools.partial(problem.learn, strategy, UPDATES)])
            assert same(found.path, expected.path)
            assert same(found.state, expected.state)


def test_with_one_replica_both_are_the_same_algorithm():
    problem = Problem(optimizer="momentum")
    alone = SimulatedFabric(1, seed=0).run(
        [functools.partial(problem.learn, SynchronousElastic(period=1), UPDATES)]
    )[0]
    with_centre, centre = SimulatedFabric(2, seed=0).run(
        [functools.partial(solve, problem, Elastic(period=1), UPDATES)] * 2
    )
    torch.testing.assert_close(with_centre.params, alone.params, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(centre.params, alone.strategy["centre"], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_common_rounds_are_the_printed_equations(size):
    """Zhang et al. 2015: theta~ <- theta~ + beta sum_i (theta_i - theta~), and
    theta_i <- theta_i - beta (theta_i - theta~) - eta grad f_i(theta_i), all of the same moment.
    """
    problem, strategy, beta = Problem(), SynchronousElastic(period=3), 0.8 / size
    found = SimulatedFabric(size, seed=1).run([functools.partial(problem.learn, strategy, 10)] * size)
    again = SimulatedFabric(size, seed=2).run([functools.partial(problem.learn, strategy, 10)] * size)
    assert all(same(a.path, b.path) and same(a.state, b.state) for a, b in zip(found, again, strict=True))
    replicas = [Replica("model", problem.net(), OPTIMIZERS["sgd"]) for _ in range(size)]
    centre = replicas[0].params.detach().clone()
    xs = [replica.params.detach() for replica in replicas]
    for replica in replicas:
        replica.exchange = lambda _: Exchange(0, 0, 0)  # only the gradient, of theta_i before it moves
    for step in range(10):
        for rank, replica in enumerate(replicas):
            replica.descend(problem.loss(replica.module, [problem.batch(rank, step)]))
        if (step + 1) % 3 == 0:
            moves = [beta * (x - centre) for x in xs]
            for x, move in zip(xs, moves, strict=True):
                x.sub_(move)
            centre = centre + sum(moves)
        for replica in replicas:
            replica.update()
    for one, x in zip(found, xs, strict=True):
        torch.testing.assert_close(one.params, x, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(one.strategy["centre"], centre, rtol=1e-12, atol=1e-12)
        assert [tuple(e) for e in one.exchanges] == [
            (k // 3, size if k % 3 == 0 else 1, k % 3) for k in range(1, 11)
        ]


# -- with a centre --------------------------------------------------------------------------------------


class TestUnderFaults:
    @pytest.mark.parametrize("strategy", KINDS, ids=NAMES)
    def test_the_sum_with_the_centre_is_what_was_learned_and_no_member_hangs(self, strategy):
        """40 schedules a kind, in half of which a learner dies; the rest of it is what the dead one had."""
        learners, died = 3, 0
        start = torch.tensor(START, dtype=torch.float64)
        for seed in range(40):
            found = Exact(strategy).run(seed, learners, **troubled(seed, learners, crash=seed % 2 == 1))
            *alive, centre = [one for one in found if not isinstance(one, BaseException)]
            assert centre.drained
            assert bool(torch.isfinite(centre.params).all())
            for one in alive:
                assert one.drained
                check_exchanges(one.exchanges, learners + 1)
            if len(alive) == learners:
                total = centre.params + sum(one.params for one in alive)
                made = sum(one.steps * gradient_of(rank) for rank, one in enumerate(alive))
                torch.testing.assert_close(total, 4 * start - ETA * made, rtol=0, atol=1e-9)
            else:
                died += 1
            # the centre is what it was, plus beta times each difference that it could answer
            beta = 0.8 / learners if strategy.moving_rate is None else strategy.moving_rate
            x = start.clone()
            messages = [theta for _, _, theta, note in centre.watched.received if note >= 0]
            for theta, (_, _, told, _, sent) in zip(messages, centre.watched.sent, strict=True):
                torch.testing.assert_close(told, x, rtol=0, atol=1e-12)
                x = x + beta * (theta - x) * sent
            torch.testing.assert_close(centre.params, x, rtol=0, atol=1e-12)
        assert died >= 11

    def test_the_centres_death_is_an_error_for_every_learner(self):
        for strategy in (*KINDS[:2], Elastic(period=50)):
            check_death_is_told(strategy, 3, range(12))


class TestCheckpoint:
    @pytest.mark.parametrize("strategy", KINDS, ids=NAMES)
    def test_no_move_is_half_made_in_what_is_saved(self, strategy):
        """Learners drain at differing steps, the centre before, between or after: 40 schedules a kind."""
        start = torch.tensor(START, dtype=torch.float64)
        for seed in range(40):
            saves = (1 + seed % 7, 3, 1 + (5 * seed) % 9)
            case = Exact(strategy, saves=saves, turns=(seed * 3) % 17)
            found = case.run(seed, 3, **troubled(seed, 3))
            parts = [one.cut for one in found[:-1]] + [found[-1].cuts[1]]
            total = sum(part["x"]["replica"]["params"]["x"] for part in parts)
            made = sum(saves[rank] * gradient_of(rank) for rank in range(3))
            torch.testing.assert_close(total, 4 * start - ETA * made, rtol=0, atol=1e-9)
            if seed % 5 == 0:
                again = Exact(strategy, steps=5, restored=tuple(parts)).run(seed + 1, 3, **troubled(seed, 3))
                after = sum((5 + rank) * gradient_of(rank) for rank in range(3))
                torch.testing.assert_close(
                    sum(one.params for one in again), 4 * start - ETA * (made + after), rtol=0, atol=1e-9
                )

    def test_a_learner_that_does_not_come_skips_it_and_the_run_goes_on(self):
        start = torch.tensor(START, dtype=torch.float64)
        for seed in range(20):
            case = Exact(Elastic(period=1), saves=(2, 0, 4), turns=4, patience_seconds=2e-3)
            found = case.run(seed, 3, **troubled(seed, 3))
            assert found[-1].cuts == {}
            made = sum(one.steps * gradient_of(rank) for rank, one in enumerate(found[:-1]))
            torch.testing.assert_close(
                sum(one.params for one in found), 4 * start - ETA * made, rtol=0, atol=1e-9
            )


class TestLeastSquares:
    @pytest.mark.parametrize("strategy", KINDS, ids=NAMES)
    def test_without_noise_it_comes_to_the_optimum(self, strategy):
        looks, centre = LeastSquares(strategy, sigma=0.0, steps=900).run(3)
        assert float((centre.params - GOAL).norm()) < 1e-4 * float(GOAL.norm())
        assert all(float(one[-1].norm()) < 1e-3 for one in looks)

    def test_with_noise_replicas_stay_where_the_lyapunov_equation_of_their_events_has_them(self):
        """An event: one of p replicas and the centre move towards each other, then it updates."""
        problem, p = LeastSquares(Elastic(period=1), steps=700), 3
        looks, _ = problem.run(p)
        beta, eta = 0.8 / p, problem.eta

        def ball(h):
            moves = []
            for i in range(p):
                mix = np.eye(p + 1)
                mix[i, i] = mix[p, p] = 1 - beta
                mix[i, p] = mix[p, i] = beta
                moves.append(mix - eta * h * unit(p + 1, i))  # the gradient is of before the move
            return stationary(moves, [eta**2 * unit(p + 1, i) for i in range(p)])

        measured = float(torch.cat(looks).square().mean())
        assert measured == pytest.approx(over_curvatures(ball), rel=0.1)
        assert measured < 0.6 * over_curvatures(lambda h: eta / (h * (2 - eta * h)))  # smaller than alone

    def test_in_common_rounds_with_noise_it_stays_where_its_equation_has_it(self):
        p, eta = 3, 0.05
        problem = LeastSquares(SynchronousElastic(period=1), steps=700)
        looks = SimulatedFabric(p, seed=0, keep_log=False).run([functools.partial(rounds, problem)] * p)
        beta = 0.8 / p

        def ball(h):
            mix = np.eye(p + 1) * (1 - beta)
            mix[:p, p] = mix[p, :p] = beta
            mix[p, p] = 1 - p * beta
            each = sum(unit(p + 1, i) for i in range(p))
            return stationary([mix - eta * h * each], [eta**2 * each])

        measured = float(torch.cat([torch.stack(one) for one in looks]).square().mean())
        assert measured == pytest.approx(over_curvatures(ball), rel=0.1)


def rounds(problem, member):
    """``problem``'s learner where there is no centre: distances to the goal over time."""
    replica = Replicator(problem.strategy, member).replicate(
        "x", Point(*[0.0] * len(GOAL)), lambda p: torch.optim.SGD(p, lr=problem.eta)
    )
    noise = torch.Generator().manual_seed(member.rank)
    looks = []
    for step in range(problem.steps):
        xi = torch.randn(len(GOAL), generator=noise, dtype=torch.float64)
        replica.follow(CURVATURES * (replica.params.detach() - GOAL) + xi)
        if step % problem.every == 0 and step > problem.steps // 3:
            looks.append(replica.params.detach() - GOAL)
    return looks
