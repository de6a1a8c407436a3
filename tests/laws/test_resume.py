"""Saved and loaded equals uninterrupted, to the bit: each optimizer, each strategy, each in-between state."""

from __future__ import annotations

import functools

import pytest
import torch

from laws.problems import OPTIMIZERS, Problem, same
from murmurate.fabric.simulated.fabric import SimulatedFabric
from murmurate.replica.vector import Replica
from murmurate.replicator.replicator import Replicator
from murmurate.strategies.all_reduce import AllReduce
from murmurate.strategies.gala import GALA
from murmurate.strategies.hogwild import Hogwild
from murmurate.strategies.local_sgd import LocalSGD
from murmurate.strategies.solo import Solo

BEFORE, AFTER = 5, 6
FULL = {"clip": 0.3, "scheduled": True, "grouped": True}


def replicated(problem, strategy, fabric):
    replicator = Replicator(strategy, fabric)
    replica = replicator.replicate(
        "model", problem.net(fabric.rank), OPTIMIZERS[problem.optimizer], **problem.options()
    )
    return replicator, replica


def in_turns(problem, replicator, replica, start, updates, fabric):
    """One after the other, so that even asynchronous members have one possible history."""
    barrier = fabric.channel(f"barrier {start}", torch.zeros(1))
    exchanges = []
    for step in range(start, start + updates):
        for rank in range(fabric.size):
            if rank == fabric.rank:
                result = problem._run(replica, 1, (rank,), step)
                exchanges += result.exchanges
            barrier.gather(torch.zeros(1))
    return exchanges


def uninterrupted(problem, strategy, fabric):
    replicator, replica = replicated(problem, strategy, fabric)
    in_turns(problem, replicator, replica, 0, BEFORE, fabric)
    kept = replicator.state()
    exchanges = in_turns(problem, replicator, replica, BEFORE, AFTER, fabric)
    return kept, exchanges, replicator.state()


def resumed(problem, strategy, kept, fabric):
    replicator, replica = replicated(problem, strategy, fabric)
    fabric.channel("start", torch.zeros(1)).gather(torch.zeros(1))
    replicator.load(kept[fabric.rank])
    fabric.channel("loaded", torch.zeros(1)).gather(torch.zeros(1))
    exchanges = in_turns(problem, replicator, replica, BEFORE, AFTER, fabric)
    return exchanges, replicator.state()


SYNCHRONOUS = [
    AllReduce(),
    LocalSGD(period=3),
    LocalSGD(period=3, outer_learning_rate=0.7, outer_momentum=0.9, outer_nesterov=True),
    LocalSGD(period=9, outer_learning_rate=0.7, outer_momentum=0.9),
]


@pytest.mark.parametrize("strategy", SYNCHRONOUS, ids=repr)
@pytest.mark.parametrize("optimizer", ["nesterov", "rmsprop", "adamw"])
@pytest.mark.parametrize("low", [False, True])
def test_resumed_equals_uninterrupted_for_synchronous_strategies(strategy, optimizer, low):
    problem = Problem(optimizer=optimizer, bfloat16=low, **FULL)

    def learn(fabric):
        replicator, replica = replicated(problem, strategy, fabric)
        problem._run(replica, BEFORE, (fabric.rank,))
        kept = replicator.state()
        exchanges = problem._run(replica, AFTER, (fabric.rank,), BEFORE).exchanges
        return kept, exchanges, replicator.state()

    def go_on(fabric):
        replicator, replica = replicated(problem, strategy, fabric)
        replicator.load(kept[fabric.rank])
        return problem._run(replica, AFTER, (fabric.rank,), BEFORE).exchanges, replicator.state()

    kept, *expected = zip(*SimulatedFabric(3, seed=0).run([learn] * 3), strict=True)
    found = zip(*SimulatedFabric(3, seed=1).run([go_on] * 3), strict=True)
    assert same(list(found), expected)


