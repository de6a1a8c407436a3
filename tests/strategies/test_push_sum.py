"""Push-sum by hand: tables of a sum and a weight for each member."""

from __future__ import annotations

import pytest

from murmurate.strategies.interface import FINAL_DRAIN, MemberEvent
from murmurate.strategies.push_sum import PushSum
from strategies.scripted_mail import MailCast


def has(cast, rank):
    """(x, w) of one member."""
    strategy = cast.bound_replicas[rank].strategy
    return strategy._sum.item(), strategy._weight


def test_two_by_hand():
    cast = MailCast(PushSum(topology="ring"), [0.0, 0.0])
    # each: its number z = x / w, round, heard, staleness
    assert cast.step(0, 4.0) == (4.0, 0, 1, 1)  # x = 4, w = 1; sends half
    assert has(cast, 0) == (2.0, 0.5)
    assert cast.step(1, 8.0) == (pytest.approx(6 / 1), 1, 2, 0)  # keeps (4, 1/2), takes (2, 1/2)
    assert has(cast, 1) == (6.0, 1.0)
    # 1/2 is the least weight: 0 sends nothing, steps by 1/w of itself, takes (4, 1/2)
    assert cast.step(0, 1.0) == (7.0, 1, 2, 0)
    assert has(cast, 0) == (7.0, 1.0)
    assert sum(has(cast, r)[0] for r in (0, 1)) == 4.0 + 8.0 + 1.0  # all steps, none twice


def test_an_update_moves_the_sum_by_the_whole_step():
    cast = MailCast(PushSum(topology="ring"), [0.0, 0.0])
    cast.step(0, 4.0)
    cast.script.on_the_way.add((1, 0))
    assert cast.step(0, 1.0)[0] == 6.0  # x = 3, w = 1/2: twice the step
    assert has(cast, 0) == (3.0, 0.5)


def test_rewritten_parameters_are_the_sum_over_the_weight():
    cast = MailCast(PushSum(topology="ring"), [0.0, 0.0])
    cast.step(0, 4.0)
    assert has(cast, 0) == (2.0, 0.5)
    cast.replicas[0].params.data.fill_(10.0)
    cast.replicas[0].rewritten()
    assert has(cast, 0) == (5.0, 0.5)
    cast.script.on_the_way.add((1, 0))
    assert cast.step(0, 1.0)[0] == 12.0  # x = 6, w = 1/2


def test_a_share_for_each_out_peer_and_one_for_us():
    cast = MailCast(PushSum(topology="complete", least_weight=0.1), [0.0] * 4)
    cast.step(0, 8.0)
    assert has(cast, 0) == (2.0, 0.25)
    assert cast.script.sent == [(0, peer, 0.25) for peer in (1, 2, 3)]


def test_however_many_peers_a_share_leaves_the_least_weight_and_is_sent():
    cast = MailCast(PushSum(topology="complete", least_weight=0.5), [0.0] * 6)
    cast.step(0, 8.0)
    assert has(cast, 0) == (pytest.approx(4.0), pytest.approx(0.5))
    assert [note for *_, note in cast.script.sent] == [pytest.approx(0.1)] * 5


def test_a_peer_that_stands_still_gets_one_share_and_no_second():
    cast = MailCast(PushSum(topology="ring", least_weight=0.01), [0.0, 0.0])
    for _ in range(6):
        cast.step(0, 1.0)
    assert len(cast.script.sent) == 1
    assert has(cast, 0)[1] == 0.5
    cast.step(1, 0.0)
    cast.step(0, 0.0)
    assert [to for _, to, _ in cast.script.sent] == [1, 0, 1]


def test_what_a_full_queue_does_not_take_stays():
    cast = MailCast(PushSum(topology="ring", least_weight=0.01), [0.0, 0.0], capacity=1)
    cast.step(0, 4.0)
    cast.script.published[1].append(cast.replicas[1].params.detach().clone())  # steps, but does not read
    assert cast.step(0, 1.0)[0] == 6.0
    assert has(cast, 0) == (3.0, 0.5)


def test_nothing_is_sent_to_the_dead_and_the_last_one_agrees_with_itself():
    cast = MailCast(PushSum(topology="ring"), [0.0, 0.0])
    cast.script.dead.add(1)
    assert cast.step(0, 4.0) == (4.0, 1, 1, 0)
    assert has(cast, 0) == (4.0, 1.0)


def test_a_turning_graph_turns_with_the_own_sends():
    cast = MailCast(PushSum(topology="one-peer-exponential", period=2, least_weight=0.01), [0.0] * 4)
    for _ in range(6):
        cast.step(0, 1.0)
        for rank in (1, 2, 3):  # so that nobody stands still
            cast.script.published[rank].append(cast.replicas[rank].params.detach().clone())
    assert [(to, note) for _, to, note in cast.script.sent] == [(1, 0.5), (2, 0.25), (1, 0.125)]


def test_it_goes_on_from_its_state():
    cast = MailCast(PushSum(topology="ring"), [0.0, 0.0])
    cast.step(0, 4.0)
    kept, vector = cast.bound_replicas[0].strategy.state(), cast.replicas[0].state()
    again = MailCast(PushSum(topology="ring"), [0.0, 0.0])
    again.bound_replicas[0].strategy.load(kept)
    again.replicas[0].load(vector)
    assert has(again, 0) == (2.0, 0.5)
    assert again.step(0, 1.0) == (6.0, 0, 1, 2)
    assert has(cast, 0) == (2.0, 0.5)  # what was kept shares no memory with what goes on


@pytest.mark.parametrize("wrong", [{"period": 0}, {"least_weight": 0.0}, {"least_weight": 1.0}])
def test_what_makes_no_sense_is_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        PushSum(**wrong)


def test_a_member_that_has_ended_is_sent_nothing_more_and_no_mass_is_lost():
    cast = MailCast(PushSum(topology="ring", least_weight=0.01), [0.0, 0.0])
    cast.step(0, 4.0)
    cast.step(1, 8.0)
    ended, going = cast.bound_replicas[1], cast.bound_replicas[0]
    settling = ended.replica, ended.channel, FINAL_DRAIN, 0.0
    ended.strategy.drain(*settling)  # nobody answers yet
    cast.step(0, 1.0)  # finds the marker after its own share
    sent = len(cast.script.sent)
    ended.strategy.drain(*settling)  # what a last cut waits for: the shares of those who did not know
    held = has(cast, 0)
    for _ in range(5):
        assert cast.step(0, 1.0)[3] == 0  # alone now, it agrees with itself
    assert len(cast.script.sent) == sent + 1  # the second marker
    assert has(cast, 0)[1] == held[1]
    assert sum(has(cast, rank)[1] for rank in (0, 1)) == pytest.approx(2.0)
    going.strategy.on_member(MemberEvent("joined", 1))
    cast.script.published[1] = [ended.replica.params.detach().clone()]  # it publishes from version 1 again
    cast.step(0, 1.0)
    assert len(cast.script.sent) == sent + 2  # its next life is sent shares again


def test_who_joins_with_a_peers_state_begins_with_weight_one():
    cast = MailCast(PushSum(topology="ring"), [0.0, 7.0])
    cast.step(0, 4.0)
    peer, joiner = cast.bound_replicas
    joiner.strategy.load(peer.strategy.state())
    assert has(cast, 1) == (2.0, 0.5)
    joiner.strategy.joined(joiner.replica, joiner.channel)
    assert has(cast, 1) == (7.0, 1.0)
