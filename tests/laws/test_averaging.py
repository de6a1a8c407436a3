"""Synchronous strategies: all-reduce is one replica on the joined batch, local SGD is one now and then.

Tables of n and optimizers, each under several schedules of the simulated fabric: 50 and more for each
strategy, all with the same result to the bit.
"""

from __future__ import annotations

import functools
from types import MappingProxyType

import pytest
import torch

from laws.problems import LINEAR, OPTIMIZERS, Point, Problem, same, slope
from murmurate.errors import Refusal
from murmurate.fabric.simulated.fabric import SimulatedFabric
from murmurate.replica.vector import Replica
from murmurate.replicator.replicator import Replicator
from murmurate.strategies.all_reduce import AllReduce
from murmurate.strategies.local_sgd import LocalSGD

UPDATES = 8
SIZES = (2, 3, 4, 5)


def together(strategy, problem, size, seed=0, updates=UPDATES):
    fabric = SimulatedFabric(size, seed=seed)
    return fabric.run([functools.partial(problem.learn, strategy, updates)] * size)


def distance(one, other):
    return float((one - other).norm() / other.norm())


class TestAllReduce:
    @pytest.mark.parametrize("size", SIZES)
    @pytest.mark.parametrize("optimizer", OPTIMIZERS)
    def test_equals_one_replica_on_the_joined_batch(self, optimizer, size):
        problem = Problem(optimizer=optimizer)
        whole = problem.alone(UPDATES, range(size))
        for seed in (size, 100 + size):
            for found in together(AllReduce(), problem, size, seed):
                torch.testing.assert_close(found.params, whole.params, rtol=1e-12, atol=1e-12)

    @pytest.mark.parametrize("optimizer", OPTIMIZERS)
    def test_clips_and_schedules_the_mean_as_the_whole_would(self, optimizer):
        """A clip that always bites: clipped shares averaged would be something else."""
        problem = Problem(optimizer=optimizer, clip=0.05, scheduled=True, grouped=True)
        whole = problem.alone(UPDATES, range(3))
        for found in together(AllReduce(), problem, 3):
            torch.testing.assert_close(found.params, whole.params, rtol=1e-12, atol=1e-12)
            assert found.state["learning_rates"] == whole.state["learning_rates"]

    def test_is_the_same_to_the_bit_at_every_step_under_fifty_schedules(self):
        problem = Problem(optimizer="adam", float32=True, clip=0.3)
        first = together(AllReduce(), problem, 4, seed=0)
        assert all(same(found.path, first[0].path) for found in first)
        for seed in range(1, 50):
            again = together(AllReduce(), problem, 4, seed=seed)
            assert all(same(a.state, b.state) for a, b in zip(again, first, strict=True)), seed

    def test_exchange_says_a_round_a_step_and_all_heard(self):
        for found in together(AllReduce(), Problem(), 3):
            assert [tuple(e) for e in found.exchanges] == [(k, 3, 0) for k in range(1, UPDATES + 1)]

    def test_a_death_leaves_the_mean_of_the_living(self):
        """Rank 2 dies; from that round on the other two equal one replica on their two batches."""
        problem = Problem(optimizer="momentum")
        fabric = SimulatedFabric(3, seed=4, crashes={2: 12})
        one, two, dead = fabric.run([functools.partial(problem.learn, AllReduce(), UPDATES)] * 3)
        assert isinstance(dead, BaseException)
        assert same(one.path, two.path)
        heard = [e.heard for e in one.exchanges]
        together_for = heard.count(3)
        assert heard == [3] * together_for + [2] * (UPDATES - together_for)
        assert 0 < together_for < UPDATES
        oracle = Replica("model", problem.net(), OPTIMIZERS["momentum"])
        for step, count in enumerate(heard):
            oracle.descend(problem.loss(oracle.module, [problem.batch(r, step) for r in range(count)]))
            torch.testing.assert_close(one.path[step], oracle.params.detach(), rtol=1e-12, atol=1e-12)


