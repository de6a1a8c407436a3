"""Push-sum keeps its sums: over replicas and messages in flight, under every schedule and every fault."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import numpy as np
import pytest
import torch

from laws.mass import DIMENSION, Ledger, Shares, sgd, weighed
from laws.problems import Point
from murmurate.fabric.simulated.fabric import Crashed, MailFaults, SimulatedFabric
from murmurate.replicator.replicator import Replicator
from murmurate.strategies.push_gossip import PushGossip
from murmurate.strategies.push_sum import PushSum
from murmurate.topology import topologies

HARD = MailFaults(loss=0.3, duplication=0.3, reordering=0.5, resend_seconds=3e-4)


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.02)


@pytest.mark.parametrize("name", topologies())
def test_the_sums_are_constant_under_loss_duplication_and_reordering(name):
    """Sum of x = starts + all optimizers' steps, sum of w = members, after each step of each member."""
    heard = 0
    for seed in range(5):
        case = Shares(topology=name, make_optimizer=(sgd, adam)[seed % 2], faults=HARD, updates=14)
        _, ledger, found = case.run(seed)
        assert ledger.checks >= case.size * (case.updates - 4)
        assert ledger.largest_error < 1e-12
        assert ledger.put_in[-1] == case.size
        heard += sum(exchange.heard - 1 for exchanges, _ in found for exchange in exchanges)
    assert heard > 5 * case.size


def test_without_the_mended_mail_the_ledger_finds_what_is_lost():
    """That it can tell: the same faults let through break the sums."""
    case = Shares(faults=dataclasses.replace(HARD, reliable=False))
    broken = 0
    for seed in range(5):
        try:
            case.run(seed)
        except (AssertionError, IndexError):  # a message that was never due, or not in its order
            broken += 1
    assert broken == 5


@pytest.mark.parametrize("name", topologies())
def test_a_crash_removes_exactly_what_the_dead_one_had_and_all_are_notified(name):
    case = Shares(topology=name, updates=12)
    crashed = notified = 0
    for call in (20, 33, 47, 61, 80):
        fabric, ledger, found = case.run(call, crashes={1: call})
        if not isinstance(found[1], Crashed):
            continue
        crashed += 1
        assert ledger.largest_error < 1e-12
        lost = ledger.lost_with(1)
        assert lost[-1] > 0
        np.testing.assert_allclose(ledger.total(without=(1,)), ledger.put_in - lost, rtol=0, atol=1e-12)
        assert [e.rank for e in fabric.log if e.kind == "crash"] == [1]
        told = {who for who, kind, whom in ledger.told if (kind, whom) == ("died", 1)}
        after = itertools.dropwhile(lambda e: e.kind != "crash", fabric.log)
        shown = [e.rank for e in after if e.kind == "publish"]
        went_on = {rank for rank in (0, 2, 3) if shown.count(rank) > 1}
        assert went_on <= told <= {0, 2, 3}
        notified += len(went_on)
    assert crashed >= 3
    assert notified >= 3


# -- the true mean ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", topologies())
def test_without_gradients_all_come_to_the_true_mean(name):
    case = Shares(topology=name, still=True, updates=90, haste=2e-4)
    _, _, found = case.run(0)
    for _, z in found:
        np.testing.assert_allclose(z, case.starts(0).mean(axis=0), rtol=0, atol=1e-3)


def pushing(strategy, seed, updates, own_fabric):
    replicator = Replicator(strategy, own_fabric)
    replica = replicator.replicate("x", Point(0.0), sgd)
    replica.params.data.fill_(float(own_fabric.rank))
    replicator.bound_replicas["x"].strategy.attach(replica, replicator.bound_replicas["x"].channel)
    pace = np.random.default_rng([seed, own_fabric.rank])
    for _ in range(updates):
        own_fabric.compute(pace.uniform(0, 1e-4) * (1 + 3 * own_fabric.rank))
        replica.follow(torch.zeros(1, dtype=torch.float64))
    return replica.params.item()


