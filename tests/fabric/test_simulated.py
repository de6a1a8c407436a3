"""The simulated fabric: schedules, virtual time, and a log from which a run can be built again."""

from __future__ import annotations

import itertools
import time
import weakref

import numpy as np
import pytest
import torch

from fabric.simulated_members import N, door_to, fill
from murmurate.fabric.interface import FabricError
from murmurate.fabric.simulated.fabric import MailFaults, SimulatedFabric


def wander(steps, seed):
    """A member that does a bit of everything that needs no match, decided by its own generator."""

    def role(member):
        fabric, choose = door_to(member), np.random.default_rng([seed, member.rank])
        x, met = fill(member.rank), []
        for step in range(steps):
            verb, peer = choose.integers(5), int(choose.integers(member.size))
            if verb == 0:
                fabric.publish(x + step)
            elif verb == 1 and fabric.version(peer):
                theirs, version = fabric.peek(peer)
                met.append((peer, version, float(theirs[0])))
                x = (x + theirs) / 2
            elif verb == 2:
                fabric.send(peer, "t", x)
            elif verb == 3 and (message := fabric.receive("t")):
                x = x + message[1]
            else:
                member.compute(float(choose.exponential(0.1)))
        fabric.mean_(x)
        return x.tolist(), met

    return role


# -- schedules ------------------------------------------------------------------------------------


def test_a_seed_fixes_everything_and_another_seed_changes_it():
    faults = MailFaults(loss=0.3, duplication=0.3, reordering=0.3)

    def run(seed, coroutines="greenlets"):
        fabric = SimulatedFabric(
            4, seed, latency=(0.0, 0.3), mail_faults=faults, crashes={3: 20}, coroutines=coroutines
        )
        results = fabric.run([wander(25, seed=5)] * 4)
        return repr(results[:3]), fabric.log, fabric.virtual_seconds

    runs = [run(seed) for seed in range(20)]
    assert runs == [run(seed) for seed in range(20)]
    assert runs == [run(seed, "threads") for seed in range(20)]
    assert len({results for results, *_ in runs}) == 20


def test_every_interleaving_comes_up_and_about_equally_often():
    def role(member):
        fabric = door_to(member)
        for _ in range(2):
            fabric.receive("nothing")
            member.note("step")

    orders = []
    for seed in range(400):
        fabric = SimulatedFabric(2, seed)
        fabric.run([role, role])
        orders.append(tuple(event.rank for event in fabric.log))
    assert set(orders) == set(itertools.permutations((0, 0, 1, 1)))
    # A fair coin at each choice gives 0011 and 1100 at least 1/16 each: 25 of 400.
    assert min(orders.count(order) for order in set(orders)) > 8


def test_between_two_calls_no_other_member_runs():
    total = [0]

    def role(member):
        fabric = door_to(member)
        for _ in range(50):
            fabric.version(0)
            before = total[0]
            time.sleep(0)  # offers the interpreter to any thread that could run
            total[0] = before + 1

    SimulatedFabric(3, 1, coroutines="threads").run([role] * 3)  # greenlets take turns in calls alone
    assert total == [150]


def test_time_is_virtual_and_exact():
    def early(member):
        member.compute(2.0)
        door_to(member).publish(fill(1))
        member.note("published")

    def late(member):
        fabric = door_to(member)
        member.compute(5.0)
        member.note("worked")
        assert not fabric.wait_newer([0], [1], 1.5)
        member.note("gave up")
        assert fabric.wait("mail", 100.0) is None

    fabric = SimulatedFabric(2, 0, call_seconds=0.0)
    fabric.run([early, late])
    times = {event.kind: event.time_seconds for event in fabric.log if event.kind != "publish"}
    assert times == {"published": 2.0, "worked": 5.0, "gave up": 6.5}
    assert fabric.virtual_seconds == 106.5


def test_polling_makes_time_pass():
    def poll(member):
        fabric = door_to(member)
        while not fabric.version(1):
            pass
        return fabric.peek(1)[1]

    def publish_late(member):
        member.compute(0.001)
        return door_to(member).publish(fill(1))

    fabric = SimulatedFabric(2, 0, latency=0.002)
    assert fabric.run([poll, publish_late]) == [1, 1]
    assert fabric.virtual_seconds == pytest.approx(0.003, rel=0.01)


def test_members_compute_side_by_side():
    fabric = SimulatedFabric(300, 0, keep_log=False)
    fabric.run([lambda member: member.compute(1.0)] * 300)
    assert 1.0 <= fabric.virtual_seconds < 1.001
    assert fabric.log == []


def test_waiting_is_counted_in_virtual_seconds_and_traffic_in_bytes():
    def slow(member):
        fabric = door_to(member)
        member.compute(3.0)
        fabric.mean_(fill(0))
        return fabric.traffic

    def quick(member):
        fabric = door_to(member)
        fabric.mean_(fill(0))
        fabric.publish(fill(0))
        fabric.peek(member.rank)
        return fabric.traffic

    one, other = SimulatedFabric(2, 0, call_seconds=0.0).run([slow, quick])
    assert (one.waiting_seconds, other.waiting_seconds) == (0.0, 3.0)
    assert (one.bytes, other.bytes) == (3 * 4 * N, 5 * 4 * N)  # mean: one in, two out


