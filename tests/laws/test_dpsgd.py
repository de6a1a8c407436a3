"""DPSGD: solo, asynchronous SGD and Hogwild as special cases under many schedules, and least squares.

What is claimed of the special cases, exactly:

- one replica, B = M = p = 1, rho = 1, waiting: solo to rounding (v + (u - v) is not u in floating point);
- p = 1, B = 1, waiting (DA3C): v_{k+1} = v_k - rho eta g(v_{k-d}), with SGD, as a parameter server has it
  with rate rho eta under the same order of events;
- one node, rho = 1, M = 1, no momentum (PA3C): u and the optimizer's moments are Hogwild's to the bit under
  the same order of updates, since an answer moves u by v' - base, which is zero to the bit.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

from laws.centre import (
    GOAL,
    START,
    LeastSquares,
    delayed_ball,
    finish,
    is_centre,
    keep,
    over_curvatures,
    solve,
)
from laws.dpsgd import PLAIN
from laws.problems import OPTIMIZERS, Point, Problem, same, slope
from murmurate.fabric.simulated.fabric import SimulatedFabric
from murmurate.replica.vector import Replica
from murmurate.replicator.replicator import Replicator
from murmurate.strategies.dpsgd import DPSGD
from murmurate.strategies.parameter_server import ParameterServer
from strategies.manual_fabric import Company

UPDATES = 8
SHARED = [name for name in OPTIMIZERS if name != "dampened"]


class TestSolo:
    @pytest.mark.parametrize("optimizer", OPTIMIZERS)
    @pytest.mark.parametrize("how", [{}, {"clip": 0.3, "scheduled": True, "grouped": True}])
    def test_one_replica_that_pushes_every_update_is_solo_to_1e_12(self, optimizer, how):
        problem = Problem(optimizer=optimizer, **how)
        expected = problem.alone(UPDATES)
        learner, centre = SimulatedFabric(2, seed=3, latency=(0.0, 1e-4)).run(
            [functools.partial(solve, problem, PLAIN, UPDATES)] * 2
        )
        for x, y in zip(learner.path, expected.path, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)
        assert torch.equal(centre.params, learner.params)
        assert torch.equal(learner.consensus, learner.params)
        assert [tuple(e) for e in learner.exchanges] == [(k, 2, 0) for k in range(1, UPDATES + 1)]

    @pytest.mark.parametrize("optimizer", ["sgd", "momentum", "nesterov", "rmsprop", "adam"])
    def test_in_float32_it_is_within_two_units_in_the_last_place_a_round(self, optimizer):
        """Gradients that do not depend on the parameters, so that rounding does not feed on itself."""
        rounds = 50

        def gradient(step):
            return torch.randn(64, generator=torch.Generator().manual_seed(step))

        def member(own_fabric):
            replicator = Replicator(PLAIN, own_fabric)
            replica = replicator.replicate("x", Narrow(), OPTIMIZERS[optimizer])
            if is_centre(own_fabric):
                return keep(replicator, own_fabric)
            path = []
            for step in range(rounds):
                replica.follow(gradient(step))
                path.append(replica.params.detach().clone())
            finish(replicator, own_fabric)
            return path

        path, _ = SimulatedFabric(2, seed=0).run([member] * 2)
        oracle, largest = Replica("x", Narrow(), OPTIMIZERS[optimizer]), torch.ones(64)
        for step, x in enumerate(path, start=1):
            oracle.follow(gradient(step - 1))
            largest = torch.maximum(largest, oracle.params.detach().abs())
            ulp = torch.finfo(torch.float32).eps * 2.0 ** torch.floor(torch.log2(largest))
            assert bool(((x - oracle.params.detach()).abs() <= 2 * step * ulp).all())


class Narrow(torch.nn.Module):
    """64 parameters in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.x = torch.nn.Parameter(torch.randn(64, generator=torch.Generator().manual_seed(99)))


# -- asynchronous SGD -------------------------------------------------------------------------------------


