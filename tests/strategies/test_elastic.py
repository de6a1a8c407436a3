"""Elastic averaging by hand, asynchronous and in common rounds."""

from __future__ import annotations

import itertools
import re

import pytest
import torch

from laws.problems import Point
from murmurate.errors import Refusal
from murmurate.fabric.interface import FabricError, Message
from murmurate.fabric.simulated.fabric import SimulatedFabric
from murmurate.replicator.replicator import Replicator
from murmurate.strategies.elastic import Elastic, SynchronousElastic, moving_rate
from strategies.manual_fabric import Company


@pytest.mark.parametrize(("given", "replicas", "expected"), [(None, 4, 0.2), (None, 1, 0.8), (0.5, 4, 0.5)])
def test_beta_is_08_over_p_unless_given(given, replicas, expected):
    assert moving_rate(given, replicas) == pytest.approx(expected)


def test_the_defaults_are_the_papers():
    assert (Elastic().moving_rate, Elastic().period) == (None, 10)
    assert (SynchronousElastic().moving_rate, SynchronousElastic().period) == (None, 10)


def test_algorithm_4_by_hand():
    """tau = 2, beta = 1/4: no move at t = 0; from then on first the moves, then the update."""
    company = Company(Elastic(moving_rate=0.25, period=2), 2, start=8.0)
    assert company.step(0, 4.0) == (4.0, 0, 1, 0)
    assert company.step(0, 4.0) == (0.0, 0, 1, 1)
    assert company.step(0, 0.0) == (2.0, 1, 2, 0)  # 0 - (0 - 8)/4; centre 8 + (0 - 8)/4
    assert company.value() == 6.0
    assert company.step(1, -6.0) == (14.0, 0, 1, 0)
    assert company.step(1, 0.0) == (14.0, 0, 1, 1)
    assert company.step(1, 3.0) == (9.0, 1, 2, 0)  # 14 - (14 - 6)/4 = 12, then the update
    assert company.value() == 8.0
    assert company.step(0, 1.0) == (1.0, 1, 1, 1)


def test_what_one_gains_the_other_loses():
    company = Company(Elastic(period=1), 3, start=1.0)
    for rank, gradient in enumerate((-5.0, 3.0, 11.0)):
        company.step(rank, gradient)
    total = sum(company.value(rank) for rank in range(4))
    for turn in range(12):
        company.step(turn % 3, 0.0)
        assert sum(company.value(rank) for rank in range(4)) == pytest.approx(total, abs=1e-12)
    assert max(company.value(rank) for rank in range(3)) - company.value() < 4.0


def test_no_wait_moves_later_from_where_it_then_is_by_what_the_centre_moved():
    company = Company(Elastic(moving_rate=0.5, period=1, wait=False), 1, start=0.0, served=False)
    company.step(0, -4.0)
    assert company.step(0, -2.0) == (6.0, 0, 1, 1)  # sent theta = 4
    company.serve()
    assert company.value() == 2.0
    assert company.step(0, -1.0) == (5.0, 1, 2, 0)  # 6 - (4 - 0)/2, and its update
    assert not company.fabric.waited[1:]


def test_a_missed_deadline_goes_on_and_moves_when_the_answer_is_there():
    company = Company(Elastic(moving_rate=0.5, period=2, deadline_seconds=0.1), 1, start=0.0, served=False)
    for gradient in (-4.0, 0.0, -1.0):
        company.step(0, gradient)
    assert sum(company.fabric.waited) == pytest.approx(0.1)
    company.serve()
    assert company.step(0, 0.0) == (3.0, 1, 2, 0)
    assert company.value() == 2.0


def test_the_centre_does_not_move_towards_the_dead():
    company = Company(Elastic(moving_rate=0.5, period=1, wait=False), 2, start=0.0, served=False)
    company.step(0, -4.0)
    company.step(0, 0.0)
    company.fabric.dead.add(0)
    company.serve()
    assert company.value() == 0.0


def test_a_reply_that_is_no_longer_awaited_moves_nothing():
    """A process that takes the place of another may find the replies to that one's pushes."""
    company = Company(Elastic(moving_rate=0.5, period=1, wait=False), 1, start=0.0, served=False)
    company.step(0, -4.0)
    company.fabric.mail[0, "centre"].append(Message(1, torch.tensor([100.0], dtype=torch.float64), 0.0))
    assert company.step(0, 0.0) == (4.0, 0, 1, 1)
    company.serve()
    assert company.step(0, 0.0) == (2.0, 1, 2, 0)


def test_the_death_of_the_centre_is_reported():
    company = Company(Elastic(period=5), 2)
    company.fabric.dead.add(2)
    with pytest.raises(FabricError, match=r"rank 2, which kept the centre, is dead or out of reach"):
        company.step(0, 1.0)
    assert not company.drain(0, 1)  # no error at a checkpoint: there is just none
    waiting = Company(Elastic(period=1), 1, served=False)
    waiting.fabric.while_waiting = lambda: waiting.fabric.dead.add(1)
    waiting.step(0, 1.0)
    with pytest.raises(FabricError, match="rank 1"):
        waiting.step(0, 1.0)
    assert sum(waiting.fabric.waited) < 0.2


