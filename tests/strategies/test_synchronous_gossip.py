"""Gossip in common rounds, by hand: whom each drew is scripted, and what comes of it is a table."""

from __future__ import annotations

import functools

import pytest
import torch

from covering import pairwise
from laws.problems import Point
from murmurate.errors import Refusal
from murmurate.fabric.interface import FabricError, Message
from murmurate.fabric.simulated.fabric import Crashed, SimulatedFabric
from murmurate.replicator.replicator import Replicator
from murmurate.strategies.interface import MemberEvent
from murmurate.strategies.synchronous_gossip import SynchronousGossip
from murmurate.topology import topologies, topology

STARTS = [0.0, 4.0, 8.0]
TURN, CHAIN = [1, 2, 1], [2, 0, 0]  # whom 0, 1 and 2 draw


def member(strategy, rounds, starts, by, own_fabric):
    """The path of one number: up by ``by[step][rank]`` each step."""
    replicator = Replicator(strategy, own_fabric)
    replica = replicator.replicate("x", Point(0.0), lambda p: torch.optim.SGD(p, lr=1.0))
    replica.params.data.fill_(starts[own_fabric.rank])
    bound = replicator.bound_replicas["x"]
    if rounds is not None:
        bound.strategy.drawn = lambda size, number: rounds[number - 1]
    path = []
    for step in by:
        exchange = replica.follow(torch.tensor([-step[own_fabric.rank]], dtype=torch.float64))
        path.append((replica.params.item(), *exchange))
    return path, bound.strategy.consensus(replica, bound.channel).item()


def played(strategy, rounds, by, starts=STARTS, seed=0, **faults):
    fabric = SimulatedFabric(len(starts), seed=seed, **faults)
    role = functools.partial(member, strategy, rounds, starts, by)
    return fabric.run([role] * len(starts))


def numbers(found):
    return [[line[0] for line in path] for path, _ in found]


def test_early_messages_of_a_members_last_life_are_dropped():
    strategy = SynchronousGossip()
    strategy._early = [Message(sender, torch.zeros(1), 5.0) for sender in (1, 2, 1)]
    strategy.on_member(MemberEvent("joined", 1))
    assert [message.sender for message in strategy._early] == [2]


def test_pull_mixes_in_the_vector_of_the_drawn_peer():
    found = played(SynchronousGossip(mixing=0.25), [TURN, CHAIN], [[0, 4, 0], [2, 0, 0]])
    # after the updates 0, 8, 8; each takes a quarter of 1, 2, 1. Then 4, 8, 8; a quarter of 2, 0, 0.
    assert numbers(found) == [[2.0, 5.0], [8.0, 7.0], [8.0, 7.0]]
    assert [path[0][1:] for path, _ in found] == [(1, 2, 0)] * 3
    assert [mean for _, mean in found] == [19.0 / 3] * 3


def test_push_averages_the_own_and_all_that_was_sent():
    found = played(SynchronousGossip("push"), [TURN, CHAIN], [[0, 0, 0], [0, 2, 0]])
    # 1 is sent 0 and 8, 2 is sent 4, 0 nothing: 0, 4, 6. Then 0, 6, 6; 0 is sent both, 2 is sent 0.
    assert numbers(found) == [[0.0, 4.0], [4.0, 6.0], [6.0, 3.0]]
    assert [path[0][2] for path, _ in found] == [1, 3, 2]


def test_push_mixes_in_with_a_weight_one_after_another():
    found = played(SynchronousGossip("push", mixing=0.25), [TURN], [[0, 0, 0]])
    # 1 is sent 0, then 8: 4 -> 3 -> 4.25; 2 is sent 4.
    assert numbers(found) == [[0.0], [4.25], [7.0]]


@pytest.mark.parametrize(
    ("direction", "with_self", "name", "size"),
    pairwise(["pull", "push"], [False, True], topologies(), [1, 2, 5]),
)
def test_all_are_drawn_among_the_peers_of_that_round(direction, with_self, name, size):
    """Each of them, and nobody else; who has none in that round draws itself."""
    strategy, graph = SynchronousGossip(direction, topology=name, with_self=with_self), topology(name)
    peers = graph.in_peers if direction == "pull" else graph.out_peers
    left = {(i, j) for n in range(1, 101) for i in range(size) for j in peers(i, size, n)}
    for number in range(1, 101):
        for i, j in enumerate(strategy.drawn(size, number)):
            among = peers(i, size, number)
            assert j in among or (j == i and (with_self or not among))
            left.discard((i, j))
    assert not left


def test_a_topology_that_there_is_not_is_refused_before_the_first_step():
    with pytest.raises(Refusal, match="Did you mean 'ring'"):
        played(SynchronousGossip(topology="rin"), None, [])


def test_stale_mixes_what_was_before_the_update():
    found = played(SynchronousGossip(mixing=0.25, stale=True), [TURN], [[0, 4, 0]])
    assert numbers(found) == [[1.0], [9.0], [7.0]]