def test_collectives_of_one_member_cost_nothing():
    """As in processes: the inline launcher's runs of one replica go through them in every update."""

    def role(member):
        fabric, x = door_to(member), fill(2.0)
        before = x.clone()
        took_part = fabric.mean_(x)
        fabric.broadcast_(x, 0)
        gathered = fabric.gather(x)
        assert gathered[0] is not x
        return took_part, torch.equal(x, before), gathered[0].tolist(), fabric.traffic.bytes

    assert SimulatedFabric(1, seed=0).run([role]) == [(1, True, [2.0] * N, 0)]


# -- the register under delay ---------------------------------------------------------------------


@pytest.mark.parametrize("latency", [0.0, 0.05, (0.0, 0.4)])
def test_peeks_show_the_newest_arrived(latency):
    def role(member):
        fabric, choose = door_to(member), np.random.default_rng(member.rank)
        for step in range(25):
            member.compute(float(choose.uniform(0, 0.1)))
            fabric.publish(fill(1000 * member.rank + step + 1))
            for peer in range(member.size):
                if fabric.version(peer):
                    x, version = fabric.peek(peer)
                    assert torch.equal(x, fill(1000 * peer + version))

    shortest, longest = (latency, latency) if isinstance(latency, float) else latency
    behind = 0
    for seed in range(15):
        fabric = SimulatedFabric(3, seed, latency=latency)
        fabric.run([role] * 3)
        published = {(e.rank, e.version): e.time_seconds for e in fabric.log if e.kind == "publish"}
        seen = {}
        for event in fabric.log:
            if event.kind != "peek":
                continue
            pair, now = (event.rank, event.peer), event.time_seconds
            assert event.version >= seen.get(pair, 1)
            seen[pair] = event.version
            out = [v for (who, v), t in published.items() if who == event.peer and t <= now]
            assert event.version <= max(out)
            if event.peer == event.rank:
                assert event.version == max(out)
                continue
            assert published[event.peer, event.version] + shortest <= now + 1e-9
            surely = [v for v in out if published[event.peer, v] + longest < now - 1e-9]
            assert event.version >= max(surely, default=1)
            behind += event.version < max(out)
    assert (behind > 0) == (longest > 0)


def test_a_function_gives_each_link_its_latency():
    def latency(sender, receiver, generator):
        return 1.0 + sender + 10 * receiver

    def publish(member):
        fabric = door_to(member)
        fabric.publish(fill(member.rank))
        heard = []
        for peer in range(member.size):
            fabric.wait_newer([peer], [0], float("inf"))
            member.note("heard", peer)
        return heard

    fabric = SimulatedFabric(2, 0, latency=latency, call_seconds=0.0)
    fabric.run([publish] * 2)
    times = {(e.detail, e.rank): e.time_seconds for e in fabric.log if e.kind == "heard"}
    assert times[1, 0] == 2.0
    assert times[0, 1] == times[1, 1] == 11.0
    assert times[0, 0] == 0.0


@pytest.mark.parametrize("latency", [0.0, 0.5])
def test_versions_that_no_member_can_see_any_more_are_let_go(latency):
    def role(member):
        fabric, kept = door_to(member), []
        for _ in range(40):
            fabric.publish(fill(1))
            kept.append(weakref.ref(fabric.peek(member.rank)[0]))
            member.compute(0.1)
        return [version for version, x in enumerate(kept, 1) if x() is not None]

    for alive in SimulatedFabric(2, 0, latency=latency).run([role] * 2):
        assert 40 in alive
        assert len(alive) <= 2 + latency / 0.1


def test_writing_into_a_peeked_vector_is_found_out():
    def role(member):
        fabric = door_to(member)
        fabric.publish(fill(1))
        fabric.peek(0)[0].add_(1)
        fabric.peek(0)

    with pytest.raises(FabricError, match="copy it first"):
        SimulatedFabric(1, 0).run([role])


def test_the_log_tells_which_version_was_mixed_when():
    """Gossip with delays, rebuilt in float64 from the log alone, as the epsilon-ball law does."""

    def role(member):
        fabric, x = door_to(member), torch.zeros(N, dtype=torch.float64) + member.rank
        peer, seen = (member.rank - 1) % member.size, 0
        for step in range(12):
            g = torch.sin(torch.arange(N, dtype=torch.float64) + 7 * member.rank + step)
            x = x - 0.1 * g
            member.note("update", g.numpy())
            fabric.publish(x)
            if fabric.version(peer) > seen:
                theirs, seen = fabric.peek(peer)
                x = (x + theirs) / 2
        return x

    for seed in range(10):
        fabric = SimulatedFabric(4, seed, latency=(0, 2e-5))
        results = fabric.run([role] * 4)
        x = np.zeros((4, N)) + np.arange(4)[:, None]
        flying = {}
        for event in fabric.log:
            if event.kind == "update":
                x[event.rank] -= 0.1 * event.detail
            elif event.kind == "publish":
                flying[event.rank, event.version] = x[event.rank].copy()
            elif event.kind == "peek":
                x[event.rank] = (x[event.rank] + flying[event.peer, event.version]) / 2
        np.testing.assert_array_equal(np.stack([r.numpy() for r in results]), x)