def test_rounds_and_staleness_go_on_from_their_state():
    company, again = (Company(Elastic(moving_rate=0.5, period=2), 1) for _ in range(2))
    for _ in range(5):  # two moves, and an update since
        company.step(0, 1.0)
    saved, bound = company.bound_replicas[0], again.bound_replicas[0]
    bound.strategy.load(saved.strategy.state())
    bound.replica.load(saved.replica.state())
    assert company.step(0, 0.0)[1:] == again.step(0, 0.0)[1:] == (2, 1, 1)
    for one in (company, again):
        one.fabric.while_waiting = lambda: None
    assert [company.step(0, 0.0)[1:] for _ in range(2)] == [again.step(0, 0.0)[1:] for _ in range(2)]


def test_it_needs_no_one_to_turn_gradients_off():
    """The vector is a leaf that requires gradients; serving and stepping must not care."""
    company = Company(Elastic(moving_rate=0.5, period=1), 1, start=0.0, served=False)
    company.fabric.while_waiting = lambda: company.centre.strategy.serve(
        company.centre.replica, company.centre.channel
    )
    company.step(0, -4.0)
    company.step(0, 0.0)
    assert (company.value(0), company.value()) == (2.0, 2.0)


def synchronous(gradients, strategy, **faults):
    """Each member's (number, centre, round, heard, staleness) after each step."""

    def member(fabric):
        replicator = Replicator(strategy, fabric)
        replica = replicator.replicate("x", Point(8.0), lambda p: torch.optim.SGD(p, lr=1.0))
        bound, lines = replicator.bound_replicas["x"], []
        for gradient in gradients[fabric.rank]:
            exchange = replica.follow(torch.tensor([gradient], dtype=torch.float64))
            centre = bound.strategy.consensus(replica, bound.channel).item()
            lines.append((replica.params.item(), centre, *exchange))
        return lines

    return SimulatedFabric(len(gradients), seed=0, **faults).run([member] * len(gradients))


def test_common_rounds_by_hand():
    """tau = 2, beta = 1/4, two members: both move with every second update, from the same centre."""
    one, two = synchronous(
        [(4.0, 4.0, 0.0, 0.0), (-6.0, 0.0, 3.0, 0.0)], SynchronousElastic(moving_rate=0.25, period=2)
    )
    # after an update: theta = 4 and 14, centre 8 -> 8 + (-4 + 6)/4 = 8.5; theta -> 5 and 12.5, then updates;
    # after three: 1 and 9.5, centre -> 8.5 + (-7.5 + 1)/4 = 6.875; theta -> 2.875 and 9.25
    assert one == [(4.0, 8.0, 0, 1, 1), (1.0, 8.5, 1, 2, 0), (1.0, 8.5, 1, 1, 1), (2.875, 6.875, 2, 2, 0)]
    assert two == [(14.0, 8.0, 0, 1, 1), (12.5, 8.5, 1, 2, 0), (9.5, 8.5, 1, 1, 1), (9.25, 6.875, 2, 2, 0)]


def test_after_a_death_the_centre_moves_by_the_sum_over_the_living():
    strategy, still = SynchronousElastic(moving_rate=0.25, period=1), (0.0,) * 7
    lines = synchronous([(6.0, *still), (-2.0, *still), (9.0, *still)], strategy, crashes={2: 12})
    assert isinstance(lines.pop(), BaseException)
    rounds = [[member[step] for member in lines] for step in range(8)]
    checked = 0
    for before, after in itertools.pairwise(rounds):
        if after[0][3] == 2:
            (one, centre, *_), (two, *_) = before
            moved = centre + 0.25 * (one - centre) + 0.25 * (two - centre)
            assert [member[1] for member in after] == pytest.approx([moved, moved], abs=1e-12)
            checked += 1
    assert 2 <= checked < 7


def test_common_rounds_keep_the_sum_with_the_centre():
    rows = synchronous([[g, *[0.0] * 9] for g in (-5.0, 3.0, 11.0)], SynchronousElastic(period=1))
    for column in zip(*rows, strict=True):
        total = sum(line[0] for line in column) + column[0][1]
        assert total == pytest.approx(4 * 8.0 + 5 - 3 - 11, abs=1e-12)
        assert len({line[1] for line in column}) == 1
    assert rows[0][-1][2:] == (10, 3, 0)


def test_a_rate_that_overshoots_is_refused_with_the_largest_that_does_not():
    with pytest.raises(Refusal, match=r"use at most 0\.25, or leave it out for 0\.2"):
        synchronous([(0.0,)] * 4, SynchronousElastic(moving_rate=0.3))
    synchronous([(0.0,)] * 4, SynchronousElastic(moving_rate=0.25))
    for replicas in (6, 11, 97):  # 1/n is no decimal number, and what is advised must not overshoot either
        with pytest.raises(Refusal, match="use at most") as caught:
            SynchronousElastic(moving_rate=0.9).check(replicas)
        advised = float(re.search(r"use at most ([\d.e-]+),", str(caught.value))[1])
        SynchronousElastic(moving_rate=advised).check(replicas)


@pytest.mark.parametrize("kind", [Elastic, SynchronousElastic])
def test_what_makes_no_sense_is_an_error(kind):
    with pytest.raises(ValueError, match="period"):
        kind(period=0)
    for rate in (-0.1, 1.1):
        with pytest.raises(ValueError, match="moving_rate"):
            kind(moving_rate=rate)
