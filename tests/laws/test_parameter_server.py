"""The parameter server under many schedules: solo with one client, every gradient folded once.

Sums of whole-number gradients at a rate of 1/8 are exact, so conservation is asserted to the bit.
"""

from __future__ import annotations

import functools

import pytest
import torch

from laws.centre import (
    ETA,
    GOAL,
    START,
    Exact,
    LeastSquares,
    Served,
    check_death_is_told,
    check_exchanges,
    delayed_ball,
    folded,
    gradient_of,
    over_curvatures,
    solve,
    troubled,
)
from laws.problems import HOW, OPTIMIZERS, Problem, same
from murmurate.fabric.interface import FabricError
from murmurate.fabric.simulated.fabric import SimulatedFabric
from murmurate.replica.vector import Replica
from murmurate.strategies.parameter_server import ParameterServer

UPDATES = 8
KINDS = [
    ParameterServer(period=2),
    ParameterServer(wait=False),
    ParameterServer(period=3, wait=False, local_steps=False),
    ParameterServer(delay_bound=2),
]


class TestSolo:
    @pytest.mark.parametrize("optimizer", OPTIMIZERS)
    @HOW
    def test_one_client_pushing_every_gradient_is_solo_to_the_bit(self, optimizer, how):
        """What it pulls after each step, and all that the centre is: parameters, moments, rates, clock."""
        problem = Problem(optimizer=optimizer, **how)
        expected = problem.alone(UPDATES)
        for strategy in (ParameterServer(), ParameterServer(local_steps=False, delay_bound=1)):
            learner, centre = SimulatedFabric(2, seed=3, latency=(0.0, 1e-4)).run(
                [functools.partial(solve, problem, strategy, UPDATES)] * 2
            )
            assert same(learner.path, expected.path)
            assert same(centre.state, expected.state)
            assert torch.equal(learner.consensus, expected.params)
            assert [tuple(e) for e in learner.exchanges] == [(k, 2, 0) for k in range(1, UPDATES + 1)]

    def test_with_a_period_it_is_solo_on_sums_of_gradients(self):
        """Without local steps all gradients of a period are of one point: one step on their sum."""
        problem = Problem(optimizer="adam", clip=0.5)
        learner, _ = SimulatedFabric(2, seed=0).run(
            [functools.partial(solve, problem, ParameterServer(period=2, local_steps=False), UPDATES)] * 2
        )
        replica = Replica("model", problem.net(), OPTIMIZERS["adam"], clip=0.5)
        for step in range(0, UPDATES, 2):
            losses = [problem.loss(replica.module, [problem.batch(0, step + k)]) for k in range(2)]
            replica.descend(sum(losses))
            torch.testing.assert_close(
                learner.path[step + 1], replica.params.detach(), rtol=1e-12, atol=1e-12
            )


class TestUnderFaults:
    @pytest.mark.parametrize("strategy", KINDS, ids=["period", "no wait", "no local steps", "bounded"])
    def test_the_centre_is_the_sum_of_what_was_folded_and_no_member_hangs(self, strategy):
        """Per kind 40 schedules with delays and faults, in half of which a learner dies."""
        learners, refused, died = 3, 0, 0
        for seed in range(40):
            found = Exact(strategy).run(seed, learners, **troubled(seed, learners, crash=seed % 2 == 1))
            centre = found[-1]
            assert centre.drained
            sums = folded(centre, learners + 1)
            expected = torch.tensor(START, dtype=torch.float64) - ETA * sum(sums)
            assert torch.equal(centre.params, expected), seed
            refused += centre.strategy["refused"]
            for rank, (one, total) in enumerate(zip(found[:-1], sums, strict=True)):
                g = gradient_of(rank)
                if not hasattr(one, "exchanges"):  # crashed: a part of what it made
                    died += 1
                    count = float(total[0] / g[0])
                    assert count == int(count) <= 8 + rank
                    assert torch.equal(total, count * g)
                    continue
                check_exchanges(one.exchanges, learners + 1)
                assert one.drained
                assert bool(torch.isfinite(one.params).all())
                if not strategy.delay_bound:
                    assert torch.equal(total + one.strategy["gradient"], one.steps * g), seed
        assert died >= 13
        assert bool(refused) == bool(strategy.delay_bound)

    def test_the_centres_death_is_an_error_for_every_learner(self):
        for strategy in (ParameterServer(), ParameterServer(wait=False), ParameterServer(period=50)):
            check_death_is_told(strategy, 3, range(12))

    def test_a_death_of_the_centre_at_the_end_leaves_no_member_waiting(self):
        """At whatever call it dies: an error that names it. A deadlock would be another."""
        for seed in range(30):
            with pytest.raises(FabricError, match=r"^rank 2"):
                Exact(ParameterServer()).run(seed, 2, crashes={2: 14 + seed}, latency=(0.0, 3e-4))