def follow_slopes(strategy, rate, steps, own_fabric):
    replicator = Replicator(strategy, own_fabric)
    replica = replicator.replicate("x", Point(*START), lambda p: torch.optim.SGD(p, lr=rate))
    if is_centre(own_fabric):
        return keep(replicator, own_fabric)
    pace = np.random.default_rng([9, own_fabric.rank])
    for step in range(steps):
        own_fabric.compute(pace.uniform(0, 3e-4))
        replica.follow(slope(own_fabric.rank, step, replica.params.detach()))
    finish(replicator, own_fabric)
    return replica.params.detach().clone()


def asynchronous_sgd(centre, effective_rate):
    """v_{k+1} = v_k - rate g(v_{k-d}), by hand from who pushed when and of which version."""
    versions, steps = [torch.tensor(START, dtype=torch.float64)], {}
    for sender, _, _, note in centre.watched.received:
        if note >= 0:
            step = steps[sender] = steps.get(sender, -1) + 1
            g = slope(sender, step, versions[int(note)])
            versions.append(versions[-1] - effective_rate * g)
    return versions


@pytest.mark.parametrize(
    ("strategy", "rate"),
    [
        (DPSGD(threads=1, local_updates=1, wait=True, global_learning_rate=0.5), 0.1),
        (ParameterServer(), 0.05),
    ],
    ids=["dpsgd", "parameter server"],
)
def test_with_p_1_and_b_1_it_is_asynchronous_sgd_with_step_rho_eta_as_a_parameter_server(strategy, rate):
    delays = set()
    for seed in range(30):
        fabric = SimulatedFabric(4, seed=seed, latency=(0.0, 2e-4))
        *_, centre = fabric.run([functools.partial(follow_slopes, strategy, rate, 8)] * 4)
        versions = asynchronous_sgd(centre, 0.05)
        assert len(versions) == 25
        torch.testing.assert_close(centre.params, versions[-1], rtol=1e-12, atol=1e-12)
        notes = [note for *_, note in centre.watched.received if note >= 0]
        delays |= {k - int(note) for k, note in enumerate(notes)}
    assert {0, 1, 2} <= delays  # it was asynchronous


@pytest.mark.parametrize("seed", range(20))
def test_under_the_very_same_schedule_both_come_to_the_same(seed):
    """A schedule: who reads its parameters and takes a gradient, and who steps, in a drawn order."""
    order = np.random.default_rng(seed).integers(3, size=60).tolist()
    strategies = [DPSGD(threads=1, local_updates=1, wait=True, global_learning_rate=0.25), ParameterServer()]
    ends = []
    for strategy, eta in zip(strategies, (0.2, 0.05), strict=True):
        company = Company(strategy, 3, start=2.0, optimizer=functools.partial(torch.optim.SGD, lr=eta))
        read, history = {}, []
        for turn, rank in enumerate(order):
            if rank in read:
                company.step(rank, read.pop(rank))
            else:
                x = torch.tensor([company.value(rank)], dtype=torch.float64)
                read[rank] = slope(rank, turn, x).item()
            history.append(company.value())
        ends.append(history)
    np.testing.assert_allclose(*ends, rtol=1e-12, atol=1e-12)


# -- lock-free SGD ----------------------------------------------------------------------------------------


def noted(problem, strategy, own_fabric):
    """Learn, and put into the log each gradient as it enters an update, and the step count it sees."""
    replicator = Replicator(strategy, own_fabric)
    replica = replicator.replicate(
        "model", problem.net(own_fabric.rank), OPTIMIZERS[problem.optimizer], **problem.options()
    )
    if is_centre(own_fabric):
        return keep(replicator, own_fabric)
    update = replica.update

    def noted_update():
        own_fabric.note("update", (replica.grad.clone(), replica.steps_taken()))
        update()

    replica.update = noted_update
    result = problem._run(replica, UPDATES, (own_fabric.rank,))
    finish(replicator, own_fabric)
    result.state = replica.state()
    result.strategy = replicator.bound_replicas["model"].strategy.state()
    return result


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("optimizer", SHARED)
def test_one_node_is_hogwild_to_the_bit(optimizer, wait):
    """u, the moments and the count of steps are those of one replica on all gradients in their order."""
    problem = Problem(optimizer=optimizer, clip=0.3, scheduled=True, grouped=True, float32=True)
    strategy = DPSGD(global_learning_rate=1.0, threads=0, local_updates=1, wait=wait)
    rounds = 0
    for seed in range(2):
        fabric = SimulatedFabric(4, seed=seed)
        *found, centre = fabric.run([functools.partial(noted, problem, strategy)] * 4)
        updates = [e.detail for e in fabric.log if e.kind == "update"]
        assert len(updates) == 3 * UPDATES
        oracle = Replica("model", problem.net(), OPTIMIZERS[optimizer], **problem.options())
        for count, (gradient, steps) in enumerate(updates):
            assert steps == count
            oracle.follow(gradient)
        expected = oracle.state()
        for result in found:
            assert same(result.state["params"], expected["params"])
            assert same(result.state["optimizer"], expected["optimizer"])
        rounds += found[0].exchanges[-1].round
        # and v is what was pushed: u as it then was
        assert torch.equal(centre.params, found[0].strategy["base"])
    assert rounds >= 4


