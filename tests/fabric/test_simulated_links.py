"""The simulated fabric's partitions, and mail that is lost, doubled, reordered or too much."""

from __future__ import annotations

import itertools

import pytest

from fabric.simulated_members import count_to, door_to, fill
from murmurate.fabric.interface import FabricError
from murmurate.fabric.simulated.fabric import MailFaults, Partition, SimulatedFabric

# -- partitions -----------------------------------------------------------------------------------


def test_a_cut_link_delivers_when_it_is_mended_and_others_go_on():
    def publish(member):
        fabric = door_to(member)
        fabric.publish(fill(1))
        fabric.send(1, "t", fill(1))
        fabric.send(2, "t", fill(1))
        member.compute(2.0)
        fabric.publish(fill(2))
        fabric.send(1, "t", fill(2))

    def follow(member):
        fabric, times = door_to(member), []
        fabric.wait_newer([0], [0], float("inf"))
        member.note("state")
        times.append(fabric.peek(0)[1])
        fabric.wait("t", float("inf"))
        member.note("mail")
        return times

    cut = Partition(((0, 1),), start_seconds=0.0, end_seconds=6.0)
    fabric = SimulatedFabric(3, 0, latency=0.5, partitions=[cut], call_seconds=0.0)
    results = fabric.run([publish, follow, follow])
    assert results[1:] == [[2], [1]]  # behind the cut the newest is first
    times = {(e.rank, e.kind): e.time_seconds for e in fabric.log if e.kind in ("state", "mail")}
    assert times == {(1, "state"): 6.5, (1, "mail"): 6.5, (2, "state"): 0.5, (2, "mail"): 0.5}


def test_what_travels_when_the_cut_begins_still_arrives():
    def publish(member):
        door_to(member).publish(fill(1))

    def follow(member):
        fabric = door_to(member)
        return fabric.wait_newer([0], [0], 3.0)

    cut = Partition(((1, 0),), start_seconds=0.5, end_seconds=50.0)
    fabric = SimulatedFabric(2, 0, latency=1.0, partitions=[cut], call_seconds=0.0)
    assert fabric.run([publish, follow])[1] is True
    assert fabric.virtual_seconds == 1.0


def test_a_collective_waits_for_the_cut_to_end():
    cut = Partition(((0, 2), (1, 2)), end_seconds=4.0)
    fabric = SimulatedFabric(3, 0, partitions=[cut])
    assert all(outcome == [(3, 37.0)] for outcome, _ in fabric.run([count_to(1)] * 3))
    assert fabric.virtual_seconds == pytest.approx(4.0, rel=0.01)


def test_a_broadcast_reaches_those_behind_a_cut_when_it_ends():
    def role(member):
        x = fill(member.rank)
        door_to(member).broadcast_(x, 0)
        member.note("has it", float(x[0]))

    cut = Partition(((2, 0),), end_seconds=4.0)
    fabric = SimulatedFabric(3, 0, partitions=[cut], call_seconds=0.0)
    fabric.run([role] * 3)
    got = {e.rank: (e.time_seconds, e.detail) for e in fabric.log if e.kind == "has it"}
    assert got == {0: (0.0, 0.0), 1: (0.0, 0.0), 2: (4.0, 0.0)}


def test_a_cut_that_never_ends_is_the_deadlines_business():
    cut = Partition(((0, 1),))
    fabric = SimulatedFabric(2, 0, partitions=[cut], collective_deadline_seconds=2.0)
    with pytest.raises(FabricError, match="network was partitioned for 2 s"):
        fabric.run([count_to(1)] * 2)


# -- mail under faults ----------------------------------------------------------------------------


def send_all(count):
    def role(member):
        fabric = door_to(member)
        return [fabric.send(0, "t", fill(100 * member.rank + i)) for i in range(count)]

    return role


def receive_until_silence(member):
    fabric, numbers = door_to(member), []
    while (message := fabric.wait("t", 1000.0)) is not None:
        numbers.append((message[0], int(message[1][0]) - 100 * message[0]))
    return numbers


def test_the_post_mends_loss_duplication_and_reordering():
    faults = MailFaults(loss=0.4, duplication=0.4, reordering=0.5)
    latest = 0.0
    for seed in range(30):
        fabric = SimulatedFabric(3, seed, latency=(0.0, 0.2), mail_faults=faults, mail_capacity=5,
                                 mail_deadline_seconds=float("inf"))  # fmt: skip
        numbers, *sent = fabric.run([receive_until_silence, send_all(20), send_all(20)])
        assert sent == [[True] * 20] * 2
        for sender in (1, 2):
            assert [i for who, i in numbers if who == sender] == list(range(20))
        assert not [e for e in fabric.log if e.kind == "lost"]
        latest = max(latest, fabric.virtual_seconds)
    assert latest > 1000.3  # packets did have to be sent again


def test_unmended_faults_reach_the_strategy_and_losses_are_logged():
    faults = MailFaults(loss=0.3, duplication=0.3, reordering=0.5, reliable=False)
    lost = doubled = overtaken = 0
    for seed in range(20):
        fabric = SimulatedFabric(2, seed, latency=0.01, mail_faults=faults)
        numbers, sent = fabric.run([receive_until_silence, send_all(60)])
        got = [i for _, i in numbers]
        gone = [e.version - 1 for e in fabric.log if e.kind == "lost"]
        assert sent == [True] * 60
        assert sorted(set(got) | set(gone)) == list(range(60))
        assert not set(got) & set(gone)
        assert all(got.count(i) <= 2 for i in got)
        lost += len(gone)
        doubled += len(got) - len(set(got))
        overtaken += any(a > b for a, b in itertools.pairwise(got))
    # 1200 packets: expect 360 lost, 252 of the rest doubled; four standard deviations.
    assert abs(lost - 360) < 64
    assert abs(doubled - 252) < 57
    assert overtaken == 20


def test_a_full_queue_blocks_to_the_deadline():
    def floods(member):
        fabric = door_to(member)
        sent = [fabric.send(1, "t", fill(i)) for i in range(4)]
        member.note("refused")
        fabric.publish(fill(0))
        return sent

    def reads_late(member):
        fabric = door_to(member)
        fabric.wait_newer([0], [0], float("inf"))
        first = fabric.receive("t")
        return float(first[1][0]), [fabric.receive("t") is None for _ in range(3)]

    fabric = SimulatedFabric(2, 0, mail_capacity=3, mail_deadline_seconds=2.5, call_seconds=0.0)
    assert fabric.run([floods, reads_late]) == [[True, True, True, False], (0.0, [False, False, True])]
    assert [e.time_seconds for e in fabric.log if e.kind == "refused"] == [2.5]


def test_room_in_the_queue_lets_a_blocked_sender_go_on():
    def reads(member):
        fabric = door_to(member)
        member.compute(1.0)
        return [float(fabric.wait("t", 10.0)[1][0]) for _ in range(5)]

    fabric = SimulatedFabric(2, 0, mail_capacity=1, mail_deadline_seconds=5.0)
    numbers, sent = fabric.run([reads, lambda m: [door_to(m).send(0, "t", fill(i)) for i in range(5)]])
    assert sent == [True] * 5
    assert numbers == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert fabric.virtual_seconds == pytest.approx(1.0, rel=0.01)