class TestLocalSGD:
    @pytest.mark.parametrize("size", SIZES)
    @pytest.mark.parametrize("optimizer", LINEAR)
    def test_at_every_step_equals_all_reduce_where_updates_are_linear(self, optimizer, size):
        problem = Problem(optimizer=optimizer)
        for seed in range(2):
            mean = together(AllReduce(), problem, size, seed)
            local = together(LocalSGD(period=1), problem, size, seed)
            for found, expected in zip(local, mean, strict=True):
                torch.testing.assert_close(found.params, expected.params, rtol=1e-12, atol=1e-12)

    @pytest.mark.parametrize("optimizer", ["rmsprop", "centered", "adam", "amsgrad"])
    def test_at_every_step_differs_from_all_reduce_where_they_are_not(self, optimizer):
        """Were it equal, the moments would have been averaged too, or the gradient instead."""
        problem = Problem(optimizer=optimizer)
        local, mean = (together(s, problem, 3)[0].params for s in (LocalSGD(period=1), AllReduce()))
        assert distance(local, mean) > 1e-3

    def test_clips_each_share_and_not_the_mean(self):
        problem = Problem(clip=0.05)
        local, mean = (together(s, problem, 3)[0].params for s in (LocalSGD(period=1), AllReduce()))
        assert distance(local, mean) > 1e-4

    @pytest.mark.parametrize("outer", [{"outer_momentum": 0.9}, {"outer_nesterov": True}])
    def test_settings_of_an_outer_optimizer_that_does_not_exist_are_refused(self, outer):
        with pytest.raises(Refusal, match=r"Set outer_learning_rate to 0\.7"):
            LocalSGD(**outer).check(2)

    def test_nesterov_without_a_momentum_is_refused(self):
        with pytest.raises(Refusal, match=r"Set outer_momentum to 0\.9, or leave out outer_nesterov"):
            LocalSGD(outer_learning_rate=0.7, outer_nesterov=True).check(2)

    @pytest.mark.parametrize("outer", [{}, {"outer_learning_rate": 0.7, "outer_momentum": 0.9}])
    def test_all_agree_after_each_round_and_only_then(self, outer):
        for seed in range(25):
            found = together(LocalSGD(period=3, **outer), Problem(optimizer="adam"), 3, seed)
            for step, vectors in enumerate(zip(*(f.path for f in found), strict=True), start=1):
                agreed = all(torch.equal(x, vectors[0]) for x in vectors)
                assert agreed == (step % 3 == 0)

    def test_exchange_has_the_round_the_number_heard_and_the_steps_since(self):
        (found, *_) = together(LocalSGD(period=3), Problem(), 2, updates=7)
        expected = [(0, 1, 1), (0, 1, 2), (1, 2, 0), (1, 1, 1), (1, 1, 2), (2, 2, 0), (2, 1, 1)]
        assert [tuple(e) for e in found.exchanges] == expected

    @pytest.mark.parametrize(
        ("rate", "momentum", "nesterov"),
        [(None, 0.0, False), (1.0, 0.0, False), (0.5, 0.0, False), (0.7, 0.9, False), (0.7, 0.9, True)],
    )
    @pytest.mark.parametrize("size", [1, 2, 3])
    def test_the_outer_optimizer_is_the_oracle(self, rate, momentum, nesterov, size):
        strategy = LocalSGD(
            period=4, outer_learning_rate=rate, outer_momentum=momentum, outer_nesterov=nesterov
        )
        found = SimulatedFabric(size, seed=size).run([functools.partial(descend_slopes, strategy)] * size)
        for x, expected in zip(found, local_sgd_by_hand(size, 4, rate, momentum, nesterov), strict=True):
            torch.testing.assert_close(x, expected, rtol=1e-12, atol=1e-12)

    @pytest.mark.parametrize("rate", [None, 0.5])
    def test_the_outer_optimizer_goes_on_from_rewritten_parameters(self, rate):
        strategy = LocalSGD(period=4, outer_learning_rate=rate, outer_momentum=0.9 if rate else 0.0)
        found = SimulatedFabric(3, seed=5).run(
            [functools.partial(descend_slopes, strategy, rewritten=_REWRITTEN)] * 3
        )
        expected = local_sgd_by_hand(3, 4, rate, 0.9, False, _REWRITTEN)
        for x, by_hand in zip(found, expected, strict=True):
            torch.testing.assert_close(x, by_hand, rtol=1e-12, atol=1e-12)

    def test_parameters_rewritten_within_a_round_are_averaged_with_the_others_at_its_end(self):
        strategy = LocalSGD(period=4, outer_learning_rate=0.5)
        found = SimulatedFabric(2, seed=5).run([_rewrites_within_a_round(strategy)] * 2)
        assert found == [[-2.0]] * 2  # from 8 half of the way to the mean, -12

    def test_a_death_leaves_the_mean_of_the_living(self):
        fabric = SimulatedFabric(3, seed=1, crashes={1: 6})
        strategy = LocalSGD(period=2)
        one, dead, two = fabric.run([functools.partial(Problem().learn, strategy, UPDATES)] * 3)
        assert isinstance(dead, BaseException)
        assert torch.equal(one.params, two.params)
        assert one.exchanges[-1].heard == 2

    @pytest.mark.parametrize("period", [0, -1])
    def test_a_period_below_one_is_an_error(self, period):
        with pytest.raises(ValueError, match=r"period is .* at least 1"):
            LocalSGD(period=period)


