"""GALA by hand: Algorithm 1 as tables of one number a member, waits, deaths and turning graphs."""

from __future__ import annotations

import functools

import pytest
import torch

from laws.problems import Point
from murmurate.errors import Refusal
from murmurate.fabric.simulated.fabric import SimulatedFabric
from murmurate.replicator.replicator import Replicator
from murmurate.strategies.gala import GALA
from murmurate.topology import Ring
from strategies.scripted import Cast


def test_a_ring_of_three_by_hand():
    """Rank, its update, then: its number, round, heard, staleness. Rank 0 hears 2, 1 hears 0, 2 hears 1."""
    cast = Cast(GALA(), [0.0, 0.0, 0.0])
    history = [
        (0, 1.0, (1.0, 0, 1, 1)),  # 2 has not spoken
        (0, 1.0, (2.0, 0, 1, 2)),
        (1, 4.0, (3.0, 1, 2, 0)),  # (4 + 2)/2: the newest of 0's two messages
        (1, 2.0, (5.0, 1, 1, 1)),  # 0 has said nothing new
        (2, 8.0, (6.5, 1, 2, 0)),  # (8 + 5)/2
        (0, 1.0, (5.5, 1, 2, 0)),  # (3 + 8)/2: 2 spoke before it averaged
        (1, 2.0, (5.0, 2, 2, 0)),  # (7 + 3)/2
        (2, 1.5, (7.5, 2, 2, 0)),  # (8 + 7)/2
        (2, 0.5, (8.0, 2, 1, 1)),
        (2, 0.5, (8.5, 2, 1, 2)),
        (0, 0.5, (7.25, 2, 2, 0)),  # (6 + 8.5)/2
    ]
    for line, (rank, by, expected) in enumerate(history):
        assert cast.step(rank, by) == expected, f"line {line}"


def test_no_member_averages_before_all_in_peers_have_spoken():
    cast = Cast(GALA(topology="complete"), [0.0, 0.0, 0.0])
    assert cast.step(0, 3.0) == (3.0, 0, 1, 1)
    assert cast.step(1, 6.0) == (6.0, 0, 1, 1)  # 2 is missing
    assert cast.step(0, 3.0) == (6.0, 0, 1, 2)  # 1 alone does not do
    assert cast.step(2, 9.0) == (7.0, 1, 3, 0)  # (9 + 6 + 6)/3
    assert cast.step(0, 0.0) == (7.0, 1, 3, 0)  # (6 + 6 + 9)/3
    assert cast.step(0, 1.0) == (8.0, 1, 1, 1)  # both messages were heard already
    assert cast.step(1, 1.0) == (8.0, 1, 3, 0)  # (7 + 8 + 9)/3


def test_what_has_not_arrived_has_not_been_said():
    cast = Cast(GALA(), [0.0, 0.0])
    cast.script.held_back[0, 1] = 0
    cast.step(0, 1.0)
    cast.step(0, 1.0)
    assert cast.step(1, 4.0) == (4.0, 0, 1, 1)
    cast.script.held_back[0, 1] = 1
    assert cast.step(1, 1.0) == (3.0, 1, 2, 0)  # (5 + 1)/2
    assert cast.step(1, 1.0) == (4.0, 1, 1, 1)
    cast.script.held_back[0, 1] = 2
    assert cast.step(1, 2.0) == (4.0, 2, 2, 0)  # (6 + 2)/2


def test_each_step_publishes_once_and_before_it_averages():
    cast = Cast(GALA(topology="complete"), [0.0, 0.0, 0.0])
    for turn in range(4):
        for rank in range(3):
            cast.step(rank, 1.0 + turn)
            assert len(cast.script.published[rank]) == turn + 1
    mine = [what for who, what in cast.script.order if who == 2]
    assert mine == ["publish", "peek", "peek"] * 4


