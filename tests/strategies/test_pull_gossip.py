"""Pull gossip by hand: eq. 3.61 and 3.66 of Jin's thesis as tables of one number a member."""

from __future__ import annotations

import pytest
import torch

from murmurate.strategies.pull_gossip import PullGossip
from murmurate.strategies.push_gossip import PushGossip
from strategies.scripted_mail import MailCast


def test_fresh_steps_then_mixes_with_what_was_published_last():
    cast = MailCast(PullGossip(mixing=0.25), [0.0, 0.0])
    assert cast.step(0, 4.0) == (4.0, 0, 1, 1)  # the other has published nothing
    assert cast.step(1, 8.0) == (7.0, 1, 2, 0)  # 3/4 of 8, 1/4 of 4
    assert cast.step(0, 1.0) == (5.5, 1, 2, 0)  # 3/4 of 5, 1/4 of 7
    assert cast.step(0, 1.5) == (7.0, 2, 2, 0)  # the same 7 again: nobody waits for a newer one
    assert cast.step(1, -7.0) == (1.75, 2, 2, 0)  # 3/4 of 0, 1/4 of 7


def test_stale_mixes_the_vectors_from_before_the_update():
    cast = MailCast(PullGossip(mixing=0.25, stale=True), [0.0, 0.0])
    assert cast.step(0, 4.0) == (4.0, 0, 1, 1)
    assert cast.step(1, 8.0) == (9.0, 1, 2, 0)  # 3/4 of 0, 1/4 of 4, and 8
    assert cast.step(0, 1.0) == (6.25, 1, 2, 0)  # 3/4 of 4, 1/4 of 9, and 1


def test_every_period_updates_and_published_at_each():
    cast = MailCast(PullGossip(period=3), [0.0, 0.0])
    cast.step(1, 9.0)
    assert [cast.step(0, 1.0) for _ in range(2)] == [(1.0, 0, 1, 1), (2.0, 0, 1, 2)]
    assert cast.step(0, 1.0) == (6.0, 1, 2, 0)
    assert cast.step(0, 1.0) == (7.0, 1, 1, 1)
    assert len(cast.script.published[0]) == 4


def test_momentum_goes_on_through_a_mix():
    """The mix moves parameters and nothing else: moments stay local."""
    cast = MailCast(PullGossip(), [0.0, 0.0])
    for replica in cast.replicas:
        replica.optimizer.param_groups[0]["momentum"] = 0.5
    cast.step(1, 0.0)
    assert cast.step(0, 4.0)[0] == 2.0
    assert cast.step(0, 4.0)[0] == 4.0  # (2 + 4 + 2)/2


def test_a_member_that_draws_itself_mixes_nothing_and_agrees_with_itself():
    cast = MailCast(PullGossip(with_self=True), [0.0, 0.0, 0.0])
    cast.draws(0, 0, 2, 1, 0)
    cast.step(2, 10.0)
    assert cast.step(0, 2.0) == (2.0, 1, 1, 0)
    assert cast.step(0, 0.0) == (6.0, 2, 2, 0)
    assert cast.step(0, 0.0) == (6.0, 2, 1, 1)  # 1 has published nothing
    assert cast.step(0, 0.0) == (6.0, 3, 1, 0)


@pytest.mark.parametrize("kind", [PullGossip, PushGossip])
def test_who_joins_with_a_peers_state_draws_by_itself(kind):
    peer, joiner = MailCast(kind(), [0.0] * 9).bound_replicas[:2]
    joiner.strategy.load(peer.strategy.state())
    joiner.strategy.joined(joiner.replica, joiner.channel)
    everybody = range(9)
    drawn = [[bound.strategy.draw(8, everybody) for _ in range(20)] for bound in (peer, joiner)]
    assert drawn[0] != drawn[1]


@pytest.mark.parametrize("with_self", [False, True])
def test_draws_are_from_the_living_and_all_of_them(with_self):
    cast = MailCast(PullGossip(with_self=with_self), [0.0] * 4)
    strategy = cast.bound_replicas[1].strategy
    assert {strategy.draw(1, [0, 1, 3]) for _ in range(100)} == ({0, 1, 3} if with_self else {0, 3})
    assert strategy.draw(1, [1]) == 1


def test_the_dead_are_not_mixed_with_and_the_last_one_agrees_with_itself():
    cast = MailCast(PullGossip(), [0.0, 0.0])
    cast.step(1, 8.0)
    cast.script.dead.add(1)
    assert cast.step(0, 1.0) == (1.0, 1, 1, 0)


def test_what_has_not_arrived_is_not_mixed_with():
    cast = MailCast(PullGossip(), [0.0, 0.0])
    cast.script.held_back[1, 0] = 1
    cast.step(1, 8.0)
    cast.step(1, 8.0)
    assert cast.step(0, 0.0) == (4.0, 1, 2, 0)


def test_each_member_and_each_seed_has_draws_of_its_own_and_they_go_on_after_a_resume():
    def drawn(cast, rank, times=20):
        return [cast.bound_replicas[rank].strategy.draw(rank, range(5)) for _ in range(times)]

    cast = MailCast(PullGossip(seed=1), [0.0] * 5)
    first = drawn(cast, 0)
    assert first == drawn(MailCast(PullGossip(seed=1), [0.0] * 5), 0)
    assert first != drawn(MailCast(PullGossip(seed=2), [0.0] * 5), 0)
    assert [j > 2 for j in first] != [j > 2 for j in drawn(cast, 2)]
    kept = cast.bound_replicas[0].strategy.state()
    again = MailCast(PullGossip(seed=1), [0.0] * 5)
    again.bound_replicas[0].strategy.load(kept)
    assert drawn(again, 0) == drawn(cast, 0)


def test_after_a_resume_peers_are_found_at_once():
    cast = MailCast(PullGossip(), [2.0, 6.0])
    for bound in cast.bound_replicas:
        bound.strategy.resumed(bound.replica, bound.channel)
    assert cast.step(0, 0.0) == (4.0, 1, 2, 0)


@pytest.mark.parametrize("wrong", [{"mixing": -0.1}, {"mixing": 1.1}, {"period": 0}])
def test_what_makes_no_sense_is_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        PullGossip(**wrong)


def test_outside_of_no_grad_too():
    cast = MailCast(PullGossip(), [0.0, 4.0])
    for bound in cast.bound_replicas:
        bound.channel.publish(bound.replica.params)
    bound = cast.bound_replicas[0]
    assert torch.is_grad_enabled()
    bound.strategy.step(bound.replica, bound.channel)
    assert bound.replica.params.item() == 2.0


@pytest.mark.parametrize("kind", [PullGossip, PushGossip])
@pytest.mark.parametrize("with_self", [False, True])
def test_draws_are_among_the_peers_of_a_graph_over_the_living(kind, with_self):
    own = {3} if with_self else set()
    ring = MailCast(kind(topology="ring", with_self=with_self), [0.0] * 5).bound_replicas[3].strategy
    neighbour = {1, 2} if kind is PullGossip else {4, 0}  # 2 is dead in the second draw, 4 too
    drawn = {ring.draw(3, [0, 1, 2, 3, 4]) for _ in range(50)} | {ring.draw(3, [0, 1, 3]) for _ in range(50)}
    assert drawn == neighbour | own
    turning = MailCast(kind(topology="one-peer-exponential"), [0.0] * 8).bound_replicas[0].strategy
    hops = [turning.draw(0, range(8), turn) for turn in range(3)]
    assert hops == ([7, 6, 4] if kind is PullGossip else [1, 2, 4])
