"""The simulated cluster when members die and come back, pause, or are cut off."""

from __future__ import annotations

import pytest

from fabric.simulated_cluster import cluster, door_to, fill
from murmurate.fabric.interface import FabricError
from murmurate.fabric.simulated.fabric import Crashed, MailFaults, Partition
from murmurate.fabric.simulated.latency import Network


def test_a_member_that_comes_back_takes_part_from_the_next_round_on():
    """Rank 2 dies in its third round, and comes back between two rounds of the others."""
    rounds, back = 8, []

    def steps(member, first):
        fabric, got = door_to(member), []
        for k in range(first, rounds):
            x = fill(10**member.rank)
            got.append((k, fabric.mean_(x), float(x[0])))
            if member.rank == 0 and k == 4:
                whole.revive(2, again, like=0)
            member.compute(1.0)
        return got

    def again(member):
        fabric = door_to(member)
        x = fill(5)
        assert (fabric.mean_(x), float(x[0])) == (1, 5.0)  # alone: nobody is kept waiting
        member.join()
        back.extend(steps(member, 5))

    whole = cluster(3, crash_seconds={2: 2.5})
    *alive, dead = whole.run([lambda member: steps(member, 0)] * 3)
    assert [got[:2] for got in alive[0]] == [(k, 2 if k in (3, 4) else 3) for k in range(rounds)]
    assert back == alive[0][5:] == alive[1][5:]
    assert not isinstance(dead, list)


def test_mail_to_a_revived_member_begins_again():
    def sender(member):
        fabric = door_to(member)
        outcome = []
        for k in range(6):
            outcome.append(fabric.send(1, "t", fill(k)))
            member.compute(1.0)
        return outcome

    got = []

    def receiver(member):
        fabric = door_to(member)
        while (message := fabric.wait("t", 2.5)) is not None:
            got.append(float(message.x[0]))

    fabric = cluster(2, Network(latency_seconds=0.75), mail_faults=MailFaults(loss=0.2, resend_seconds=0.01))
    fabric.at(1.25, lambda: fabric.crash(1))
    fabric.at(3.5, lambda: fabric.revive(1, receiver, like=0))
    outcome = fabric.run([sender, receiver])[0]
    assert outcome == [True, True, False, False, True, True]
    assert got == [0.0, 4.0, 5.0]  # 1 was on its way when the receiver died


def test_a_member_that_is_absent_is_not_waited_for_and_comes_late():
    def meet(member):
        fabric, sizes = door_to(member), []
        for _ in range(3):
            sizes.append(fabric.mean_(fill(0)))
            member.compute(1.0)
        return sizes, list(member.living())

    fabric = cluster(3, absent=[2])
    assert fabric.run([meet] * 3) == [([2, 2, 2], [0, 1])] * 2 + [None]


def test_only_the_dead_come_back():
    fabric = cluster(2)

    def role(member):
        with pytest.raises(ValueError, match="has not ended"):
            fabric.revive(1 - member.rank, role, like=member.rank)

    fabric.run([role] * 2)


def test_a_pause_holds_one_member_up():
    def role(member):
        member.compute(1.0)
        member.compute(1.0)
        return member.now

    fabric = cluster(2)
    fabric.at(0.5, lambda: fabric.pause(1, 3.0))
    assert fabric.run([role] * 2) == [pytest.approx(2.0), pytest.approx(5.0)]


def test_an_island_hears_nothing_until_the_cut_ends():
    def role(member):
        fabric, heard = door_to(member), {}
        member.compute(1.5)
        fabric.publish(fill(member.rank))
        for peer in sorted(range(4), key=lambda peer: (peer < 2) != (member.rank < 2)):  # its own side first
            assert fabric.wait_newer([peer], [0], 100.0)
            heard[peer] = member.now
        return heard

    cut = Partition(start_seconds=1.0, end_seconds=7.0, island=frozenset({0, 1}))
    for rank, heard in enumerate(cluster(4, Network(latency_seconds=0.25), partitions=[cut]).run([role] * 4)):
        for peer, seconds in heard.items():
            assert seconds <= 1.75 + 1e-9 if (peer < 2) == (rank < 2) else seconds == pytest.approx(7.25)


def test_an_island_holds_a_mean_up():
    cut = Partition(start_seconds=0.0, end_seconds=5.0, island=frozenset({2}))

    def role(member):
        door_to(member).mean_(fill(0))
        return member.now

    assert cluster(3, partitions=[cut]).run([role] * 3) == [pytest.approx(5.0)] * 3


def test_a_deadline_holds_while_the_network_works():
    def role(member):
        with pytest.raises(FabricError, match="its messages took more than 1 s"):
            door_to(member).mean_(fill(0))

    slow = Network(latency_seconds=10.0)
    assert not any(
        isinstance(r, Crashed) for r in cluster(2, slow, collective_deadline_seconds=1.0).run([role] * 2)
    )
