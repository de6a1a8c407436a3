"""With one replica, every strategy is solo: agreeing with nobody must cost not a single bit."""

from __future__ import annotations

import functools

import pytest
import torch

from covering import pairwise
from laws.problems import OPTIMIZERS, TYPICAL_OPTIMIZERS, Problem, same
from murmurate.fabric.simulated.fabric import SimulatedFabric
from murmurate.replica.vector import Replica
from murmurate.replicator.replicator import Replicator
from murmurate.strategies.all_reduce import AllReduce
from murmurate.strategies.gala import GALA
from murmurate.strategies.hogwild import Hogwild
from murmurate.strategies.local_sgd import LocalSGD
from murmurate.strategies.solo import Solo

UPDATES = 9
EXACT = [
    Solo(),
    AllReduce(),
    LocalSGD(period=1),
    LocalSGD(period=4),
    Hogwild(),
    Hogwild(shared_moments=False),
    GALA(),
    GALA(topology="exponential", staleness_bound=2),
]
VARIANTS = {
    "plain": Problem(),
    "clipped": Problem(clip=0.3),
    "scheduled": Problem(scheduled=True),
    "grouped": Problem(grouped=True),
    "float32": Problem(float32=True, clip=0.3, grouped=True, scheduled=True),
    "bfloat16": Problem(bfloat16=True, clip=0.3, scheduled=True),
}


def words(strategy):
    return repr(strategy).replace("'", "")


def variant(name, optimizer):
    fields = VARIANTS[name].__dict__ | {"optimizer": optimizer}
    return Problem(**fields)


@functools.cache
def solo(name, optimizer):
    return variant(name, optimizer).alone(UPDATES)


def alone(strategies):
    """Every strategy, variant and optimizer, and every pair of them: a step is one ``update()``."""
    cases = pairwise(strategies, VARIANTS, OPTIMIZERS, possible=carries)
    return [pytest.param(*case, id=f"{words(case[0])}-{case[1]}-{case[2]}") for case in cases]


def carries(strategy, name, optimizer):
    """Shared moments refuse dampening, as tests/laws/test_hogwild.py shows."""
    return optimizer != "dampened" or not getattr(strategy, "shared_moments", False)


@pytest.mark.parametrize(("strategy", "name", "optimizer"), alone(EXACT))
def test_bit_for_bit(strategy, name, optimizer):
    problem = variant(name, optimizer)
    expected = solo(name, optimizer)
    (found,) = SimulatedFabric(1, seed=3).run([functools.partial(problem.learn, strategy, UPDATES)])
    assert same(found.path, expected.path)
    assert same(found.state, expected.state)
    assert not torch.equal(found.path[0], found.path[-1])


@pytest.mark.parametrize("optimizer", TYPICAL_OPTIMIZERS)
@pytest.mark.parametrize("variety", [{}, {"clip": 0.3, "scheduled": True, "grouped": True}])
def test_an_outer_optimizer_of_rate_one_is_solo_up_to_rounding(optimizer, variety):
    """v - (v - u) is not u in floating point, so here equality has a width."""
    outer = LocalSGD(period=2, outer_learning_rate=1.0)
    exact = Problem(optimizer=optimizer, **variety)
    (found,) = SimulatedFabric(1, seed=0).run([functools.partial(exact.learn, outer, UPDATES)])
    torch.testing.assert_close(found.params, exact.alone(UPDATES).params, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("optimizer", TYPICAL_OPTIMIZERS)
def test_an_outer_optimizer_of_rate_one_moves_two_ulp_a_round_in_float32(optimizer):
    """Each round from the same vector: the gradient is followed, not recomputed, so nothing amplifies."""
    problem = Problem(optimizer=optimizer, float32=True)

    def learn(fabric):
        make = OPTIMIZERS[problem.optimizer]
        ours = Replicator(LocalSGD(period=1, outer_learning_rate=1.0), fabric).replicate(
            "model", problem.net(), make
        )
        plain = Replica("plain", problem.net(), make)
        worst = 0.0
        for step in range(30):
            gradient = torch.randn(len(ours), generator=torch.Generator().manual_seed(step))
            before = plain.params.detach().abs()
            ours.params.data.copy_(plain.params.data)
            ours.follow(gradient)
            plain.follow(gradient)
            largest = torch.maximum(before, plain.params.detach().abs())
            ulp = torch.nextafter(largest, torch.full_like(largest, torch.inf)) - largest
            worst = max(worst, ((ours.params - plain.params).abs() / ulp).max().item())
        return worst

    (worst,) = SimulatedFabric(1, seed=0).run([learn])
    assert worst <= 2.0


@pytest.mark.parametrize("strategy", [*EXACT, LocalSGD(period=2, outer_learning_rate=1.0)], ids=words)
def test_alone_each_strategy_is_always_in_agreement_with_itself(strategy):
    (found,) = SimulatedFabric(1, seed=0).run([functools.partial(Problem().learn, strategy, UPDATES)])
    period = getattr(strategy, "period", 1)
    assert [e.round for e in found.exchanges] == [k // period for k in range(1, UPDATES + 1)]
    assert [e.staleness for e in found.exchanges] == [k % period for k in range(1, UPDATES + 1)]
    assert all(e.heard == 1 for e in found.exchanges)
