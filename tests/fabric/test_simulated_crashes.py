"""The simulated fabric when members crash: who is counted, who is freed, and what stays of the dead."""

from __future__ import annotations

import pytest

from fabric.simulated_members import count_to, door_to, fill
from murmurate.fabric.interface import FabricError
from murmurate.fabric.simulated.fabric import Crashed, SimulatedFabric


def test_a_crash_leaves_the_mean_to_the_living():
    for seed in range(30):
        fabric = SimulatedFabric(3, seed, crashes={2: 3})
        *alive, dead = fabric.run([count_to(4)] * 3)
        assert isinstance(dead, Crashed)
        with_all, without = (3, 37.0), (2, 5.5)
        assert alive == [([with_all, with_all, without, without], [0, 1])] * 2
        assert [(e.rank, e.kind) for e in fabric.log if e.kind == "crash"] == [(2, "crash")]
        means = [(e.version, e.members) for e in fabric.log if e.kind == "mean" and e.rank == 0]
        assert means == [(1, (0, 1, 2)), (2, (0, 1, 2)), (3, (0, 1)), (4, (0, 1))]


def test_a_member_that_dies_inside_a_mean_is_not_in_it():
    def slow(member):
        member.compute(5.0)
        return count_to(1)(member)

    fabric = SimulatedFabric(3, 0, crash_seconds={0: 2.0})
    dead, *alive = fabric.run([count_to(1), slow, slow])
    assert isinstance(dead, Crashed)
    assert alive == [([(2, 55.0)], [1, 2])] * 2


def test_a_crash_at_a_time_ends_work_and_waits_at_once():
    def works(member):
        member.compute(100.0)

    def waits(member):
        door_to(member).wait("never", float("inf"))

    def watches(member):
        living = []
        for _ in range(5):
            living.append(list(member.living()))
            member.compute(1.0)
        return living

    fabric = SimulatedFabric(3, 0, crash_seconds={0: 1.5, 1: 2.5}, call_seconds=0.0)
    works_end, waits_end, living = fabric.run([works, waits, watches])
    assert isinstance(works_end, Crashed)
    assert isinstance(waits_end, Crashed)
    assert living == [[0, 1, 2], [0, 1, 2], [1, 2], [2], [2]]
    assert [e.time_seconds for e in fabric.log] == [1.5, 2.5]
    assert fabric.virtual_seconds == 5.0


def test_no_ordinary_handler_holds_a_crash_up():
    def stubborn(member):
        while True:
            try:
                member.living()
            except Exception:
                continue

    ended, _ = SimulatedFabric(2, 0, crashes={0: 5}).run([stubborn, lambda m: None])
    assert isinstance(ended, Crashed)


def test_a_dead_root_and_a_dead_peer_end_waits():
    def survives(member):
        fabric = door_to(member)
        with pytest.raises(FabricError, match="its root, rank 0, is dead"):
            fabric.broadcast_(fill(0), 0)
        news = (
            fabric.wait_newer([0, 1], [5, 0], float("inf")) if member.rank == 2 else fabric.publish(fill(1))
        )
        return news, fabric.send(0, "t", fill(0)), float(fabric.shared("k", fill(member.rank))[0])

    def dies(member):
        fabric = door_to(member)
        member.compute(1.0)
        fabric.broadcast_(fill(0), 0)

    results = SimulatedFabric(3, 0, crashes={0: 2}).run([dies, survives, survives])
    assert results[1:] == [(1, False, 1.0), (True, False, 1.0)]


def test_what_a_dead_member_published_and_sent_stays():
    def dies(member):
        fabric = door_to(member)
        fabric.publish(fill(8))
        fabric.send(1, "t", fill(9))
        fabric.version(0)

    def reads(member):
        fabric = door_to(member)
        member.compute(5.0)
        return float(fabric.peek(0)[0][0]), float(fabric.receive("t")[1][0]), list(fabric.living())

    _, read = SimulatedFabric(2, 0, latency=1.0, crashes={0: 3}).run([dies, reads])
    assert read == (8.0, 9.0, [1])


def test_mail_to_the_dead_is_reported_lost():
    def dies(member):
        fabric = door_to(member)
        fabric.wait("t", float("inf"))
        member.compute(10.0)

    def sends(member):
        fabric = door_to(member)
        sent = [fabric.send(0, "t", fill(i)) for i in range(4)]
        member.compute(5.0)
        return sent, fabric.send(0, "t", fill(9))

    fabric = SimulatedFabric(2, 0, crash_seconds={0: 2.0})
    _, outcome = fabric.run([dies, sends])
    assert outcome == ([True] * 4, False)
    lost = [(e.rank, e.peer, e.version, e.detail) for e in fabric.log if e.kind == "lost"]
    assert lost == [(1, 0, number, "t") for number in (2, 3, 4)]


def test_a_sender_stuck_at_a_full_queue_is_freed_by_the_death():
    def sends(member):
        fabric = door_to(member)
        return [fabric.send(1, "t", fill(i)) for i in range(3)]

    fabric = SimulatedFabric(
        2, 0, mail_capacity=2, mail_deadline_seconds=float("inf"), crash_seconds={1: 3.0}, call_seconds=0.0
    )
    sent, _ = fabric.run([sends, lambda member: member.compute(50.0)])
    assert sent == [True, True, False]
    assert fabric.virtual_seconds == 3.0