_STEPS, _INNER = 14, 0.1
_REWRITTEN = {8: [5.0, 6.0, -7.0]}  # parameters by the step before which they are overwritten


def descend_slopes(strategy, member, rewritten=MappingProxyType({})):
    replica = Replicator(strategy, member).replicate(
        "x", Point(2.0, -1.0, 0.5), lambda p: torch.optim.SGD(p, lr=_INNER)
    )
    for step in range(_STEPS):
        if step in rewritten:
            replica.params.data.copy_(torch.tensor(rewritten[step], dtype=torch.float64))
            replica.rewritten()
        replica.follow(slope(member.rank, step, replica.params.detach()))
    return replica.params.detach().clone()


def _rewrites_within_a_round(strategy):
    """A round of no gradients, in whose middle ranks 0 and 1 write -20 and -4 in place of 8."""

    def member(fabric):
        replica = Replicator(strategy, fabric).replicate(
            "x", Point(8.0), lambda p: torch.optim.SGD(p, lr=1.0)
        )
        for step in range(4):
            if step == 2:
                replica.params.data.fill_(-4.0 if fabric.rank else -20.0)
                replica.rewritten()
            replica.follow(torch.zeros(1, dtype=torch.float64))
        return replica.params.tolist()

    return member


def local_sgd_by_hand(size, period, rate, momentum, nesterov, rewritten=MappingProxyType({})):
    """Zhang 2022, Algorithm 5, with FedOpt's outer step: d = v - mean; m = mu m + d; v = v - eta (d + mu
    m)."""
    v = torch.tensor([2.0, -1.0, 0.5], dtype=torch.float64)
    xs, m = [v.clone() for _ in range(size)], torch.zeros(3, dtype=torch.float64)
    for step in range(_STEPS):
        if step in rewritten:
            v = torch.tensor(rewritten[step], dtype=torch.float64)
            xs = [v.clone() for _ in range(size)]
        xs = [x - _INNER * slope(rank, step, x) for rank, x in enumerate(xs)]
        if (step + 1) % period == 0:
            mean = sum(xs) / size
            if rate is None:
                v = mean
            else:
                d = v - mean
                m = momentum * m + d
                v = v - rate * (d + momentum * m if nesterov else m)
            xs = [v.clone() for _ in range(size)]
    return xs