class TestCheckpoint:
    @pytest.mark.parametrize("strategy", KINDS[:3], ids=["period", "no wait", "no local steps"])
    def test_each_gradient_is_once_in_the_saved_centre_or_still_to_be_pushed(self, strategy):
        """Learners drain at differing steps, the centre before, between or after: 40 schedules a kind."""
        start = torch.tensor(START, dtype=torch.float64)
        for seed in range(40):
            saves = (1 + seed % 7, 3, 1 + (5 * seed) % 9)
            case = Exact(strategy, saves=saves, turns=(seed * 3) % 17)
            found = case.run(seed, 3, **troubled(seed, 3))
            centre = found[-1].cuts[1]["x"]
            pending = torch.zeros(3, dtype=torch.float64)
            made = torch.zeros(3, dtype=torch.float64)
            for rank, one in enumerate(found[:-1]):
                assert one.cut["x"]["replica"]["clock"] == saves[rank]
                pending += one.cut["x"]["strategy"]["gradient"]
                made += saves[rank] * gradient_of(rank)
            held = centre["replica"]["params"]["x"]
            assert torch.equal(held - ETA * pending, start - ETA * made), seed
            # and the run went on: nothing held back was lost
            assert torch.equal(found[-1].params, start - ETA * sum(folded(found[-1], 4)))
            if seed % 5 == 0:
                self.goes_on(case, found, made, seed)

    def goes_on(self, case, found, made, seed):
        """From the checkpoint on, in a new fabric: all that was made before and after is in the end."""
        parts = (*(one.cut for one in found[:-1]), found[-1].cuts[1])
        again = Exact(case.strategy, steps=5, restored=parts).run(seed + 1, 3, **troubled(seed + 1, 3))
        start = torch.tensor(START, dtype=torch.float64)
        pending = sum(one.strategy["gradient"] for one in again[:-1])
        after = sum((5 + rank) * gradient_of(rank) for rank in range(3))
        assert torch.equal(again[-1].params - ETA * pending, start - ETA * (made + after)), seed
        for rank, one in enumerate(again[:-1]):
            assert one.steps == case.saves[rank] + 5 + rank

    def test_a_learner_that_does_not_come_skips_it_and_the_run_goes_on(self):
        """Learner 1 never drains: the centre gives up at its deadline and delivers what it held."""
        for seed in range(20):
            case = Exact(ParameterServer(), saves=(2, 0, 4), turns=4, patience_seconds=2e-3)
            found = case.run(seed, 3, **troubled(seed, 3))
            assert found[-1].cuts == {}
            sums = folded(found[-1], 4)
            for rank, one in enumerate(found[:-1]):
                assert torch.equal(sums[rank] + one.strategy["gradient"], one.steps * gradient_of(rank))

    def test_numbers_that_the_centre_never_saw_do_not_hold_anything_back(self):
        """A learner that drains 1 and then the end, under a centre that is asked for the end only."""
        for seed in range(20):
            found = Exact(ParameterServer(wait=False), saves=(2, 3, 4), turns=-1).run(seed, 3)
            assert found[-1].cuts == {}
            assert found[-1].drained
            sums = folded(found[-1], 4)
            for rank, one in enumerate(found[:-1]):
                assert torch.equal(sums[rank] + one.strategy["gradient"], one.steps * gradient_of(rank))


class TestLeastSquares:
    def test_without_noise_it_comes_to_the_optimum(self):
        for strategy in (ParameterServer(), ParameterServer(period=3), ParameterServer(wait=False)):
            _, centre = LeastSquares(strategy, sigma=0.0, steps=400).run(3)
            assert float((centre.params - GOAL).norm()) < 1e-4 * float(GOAL.norm())

    def test_with_noise_it_stays_within_the_ball_of_sgd_with_the_delay_it_has(self):
        """x_{k+1} = x_k - eta h x_{k-d} + eta xi: between no delay and the longest that there was."""
        problem = LeastSquares(ParameterServer(), steps=900)
        looks, centre = problem.run(3)
        measured = float(torch.cat(looks).square().mean())
        delays = [k - note for k, note in enumerate(pushed_from(centre))]
        eta = problem.eta

        def ball(delay):
            return over_curvatures(lambda h: delayed_ball(eta * h, eta, delay))

        assert max(delays) > 1
        assert 0.9 * ball(0) < measured < 1.1 * ball(int(max(delays)))
        assert ball(int(max(delays))) < 2 * ball(0)


def pushed_from(centre: Served) -> list[float]:
    return [note for _, _, _, note in centre.watched.received if note >= 0]