def test_a_turning_graph_turns_with_the_own_rounds():
    """One-peer exponential of four: rank 0 hears 3, then 2, then 3 again."""
    cast = Cast(GALA(topology="one-peer-exponential"), [0.0, 10.0, 20.0, 40.0])
    cast.step(3, 0.0)  # hears 2, who is silent: still its own 40
    assert cast.step(0, 0.0) == (20.0, 1, 2, 0)
    cast.step(3, 8.0)
    assert cast.step(0, 0.0) == (20.0, 1, 1, 1)  # it waits for 2 now, whatever 3 says
    cast.step(2, 0.0)
    assert cast.step(0, 0.0) == (20.0, 2, 2, 0)
    assert cast.step(0, 0.0) == (34.0, 3, 2, 0)  # (20 + 48)/2


def test_a_member_that_rests_in_a_matching_goes_on_to_the_next():
    """Of three, one rests each clock. Resting must not last for ever."""
    cast = Cast(GALA(topology="random-matching"), [0.0, 0.0, 0.0])
    last = {}
    for _ in range(40):
        for rank in range(3):
            last[rank] = cast.step(rank, 1.0)
    assert all(exchange[1] >= 15 for exchange in last.values())


class TestStaleness:
    def test_no_wait_up_to_the_bound_and_one_each_bound_beyond(self):
        cast = Cast(GALA(staleness_bound=3, deadline_seconds=0.25), [0.0, 0.0])
        waits = []
        for _ in range(13):
            *_, staleness = cast.step(0, 1.0)
            waits.append(len(cast.script.waits))
        assert staleness == 13
        # at updates 4, 8 and 12: go on with what is here, and let another three pass
        assert waits == [0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3]
        assert cast.script.waits == [(0, 0.25, False)] * 3

    def test_the_first_wait_is_at_the_update_after_the_bound(self):
        cast = Cast(GALA(staleness_bound=3), [0.0, 0.0])
        for _ in range(3):
            cast.step(0, 1.0)
        assert cast.script.waits == []
        cast.step(0, 1.0)
        assert len(cast.script.waits) == 1

    def test_a_peer_that_speaks_during_the_wait_is_averaged_at_once(self):
        cast = Cast(GALA(staleness_bound=2, deadline_seconds=9.0), [0.0, 0.0])
        cast.script.while_waiting = lambda: cast.script.published[1].append(
            torch.tensor([9.0], dtype=torch.float64)
        )
        assert [cast.step(0, 1.0)[3] for _ in range(2)] == [1, 2]
        assert cast.step(0, 1.0) == (6.0, 1, 2, 0)
        assert cast.script.waits == [(0, 9.0, True)]

    def test_patience_starts_again_with_each_average(self):
        cast = Cast(GALA(staleness_bound=2), [0.0, 0.0])
        cast.step(1, 1.0)
        assert cast.step(0, 1.0)[3] == 0
        cast.step(0, 1.0)
        cast.step(0, 1.0)
        assert cast.script.waits == []
        cast.step(0, 1.0)
        assert len(cast.script.waits) == 1

    def test_bound_zero_never_waits(self):
        cast = Cast(GALA(staleness_bound=0), [0.0, 0.0])
        assert cast.step(0, 1.0) == (1.0, 0, 1, 1)
        for _ in range(300):
            cast.step(0, 1.0)
        assert cast.script.waits == []


class TestDeath:
    def test_the_ring_is_drawn_again_over_the_living(self):
        cast = Cast(GALA(), [0.0, 0.0, 0.0, 0.0])
        for rank in range(4):
            cast.step(rank, 1.0)
        cast.script.dead.add(3)
        before = cast.replicas[2].params.item()
        cast.step(2, 0.0)
        now = float(cast.script.published[2][-1])
        assert cast.step(0, 1.0)[:3] == (((1.0 + 1.0) + now) / 2, 1, 2)  # 0 hears 2 now, not 3
        assert before == now

    def test_no_member_waits_for_the_dead(self):
        cast = Cast(GALA(staleness_bound=2), [0.0, 0.0])
        cast.step(1, 1.0)
        cast.script.dead.add(1)
        for k in range(1, 30):
            assert cast.step(0, 1.0) == (float(k), k, 1, 0)  # alone, and in agreement with itself
        assert cast.script.waits == []

    def test_one_that_joins_again_is_heard_from_its_first_word(self):
        cast = Cast(GALA(), [0.0, 0.0, 0.0])
        for rank in (2, 0):
            cast.step(rank, 2.0)
        cast.script.dead.add(2)
        cast.step(0, 0.0)  # notices
        cast.script.published[2].clear()  # its slot starts anew with it
        cast.script.dead.clear()
        cast.step(2, 0.0)
        rounds = cast.bound_replicas[0].last.round
        assert cast.step(0, 0.0)[1:] == (rounds + 1, 2, 0)