def test_plain_push_gossip_agrees_on_something_else():
    """From 0, 1, 2 the mean is 1. Both agree; push-sum on 1, unweighted pushes on what chance made of it."""

    def ends(strategy, seed):
        role = functools.partial(pushing, strategy, seed, 80)
        return SimulatedFabric(3, seed=seed, latency=(0.0, 2e-4)).run([role] * 3)

    missed = []
    for seed in range(8):
        plain = ends(PushGossip(seed=seed), seed)
        assert max(plain) - min(plain) < 0.02
        missed.append(abs(np.mean(plain) - 1.0))
        assert ends(PushSum(), seed) == pytest.approx([1.0] * 3, abs=1e-3)
    assert np.median(missed) > 0.1


def test_weights_stay_away_from_zero_and_a_straggler_does_not_drain_the_others():
    """One member forty times slower: what it is sent it is sent once a step, so the rest keep theirs."""
    least, most = [], []

    def member(ledger, own_fabric):
        start = np.zeros(DIMENSION)
        replicator, replica = weighed(PushSum(topology="ring"), own_fabric, ledger, start, sgd)
        strategy = replicator.bound_replicas["x"].strategy
        for _ in range(5 if own_fabric.rank == 0 else 200):
            own_fabric.compute(4e-3 if own_fabric.rank == 0 else 1e-4)
            replica.follow(torch.zeros(DIMENSION, dtype=torch.float64))
            (most if own_fabric.rank == 0 else least).append(strategy._weight)

    SimulatedFabric(4, seed=1).run([functools.partial(member, Ledger(4))] * 4)
    assert min(least) >= 0.5 - 1e-12
    assert max(most) <= 2.5 + 1e-12


# -- checkpoints ------------------------------------------------------------------------------------


def saving(case, seed, ledger, kept, own_fabric, *, asked=((1, 4), (2, 9))):
    """Learn, and save checkpoint k where its own step comes; all at other times, none stops for it."""
    start = case.starts(seed)[own_fabric.rank]
    replicator, replica = weighed(PushSum(topology=case.topology), own_fabric, ledger, start, sgd)
    pace = np.random.default_rng([seed, own_fabric.rank])
    due = {step + int(pace.integers(4)): number for number, step in asked}
    for step in range(case.updates):
        own_fabric.compute(pace.uniform(0, case.haste))
        replica.follow(case.gradient(own_fabric.rank, step, replica))
        if step in due:
            drained = replicator.drain(due[step], 5.0)
            kept.append((due[step], own_fabric.rank, drained, replicator.state()))
    replicator.drain(1 << 40, 5.0)


def saved_sum(kept, number):
    """Over the replicas' files of checkpoint ``number``: the sums [d + 1]."""
    rows = []
    for at, _, drained, state in kept:
        if at == number:
            assert drained
            own = state["x"]["strategy"]
            rows.append(np.append(own["sum"].numpy(), own["weight"]))
            z = state["x"]["replica"]["params"]["x"].numpy()
            np.testing.assert_allclose(z, rows[-1][:-1] / rows[-1][-1], rtol=0, atol=1e-15)
    return len(rows), np.sum(rows, axis=0)


@pytest.mark.parametrize("name", topologies())
def test_a_checkpoint_holds_all_mass_once_though_each_saves_at_another_time(name):
    """Without gradients the sums over the files are those of the start; with them no weight is missing."""
    for seed, still in itertools.product(range(4), (True, False)):
        case = Shares(topology=name, still=still, updates=16, faults=HARD)
        ledger, kept = Ledger(case.size), []
        role = functools.partial(saving, case, seed, ledger, kept)
        SimulatedFabric(case.size, seed=seed, latency=(0.0, 3e-4), mail_faults=HARD).run([role] * case.size)
        for number in (1, 2):
            files, sums = saved_sum(kept, number)
            assert files == case.size
            assert sums[-1] == pytest.approx(case.size, abs=1e-12)
            if still:
                np.testing.assert_allclose(sums[:-1], case.starts(seed).sum(axis=0), rtol=0, atol=1e-12)
        # at the very end nothing is in flight at all
        np.testing.assert_allclose(
            np.sum([ledger.has(rank) for rank in range(case.size)], axis=0), ledger.put_in, rtol=0, atol=1e-12
        )


