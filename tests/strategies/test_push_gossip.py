"""Push gossip by hand: Algorithm 6 of Jin's thesis as tables of one number a member."""

from __future__ import annotations

import pytest

from murmurate.strategies.push_gossip import PushGossip
from strategies.scripted_mail import MailCast


def test_two_send_to_each_other_and_average_what_came():
    cast = MailCast(PushGossip(), [0.0, 0.0])
    assert cast.step(0, 4.0) == (4.0, 0, 1, 1)  # sends 4
    assert cast.step(1, 8.0) == (6.0, 1, 2, 0)  # sends 8; (8 + 4)/2
    assert cast.step(0, 2.0) == (7.0, 1, 2, 0)  # sends 6; (6 + 8)/2: what was sent, not what 1 is now
    assert cast.step(0, 1.0) == (8.0, 1, 1, 1)  # nothing came


def test_the_average_is_over_the_own_and_all_k_received():
    cast = MailCast(PushGossip(), [0.0] * 4)
    for rank in (1, 2, 3):
        cast.draws(rank, 0)
        cast.step(rank, 4.0 * rank)
    cast.draws(0, 1)
    assert cast.step(0, 16.0) == (10.0, 1, 4, 0)  # (16 + 4 + 8 + 12)/4
    assert cast.script.sent == [(1, 0, 0.0), (2, 0, 0.0), (3, 0, 0.0), (0, 1, 0.0)]


def test_a_mixing_weight_mixes_them_in_one_after_another_by_rank():
    cast = MailCast(PushGossip(mixing=0.25), [0.0] * 3)
    cast.draws(2, 0)
    cast.step(2, 16.0)
    cast.draws(1, 0)
    cast.step(1, 8.0)
    cast.draws(0, 1)
    assert cast.step(0, 0.0) == (5.5, 1, 3, 0)  # 3/4 (3/4 of 0, 1/4 of 8), 1/4 of 16


def test_stale_sends_and_averages_the_vectors_from_before_the_update():
    cast = MailCast(PushGossip(stale=True), [0.0, 0.0])
    assert cast.step(0, 4.0) == (4.0, 0, 1, 1)  # sent 0
    assert cast.step(1, 8.0) == (8.0, 1, 2, 0)  # sent 0; (0 + 0)/2, and 8
    assert cast.step(1, 2.0) == (10.0, 1, 1, 1)  # sent 8; nothing came
    assert cast.step(0, 1.0) == (7.0, 1, 2, 0)  # (4 + 8)/2, and 1


def test_each_peer_counts_once_with_its_newest():
    cast = MailCast(PushGossip(), [0.0, 0.0, 0.0])
    for number, by in enumerate([3.0, 3.0, 3.0]):
        cast.draws(1, 0)
        assert cast.step(1, by)[0] == 3.0 * (number + 1)
    cast.draws(2, 0)
    cast.step(2, 12.0)
    cast.draws(0, 1)
    assert cast.step(0, 0.0) == (7.0, 1, 3, 0)  # (0 + 9 + 12)/3
    cast.draws(0, 1)
    assert cast.step(0, 0.0) == (7.0, 1, 1, 1)  # the older ones are gone


def test_a_full_queue_is_passed_over_and_counted():
    cast = MailCast(PushGossip(), [0.0, 0.0], capacity=2)
    for _ in range(5):
        cast.step(0, 1.0)
    assert cast.bound_replicas[0].strategy.refused == 3
    assert cast.step(1, 0.0) == (1.0, 1, 2, 0)  # (0 + 2)/2: the newest that was taken


def test_every_period_updates():
    cast = MailCast(PushGossip(period=2), [0.0, 0.0])
    assert cast.step(0, 4.0)[1:] == (0, 1, 1)
    assert cast.script.sent == []
    assert cast.step(0, 4.0)[1:] == (0, 1, 2)
    assert len(cast.script.sent) == 1
    assert cast.step(1, 0.0) == (0.0, 0, 1, 1)  # it reads when it sends
    assert cast.step(1, 0.0) == (4.0, 1, 2, 0)


def test_a_member_that_draws_itself_sends_nothing_but_reads():
    cast = MailCast(PushGossip(with_self=True), [0.0, 0.0])
    cast.draws(1, 0, 1)
    cast.draws(0, 0, 0)
    assert cast.step(0, 1.0) == (1.0, 1, 1, 0)
    cast.step(1, 3.0)
    assert cast.step(0, 0.0) == (2.0, 2, 2, 0)
    assert cast.script.sent == [(1, 0, 0.0)]


@pytest.mark.parametrize("with_self", [False, True])
def test_targets_are_from_the_living_and_all_of_them(with_self):
    cast = MailCast(PushGossip(with_self=with_self), [0.0] * 4)
    strategy = cast.bound_replicas[1].strategy
    assert {strategy.draw(1, [0, 1, 3]) for _ in range(100)} == ({0, 1, 3} if with_self else {0, 3})
    assert strategy.draw(1, [1]) == 1


def test_what_the_dead_had_sent_counts_and_then_the_last_one_agrees_with_itself():
    cast = MailCast(PushGossip(), [0.0, 0.0])
    cast.step(1, 8.0)
    cast.script.dead.add(1)
    assert cast.step(0, 0.0) == (4.0, 1, 2, 0)
    assert cast.step(0, 1.0) == (5.0, 2, 1, 0)
    assert cast.bound_replicas[0].strategy.refused == 0


@pytest.mark.parametrize("wrong", [{"mixing": -0.1}, {"mixing": 1.1}, {"period": 0}])
def test_what_makes_no_sense_is_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        PushGossip(**wrong)