@pytest.mark.parametrize("strategy", [Hogwild(), Solo(), Hogwild(shared_moments=False)], ids=repr)
@pytest.mark.parametrize("optimizer", ["nesterov", "rmsprop", "adamw"])
def test_resumed_equals_uninterrupted_in_turns(strategy, optimizer):
    size = 1 if isinstance(strategy, Solo) else 3
    problem = Problem(optimizer=optimizer, **FULL)
    whole = functools.partial(uninterrupted, problem, strategy)
    kept, *expected = zip(*SimulatedFabric(size, seed=0).run([whole] * size), strict=True)
    if isinstance(strategy, Hogwild):  # what is shared is saved by all; here at the same time by all
        kept = [kept[-1]] * size if strategy.shared_moments else kept
    part = functools.partial(resumed, problem, strategy, kept)
    found = list(zip(*SimulatedFabric(size, seed=1).run([part] * size), strict=True))
    ours, theirs = found[1][-1], expected[1][-1]  # the last in turn saw everything
    assert same(ours["model"]["replica"]["params"], theirs["model"]["replica"]["params"])
    assert same(ours["model"]["replica"]["optimizer"], theirs["model"]["replica"]["optimizer"])
    if size > 1:
        assert same(ours["model"]["strategy"], theirs["model"]["strategy"])


def test_gala_goes_on_with_parameters_moments_and_patience_and_publishes_again():
    """Messages in flight are dropped: the first average after a resume waits for new ones."""
    problem = Problem(optimizer="adam", **FULL)
    strategy = GALA(staleness_bound=50)
    kept, _, _ = zip(
        *SimulatedFabric(2, seed=0).run([functools.partial(uninterrupted, problem, strategy)] * 2),
        strict=True,
    )
    part = functools.partial(resumed, problem, strategy, kept)
    (mine, state), (_, _) = SimulatedFabric(2, seed=3).run([part] * 2)
    saved = kept[0]["model"]["strategy"]
    rounds, since = saved["round"], BEFORE + 1 - saved["agreed_at"]
    assert mine[0] == (rounds, 1, since)  # rank 1 has said nothing yet
    assert mine[1].round == rounds + 1
    assert state["model"]["replica"]["clock"] == BEFORE + AFTER
    # the own step before anything is heard is the very step that a lone replica would take
    lone = Replica("model", problem.net(), OPTIMIZERS["adam"], **problem.options())
    lone.load(kept[0]["model"]["replica"])
    problem._run(lone, 1, (0,), BEFORE)

    def one_step(fabric):
        replicator, replica = replicated(problem, strategy, fabric)
        replicator.load(kept[0])
        problem._run(replica, 1, (0,), BEFORE)
        return replicator.state()["model"]["replica"]

    found = SimulatedFabric(2, seed=0, crashes={1: 1}).run([one_step] * 2)[0]
    assert same(found, lone.state())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("low", [False, True])
def test_a_replica_resumes_to_the_bit(optimizer, low):
    problem = Problem(optimizer=optimizer, bfloat16=low, **FULL)
    make = functools.partial(Replica, "model", make_optimizer=OPTIMIZERS[optimizer], **problem.options())
    one = make(module=problem.net())
    problem._run(one, BEFORE, (0,))
    kept = one.state()
    expected = problem._run(one, AFTER, (0,), BEFORE)
    for stale in (0, 3):  # into a fresh replica, and into one that has gone elsewhere
        other = make(module=problem.net(seed=9))
        problem._run(other, stale, (1,))
        other.load(kept)
        found = problem._run(other, AFTER, (0,), BEFORE)
        assert same(found.path, expected.path)
        assert same(found.state, expected.state)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_going_back_to_before_the_first_step_forgets_the_moments(optimizer):
    problem = Problem(optimizer=optimizer)
    one = Replica("model", problem.net(), OPTIMIZERS[optimizer])
    start = one.state()
    expected = problem._run(one, AFTER, (0,))
    one.load(start)
    assert same(problem._run(one, AFTER, (0,)).state, expected.state)


def test_loading_twice_gives_the_state_that_was_saved():
    problem = Problem(optimizer="adam", **FULL)
    one = Replica("model", problem.net(), OPTIMIZERS["adam"], **problem.options())
    problem._run(one, BEFORE, (0,))
    kept = one.state()
    other = Replica("model", problem.net(seed=4), OPTIMIZERS["adam"], **problem.options())
    for _ in range(2):
        other.load(kept)
        assert same(other.state(), kept)
    problem._run(other, 1, (0,), BEFORE)
    assert same(one.state(), kept)  # what was saved shares no memory with what goes on