def test_a_checkpoint_that_one_member_skipped_spoils_no_later_one():
    """Rank 0 was asked for 1 and 2 at once and answers 2 alone, as a member does that stood still."""
    for seed in range(8):
        case = Shares(still=True, updates=16)
        ledger, kept = Ledger(case.size), []
        roles = [functools.partial(saving, case, seed, ledger, kept, asked=((2, 9),))]
        roles += [functools.partial(saving, case, seed, ledger, kept)] * (case.size - 1)
        SimulatedFabric(case.size, seed=seed, latency=(0.0, 3e-4)).run(roles)
        files, sums = saved_sum(kept, 2)
        assert files == case.size
        np.testing.assert_allclose(sums[:-1], case.starts(seed).sum(axis=0), rtol=0, atol=1e-12)
        assert sums[-1] == pytest.approx(case.size, abs=1e-12)


def test_a_peer_that_does_not_answer_costs_the_checkpoint_and_no_mass():
    """The others go on after the deadline, and what they had held back they take in."""
    case = Shares(still=True, size=3, updates=30)
    ledger, answers = Ledger(3), []

    def member(own_fabric):
        replicator, replica = weighed(PushSum(), own_fabric, ledger, case.starts(0)[own_fabric.rank], sgd)
        for step in range(case.updates):
            own_fabric.compute(1e-4)
            replica.follow(torch.zeros(DIMENSION, dtype=torch.float64))
            if step == 10 and own_fabric.rank == 2:
                own_fabric.compute(1.0)
            elif step == 10:
                answers.append(replicator.drain(1, 0.5))
            ledger.check()
        answers.append(replicator.drain(2, 5.0))

    SimulatedFabric(3, seed=0).run([member] * 3)
    assert answers == [False, False, True, True, True]
    np.testing.assert_allclose(sum(ledger.has(r) for r in range(3)), ledger.put_in, rtol=0, atol=1e-12)


def test_a_checkpoint_after_a_death_is_of_the_living():
    case = Shares(still=True, updates=16)
    for seed in range(4):
        ledger, kept = Ledger(case.size), []
        role = functools.partial(saving, case, seed, ledger, kept)
        found = SimulatedFabric(case.size, seed=seed, latency=(0.0, 3e-4), crashes={2: 30}).run(
            [role] * case.size
        )
        assert isinstance(found[2], Crashed)
        files, sums = saved_sum([line for line in kept if line[1] != 2], 2)
        assert files == case.size - 1
        lost = ledger.lost_with(2)
        np.testing.assert_allclose(sums, ledger.put_in - lost, rtol=0, atol=1e-12)


def test_resumed_from_a_checkpoint_the_sums_go_on():
    case = Shares(still=True, updates=12)
    ledger, kept = Ledger(case.size), []
    role = functools.partial(saving, case, 3, ledger, kept, asked=((1, 5),))
    SimulatedFabric(case.size, seed=3, latency=(0.0, 3e-4), mail_faults=HARD).run([role] * case.size)
    states = {rank: state for _, rank, _, state in kept}

    def go_on(own_fabric):
        replicator = Replicator(PushSum(), own_fabric)
        replica = replicator.replicate("x", Point(*[0.0] * DIMENSION), sgd)
        replicator.load(states[own_fabric.rank])
        own_fabric.channel("loaded", torch.zeros(1)).gather(torch.zeros(1))
        replicator.resumed()
        for _ in range(60):
            replica.follow(torch.zeros(DIMENSION, dtype=torch.float64))
        assert replicator.drain(1, 5.0)
        own = replicator.bound_replicas["x"].strategy
        return own._sum.numpy().copy(), own._weight, replica.params.detach().numpy().copy()

    found = SimulatedFabric(case.size, seed=9, latency=(0.0, 1e-4)).run([go_on] * case.size)
    mean = case.starts(3).mean(axis=0)
    np.testing.assert_allclose(sum(x for x, *_ in found), case.size * mean, rtol=0, atol=1e-12)
    assert sum(w for _, w, _ in found) == pytest.approx(case.size, abs=1e-12)
    for *_, z in found:
        np.testing.assert_allclose(z, mean, rtol=0, atol=1e-3)