def gossip(fabric, strategy, pause, member):
    """Twelve steps: their exchanges, and the virtual seconds that passed within them."""
    replica = Replicator(strategy, member).replicate(
        "x", Point(0.0, 1.0), lambda p: torch.optim.SGD(p, lr=0.1)
    )
    exchanges, waited = [], 0.0
    for _ in range(12):
        member.compute(pause)
        start = fabric.virtual_seconds
        exchanges.append(replica.follow(torch.ones(2, dtype=torch.float64)))
        waited += fabric.virtual_seconds - start
    return exchanges, waited


class TestVirtualTime:
    """With real waits, in virtual seconds: rank 1 hears rank 0."""

    def run(self, *pauses, bound=2, deadline=0.5, **faults):
        strategy = GALA(staleness_bound=bound, deadline_seconds=deadline)
        fabric = SimulatedFabric(len(pauses), seed=1, **faults)
        return fabric.run([functools.partial(gossip, fabric, strategy, pause) for pause in pauses])

    def test_a_slow_but_living_peer_costs_the_deadline_and_no_more(self):
        (_, _), (exchanges, waited) = self.run(100.0, 0.0)
        assert [e.heard for e in exchanges] == [1] * 12
        assert [e.staleness for e in exchanges] == list(range(1, 13))
        assert waited == pytest.approx(4 * 0.5, rel=1e-3)  # at updates 3, 6, 9 and 12

    def test_a_peer_a_little_slower_is_waited_for_and_heard(self):
        (_, _), (exchanges, waited) = self.run(1.0, 0.1, bound=2, deadline=5.0)
        assert max(e.staleness for e in exchanges) <= 2
        assert waited == pytest.approx(4 * 0.7, rel=1e-2)  # at 0.3, 1.3, 2.3 and 3.3 s, to the next second

    @pytest.mark.parametrize("call", [9, 14, 23, 31])
    def test_a_crashed_peer_is_waited_for_by_no_member(self, call):
        alive, dead, too = self.run(0.01, 0.01, 0.01, bound=2, deadline=50.0, crashes={1: call})
        assert isinstance(dead, BaseException)
        for exchanges, waited in (alive, too):
            assert len(exchanges) == 12
            assert exchanges[-1].round > 3
            assert waited < 1.0


def test_an_unknown_topology_is_refused_with_the_nearest():
    with pytest.raises(Refusal, match="Did you mean 'ring'"):
        Cast(GALA(topology="rin"), [0.0])
    with pytest.raises(Refusal, match="it takes the name of a graph"):
        Cast(GALA(topology=Ring()), [0.0])


def test_state_keeps_the_counters_and_drops_the_messages():
    cast = Cast(GALA(staleness_bound=4), [0.0, 0.0])
    cast.step(1, 1.0)
    cast.step(0, 1.0)
    cast.step(0, 1.0)
    state = cast.bound_replicas[0].strategy.state()
    fresh = Cast(GALA(staleness_bound=4), [0.0, 0.0])
    fresh.bound_replicas[0].strategy.load(state)
    fresh.replicas[0].load(cast.replicas[0].state())
    assert fresh.step(0, 1.0)[1:] == (1, 1, 2)
    fresh.step(1, 1.0)  # its version 1 again, on the new fabric: not heard yet
    assert fresh.step(0, 1.0)[1:] == (2, 2, 0)


def test_consensus_is_the_mean_of_what_the_living_showed_last():
    cast = Cast(GALA(), [0.0, 0.0, 0.0, 0.0])
    cast.step(1, 4.0)
    cast.step(3, 8.0)
    cast.script.dead.add(3)
    cast.replicas[0].params.data.fill_(2.0)
    bound = cast.bound_replicas[0]
    found = bound.strategy.consensus(bound.replica, bound.channel)
    assert float(found) == 3.0  # 2 has shown nothing, 3 is dead
    found.fill_(-1.0)
    assert cast.replicas[0].params.item() == 2.0