def test_a_member_that_draws_itself_mixes_nothing():
    found = played(SynchronousGossip(with_self=True), [[0, 0, 2]], [[0, 0, 0]])
    assert numbers(found) == [[0.0], [2.0], [8.0]]


def test_every_period_updates():
    found = played(SynchronousGossip(period=2), [TURN], [[1, 1, 1]] * 3)
    assert [line[0] for line in found[0][0]] == [1.0, 4.0, 5.0]
    assert [line[1:] for line in found[0][0]] == [(0, 1, 1), (1, 2, 0), (1, 1, 1)]


@pytest.mark.parametrize("with_self", [False, True])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_all_members_draw_the_same_and_no_member_itself_unless_told(with_self, size):
    one, other = (SynchronousGossip(with_self=with_self, seed=4) for _ in range(2))
    for number in range(1, 50):
        drawn = one.drawn(size, number)
        assert drawn == other.drawn(size, number)
        assert len(drawn) == size
        assert set(drawn) <= set(range(size))
        if size > 1 and not with_self:
            assert all(i != j for i, j in enumerate(drawn))
    if size > 2:
        assert [one.drawn(size, n) for n in range(9)] != [
            SynchronousGossip(with_self=with_self, seed=5).drawn(size, n) for n in range(9)
        ]


@pytest.mark.parametrize("direction", ["pull", "push"])
def test_the_schedule_decides_nothing(direction):
    """Members may be rounds apart, messages late and doubled: the bits are those of the draws."""
    by = [[0.1 * step, -0.3, 0.7 * step] for step in range(8)]
    strategy = SynchronousGossip(direction, seed=3)
    first = played(strategy, None, by)
    for seed in range(1, 8):
        assert played(strategy, None, by, seed=seed, latency=(0.0, 1e-3)) == first


def test_a_member_ahead_of_the_others_finds_its_messages_later():
    """Pushing to nobody and sent nothing, 2 runs through three rounds before the others begin."""
    rounds = [[1, 0, 0], [1, 0, 0], [1, 0, 0], [2, 2, 1]]
    found = played(SynchronousGossip("push"), rounds, [[0, 0, 1]] * 4, latency=1e-2)
    assert [line[0] for line in found[2][0]][:3] == [9.0, 10.0, 11.0]
    assert [line[2] for line in found[0][0]] == [3, 3, 3, 1]
    first = (0 + 4 + 9) / 3, (4 + 0) / 2
    second = (first[0] + first[1] + 10) / 3, (first[1] + first[0]) / 2
    assert found[0][0][1][0] == pytest.approx(second[0])
    assert found[1][0][1][0] == pytest.approx(second[1])


def test_a_member_that_drew_a_dead_member_mixes_nothing_and_no_member_hangs():
    for call in range(3, 12):
        zero, dead, two = played(
            SynchronousGossip(mixing=0.5, deadline_seconds=1e3), [[1, 2, 1]] * 6, [[0, 0, 0]] * 6,
            crashes={1: call},
        )  # fmt: skip
        assert isinstance(dead, Crashed)
        for path, _ in (zero, two):
            assert [line[1] for line in path] == [1, 2, 3, 4, 5, 6]
            assert path[-1][2] == 1


def test_a_silent_member_is_named_at_the_deadline():
    def silent(own_fabric):
        Replicator(SynchronousGossip(), own_fabric).replicate(
            "x", Point(0.0), lambda p: torch.optim.SGD(p, lr=1.0)
        )
        own_fabric.compute(50.0)

    role = functools.partial(member, SynchronousGossip(deadline_seconds=2.0), [[1, 0]], [0.0, 0.0], [[0, 0]])
    with pytest.raises(FabricError, match=r"rank 0 waited 2 s for rank\(s\) \[1\] in round 1"):
        SimulatedFabric(2, seed=0).run([role, silent])


def test_a_member_that_is_found_dead_at_the_deadline_is_not_waited_for():
    strategy = SynchronousGossip(deadline_seconds=0.04)  # less than one poll
    (path, _), dead = played(strategy, [[1, 0]], [[0, 0]], [0.0, 0.0], crashes={1: 3})
    assert isinstance(dead, Crashed)
    assert path == [(0.0, 1, 1, 0)]


def test_a_member_that_does_not_read_is_named_too():
    def deaf(own_fabric):
        Replicator(SynchronousGossip(), own_fabric).replicate(
            "x", Point(0.0), lambda p: torch.optim.SGD(p, lr=1.0)
        )
        own_fabric.compute(50.0)

    push = SynchronousGossip("push", deadline_seconds=2.0)
    role = functools.partial(member, push, [[1, 1]] * 4, [0.0, 0.0], [[0, 0]] * 4)
    with pytest.raises(FabricError, match="rank 0 could not send to rank 1 in gossip round 3"):
        SimulatedFabric(2, seed=0, mail_capacity=2).run([role, deaf])


@pytest.mark.parametrize("wrong", [{"direction": "both"}, {"mixing": 1.1}, {"period": 0}])
def test_what_makes_no_sense_is_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        SynchronousGossip(**wrong)
