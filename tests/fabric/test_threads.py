"""The threads fabric: deaths, deadlines and whole vectors under real concurrency."""

from __future__ import annotations

import threading

import pytest
import torch

from murmurate.fabric.interface import FabricError
from murmurate.fabric.threads import ThreadsFabric, ordered_mean

N = 3


def door_to(member):
    return member.channel("model", torch.zeros(N))


def fill(value):
    return torch.full((N,), float(value))


class OwnFault(Exception):
    pass


def test_ordered_mean_adds_by_rank_whatever_the_order_given():
    # In float32 (1e8 + 1) - 1e8 = 0, but (1e8 - 1e8) + 1 = 1.
    vectors = {0: torch.tensor([1e8]), 1: torch.tensor([1.0]), 2: torch.tensor([-1e8])}
    assert ordered_mean(vectors).item() == 0.0
    assert ordered_mean({rank: vectors[rank] for rank in (0, 2, 1)}).item() == 0.0
    assert ordered_mean({0: vectors[0], 1: vectors[2], 2: vectors[1]}).item() == pytest.approx(1 / 3)
    assert vectors[0].item() == 1e8


def test_a_member_that_raises_is_dead_to_the_rest_and_its_error_comes_out():
    survived = {}

    def fails(member):
        fabric = door_to(member)
        fabric.mean_(fill(9))
        raise OwnFault

    def goes_on(member):
        fabric = door_to(member)
        outcome = []
        for _ in range(3):
            x = fill(member.rank)
            outcome.append((fabric.mean_(x), float(x[0])))
        news = fabric.wait_newer([2], [0], 60.0)
        survived[member.rank] = outcome, news, fabric.send(2, "t", fill(0)), list(member.living())

    fabric = ThreadsFabric(3)
    with pytest.raises(OwnFault):
        fabric.run([goes_on, goes_on, fails])
    rounds = [(3, pytest.approx(10 / 3)), (2, 0.5), (2, 0.5)]
    assert survived == {rank: (rounds, True, False, [0, 1]) for rank in (0, 1)}


def test_a_dead_root_ends_the_broadcast_and_the_next_lowest_shares():
    survived = []

    def fails(member):
        raise OwnFault

    def goes_on(member):
        fabric = door_to(member)
        with pytest.raises(FabricError, match="its root, rank 0, is dead"):
            fabric.broadcast_(fill(0), 0)
        survived.append(float(fabric.shared("k", fill(member.rank))[0]))

    with pytest.raises(OwnFault):
        ThreadsFabric(3).run([fails, goes_on, goes_on])
    assert survived == [1.0, 1.0]


def test_marking_dead_frees_all_who_wait():
    fabric = ThreadsFabric(2, mail_capacity=1, mail_deadline_seconds=60.0)
    ready = threading.Event()

    def waits(member):
        channel = door_to(member)
        assert channel.send(1, "t", fill(0))
        ready.set()
        return channel.send(1, "t", fill(1)), channel.wait_newer([1], [0], 60.0), channel.mean_(fill(0))

    def dies(member):
        assert ready.wait(60.0)
        fabric.mark_dead(member.rank)

    assert fabric.run([waits, dies])[0] == (False, True, 1)


def test_calls_that_do_not_match_are_an_error():
    roles = [lambda m: door_to(m).mean_(fill(0)), lambda m: door_to(m).gather(fill(0))]
    with pytest.raises(FabricError, match=r"#1 of .* same calls everywhere"):
        ThreadsFabric(2, collective_deadline_seconds=0.2).run(roles)


def test_a_blocked_sender_goes_on_once_there_is_room():
    def sends(member):
        return [door_to(member).send(1, "t", fill(i)) for i in range(50)]

    def receives(member):
        return [float(door_to(member).wait("t", 60.0)[1][0]) for _ in range(50)]

    sent, numbers = ThreadsFabric(2, mail_capacity=2, mail_deadline_seconds=60.0).run([sends, receives])
    assert sent == [True] * 50
    assert numbers == [float(i) for i in range(50)]


def test_no_reader_ever_sees_a_torn_vector():
    size, like = 300_000, torch.zeros(300_000)

    def publishes(member):
        fabric = member.channel("wide", like)
        x = torch.zeros(size)
        for value in range(1, 150):
            fabric.publish(x.fill_(value))

    def reads(member):
        fabric, version, looked = member.channel("wide", like), 0, 0
        while version < 149:
            fabric.wait_newer([0], [version], 60.0)
            x, version = fabric.peek(0)
            low, high = torch.aminmax(x)
            assert float(low) == float(high) == version
            looked += 1
        return looked

    _, one, other = ThreadsFabric(3).run([publishes, reads, reads])
    assert one > 0
    assert other > 0


def test_traffic_counts_bytes_and_waiting():
    def role(member):
        fabric = door_to(member)
        fabric.mean_(fill(0))
        fabric.publish(fill(0))
        fabric.peek(member.rank)
        nothing = fabric.wait("t", 0.05)
        return nothing, fabric.traffic.bytes, fabric.traffic.waiting_seconds

    for nothing, exchanged, waited in ThreadsFabric(2).run([role, role]):
        assert nothing is None
        assert exchanged == 5 * 4 * N
        assert waited >= 0.05


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ThreadsFabric(0), "at least 1"),
        (lambda: ThreadsFabric(2).member(2), "no rank 2"),
        (lambda: ThreadsFabric(2).run([print]), "1 functions for 2 members"),
        (lambda: ThreadsFabric(1).run([lambda m: door_to(m).publish(torch.zeros(N + 1))]), r"\[3\]"),
        (lambda: ThreadsFabric(1).run([lambda m: door_to(m).version(-1)]), "no rank -1"),
    ],
)
def test_what_makes_no_sense_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