def test_moments_are_one_within_a_node_and_apart_between_nodes():
    def member(own_fabric):
        replicator = Replicator(DPSGD(global_learning_rate=1.0, threads=2), own_fabric)
        return replicator.replicate("x", Point(*START), OPTIMIZERS["rmsprop"])

    replicas = SimulatedFabric(5, seed=0).run([member] * 5)
    homes = [
        (r.params.data_ptr(), *(v.data_ptr() for s in r.optimizer.state.values() for v in s.values()))
        for r in replicas
    ]
    assert homes[0] == homes[1]
    assert homes[2] == homes[3]
    for one, other in ((0, 2), (0, 4), (2, 4)):
        assert not set(homes[one]) & set(homes[other])
    assert len({r.grad.data_ptr() for r in replicas}) == 5


# -- least squares ----------------------------------------------------------------------------------------


class TestLeastSquares:
    @pytest.mark.parametrize(
        "strategy",
        [
            DPSGD(threads=1, local_updates=5, wait=True, global_learning_rate=0.5),
            DPSGD(threads=2, local_updates=2, batch=2, global_learning_rate=0.5),
            DPSGD(global_learning_rate=1.0, threads=0, local_updates=3),
            DPSGD(threads=1, local_updates=4, global_learning_rate=0.2, global_momentum=0.5),
        ],
        ids=["p 1", "p 2, M 2", "one node", "momentum"],
    )
    def test_without_noise_it_comes_to_the_optimum(self, strategy):
        _, centre = LeastSquares(strategy, sigma=0.0, steps=700).run(4)
        assert float((centre.params - GOAL).norm()) < 1e-3 * float(GOAL.norm())

    def test_with_noise_it_stays_within_the_ball_of_its_rounds_with_the_delay_they_have(self):
        """A round moves v by rho (1 - (1 - eta h)^B) of where its node began, with B steps' noise."""
        B, rho = 4, 0.5
        problem = LeastSquares(
            DPSGD(threads=1, local_updates=B, wait=True, global_learning_rate=rho), steps=1600, every=B
        )
        looks, centre = problem.run(3)
        measured = float(torch.cat(looks).square().mean())
        notes = [note for *_, note in centre.watched.received if note >= 0]
        longest = int(max(k - note for k, note in enumerate(notes)))
        eta = problem.eta

        def ball(delay):
            def at(h):
                keeps = 1 - eta * h
                noise = rho * eta * sum(keeps ** (2 * j) for j in range(B)) ** 0.5
                return delayed_ball(rho * (1 - keeps**B), noise, delay)

            return over_curvatures(at)

        assert longest > 1
        assert 0.9 * ball(0) < measured < 1.1 * ball(longest)

    def test_corollary_1s_rates_keep_the_ball_small_where_unscaled_ones_do_not(self):
        """p = 3, B = 9, M = 2 at one start of rates: noise falls with eta and rho, and still it arrives."""
        sizes = []
        for scale in (True, False):
            strategy = DPSGD(global_learning_rate=1.0, threads=3, local_updates=9, batch=2, scale_rates=scale)
            looks, _ = LeastSquares(strategy, eta=0.2, steps=500).run(6)
            sizes.append(float(torch.cat(looks).square().mean()))
        assert sizes[0] < 0.7 * sizes[1]
