"""The simulated fabric: schedules, virtual time, deadlocks by name, faults, and a log to rebuild from."""

from __future__ import annotations

import itertools
import time
import weakref

import numpy as np
import pytest
import torch

from murmurate.fabric.interface import Capability, FabricError
from murmurate.fabric.simulated.fabric import Crashed, MailFaults, Partition, SimulatedFabric

N = 3


def fill(value: float) -> torch.Tensor:
    return torch.full((N,), float(value))


def door_to(member):
    return member.channel("model", torch.zeros(N))


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


# -- deadlocks and errors -------------------------------------------------------------------------


def test_a_deadlock_names_each_member_and_its_wait():
    def meets(member):
        door_to(member).mean_(fill(0))

    def leaves(member):
        pass

    with pytest.raises(FabricError, match=r"rank 0 waits for mean #1 of \[0, 1, 2\], has \[0, 1\]") as caught:
        SimulatedFabric(3, 0).run([meets, meets, leaves])
    assert "rank 1 waits for mean #1" in str(caught.value)
    assert "finished: [2]" in str(caught.value)


def test_crossed_waits_are_a_deadlock_too():
    def role(member):
        fabric = door_to(member)
        fabric.wait(f"to {member.rank}", float("inf"))
        fabric.send(1 - member.rank, f"to {1 - member.rank}", fill(0))

    with pytest.raises(FabricError, match=r"rank 0 waits for mail 'to 0'; rank 1 waits for mail 'to 1'"):
        SimulatedFabric(2, 0).run([role, role])


def test_a_deadline_turns_the_deadlock_into_the_members_own_error():
    def meets(member):
        try:
            door_to(member).mean_(fill(0))
        except FabricError as error:
            return str(error)

    fabric = SimulatedFabric(3, 0, collective_deadline_seconds=7.0)
    messages = fabric.run([meets, meets, lambda member: None])
    assert all("ranks [2] did not call it within 7 s" in message for message in messages[:2])
    assert fabric.virtual_seconds == pytest.approx(7.0, rel=0.01)


@pytest.mark.parametrize("second", ["gather", "broadcast", "root"])
def test_calls_that_do_not_match_are_an_error(second):
    def first(member):
        if second == "root":
            return door_to(member).broadcast_(fill(0), 0)
        return door_to(member).mean_(fill(0))

    def other(member):
        fabric = door_to(member)
        calls = {
            "gather": lambda: fabric.gather(fill(0)),
            "broadcast": lambda: fabric.broadcast_(fill(0), 1),
            "root": lambda: fabric.broadcast_(fill(0), 1),
        }
        calls[second]()

    for seed in range(4):
        with pytest.raises(FabricError, match=r"#1 of .* same calls everywhere"):
            SimulatedFabric(2, seed).run([first, other])


def test_broadcasts_from_different_roots_are_told_apart():
    roles = [lambda m, root=root: door_to(m).broadcast_(fill(0), root) for root in range(2)]
    with pytest.raises(FabricError) as caught:
        SimulatedFabric(2, 0).run(roles)
    assert all(f"broadcast from rank {root}" in str(caught.value) for root in range(2))


def test_a_roles_error_stops_the_others_wherever_they_are():
    unwound = []

    def fails(member):
        member.compute(1e-3)  # the others have begun by then
        raise ZeroDivisionError("mine")

    def polls(member):
        fabric = door_to(member)
        try:
            while True:
                fabric.receive("never")
        finally:
            unwound.append(member.rank)

    def waits(member):
        try:
            door_to(member).wait("never", float("inf"))
        finally:
            unwound.append(member.rank)

    with pytest.raises(ZeroDivisionError, match="mine"):
        SimulatedFabric(3, 2).run([fails, polls, waits])
    assert sorted(unwound) == [1, 2]


def test_an_error_inside_an_injected_latency_comes_out():
    def latency(sender, receiver, generator):
        return -1.0

    with pytest.raises(ValueError, match="in the past"):
        SimulatedFabric(2, 0, latency=latency).run([lambda m: door_to(m).publish(fill(0))] * 2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SimulatedFabric(0, 0), "size must be at least 1"),
        (lambda: SimulatedFabric(2, 0, crashes={2: 1}), "ranks from 0 to below"),
        (lambda: SimulatedFabric(2, 0, partitions=[Partition(((0, 5),))]), "ranks from 0 to below"),
        (lambda: SimulatedFabric(2, 0).member(2), "no rank 2"),
        (lambda: SimulatedFabric(2, 0).run([print]), "1 functions for 2 members"),
        (lambda: MailFaults(loss=1.5), "not a probability"),
        (lambda: MailFaults(loss=1.0), "reliable=False"),
        (lambda: MailFaults(resend_seconds=-0.1), "resend_seconds=-0.1"),
        (lambda: SimulatedFabric(2, 0).cut(Partition(island=frozenset({2}))), "ranks from 0 to below"),
        (lambda: SimulatedFabric(2, 0, latency=(-1.0, 0.0)), "latency from -1.0 to 0.0"),
        (lambda: SimulatedFabric(1, 0).run([lambda m: door_to(m).publish(torch.zeros(N + 1))]), r"\[3\]"),
        (lambda: SimulatedFabric(1, 0).run([lambda m: door_to(m).peek(1)]), "no rank 1"),
    ],
)
def test_what_makes_no_sense_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_missing_capability_is_an_error():
    def role(member):
        assert member.capabilities == {Capability.REGISTER}
        fabric = door_to(member)
        fabric.publish(fill(0))
        refused = []
        for verb in (
            lambda: fabric.mean_(fill(0)),
            lambda: fabric.broadcast_(fill(0), 0),
            lambda: fabric.gather(fill(0)),
            lambda: fabric.send(0, "t", fill(0)),
            lambda: fabric.wait("t", 0.0),
            lambda: fabric.shared("k", fill(0)),
        ):
            with pytest.raises(FabricError, match="without") as caught:
                verb()
            refused.append(str(caught.value).split(" without ")[1].split(":")[0])
        return refused

    fabric = SimulatedFabric(1, 0, capabilities=frozenset({Capability.REGISTER}))
    assert fabric.run([role]) == [["collective"] * 3 + ["mail"] * 2 + ["shared memory"]]


@pytest.mark.parametrize("other", [torch.zeros(3), torch.zeros(2, dtype=torch.float64)], ids=str)
def test_members_with_different_models_get_an_error(other):
    roles = [lambda m: m.channel("x", torch.zeros(2)), lambda m: m.channel("x", other)]
    with pytest.raises(FabricError, match="same model"):
        SimulatedFabric(2, 0).run(roles)


@pytest.mark.parametrize("count", [0, N + 1])
def test_a_message_that_no_real_fabric_takes_is_refused(count):
    with pytest.raises(ValueError, match=f"a message has 1 to {N} numbers, this one {count}"):
        SimulatedFabric(1, 0).run([lambda m: door_to(m).send(0, "t", torch.zeros(count))])


@pytest.mark.parametrize(
    ("tag", "x", "message"),
    [
        ("t" * 64, fill(0), "a tag has at most 63 bytes"),
        ("\N{LATIN SMALL LETTER E WITH ACUTE}" * 32, fill(0), "has 64"),
        ("t", torch.zeros(N - 1, dtype=torch.float64), "a short message is not converted"),
    ],
    ids=["long tag", "tag of long characters", "short of another type"],
)
def test_mail_that_no_real_fabric_takes_is_refused(tag, x, message):
    with pytest.raises(ValueError, match=message):
        SimulatedFabric(1, 0).run([lambda m: door_to(m).send(0, tag, x)])


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


# -- crashes --------------------------------------------------------------------------------------


def count_to(rounds):
    def role(member):
        fabric, outcome = door_to(member), []
        for _ in range(rounds):
            x = fill(10**member.rank)
            outcome.append((fabric.mean_(x), float(x[0])))
        return outcome, list(fabric.living())

    return role


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


class MeanInBackward(torch.autograd.Function):
    """Its gradient is the members' mean."""

    @staticmethod
    def forward(ctx, x, fabric):
        ctx.fabric = fabric
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        mean = grad.clone()
        ctx.fabric.mean_(mean)
        return mean, None


def mean_in_backward(member):
    x = fill(1.0).requires_grad_()
    (MeanInBackward.apply(x, door_to(member)) * (1 + member.rank)).sum().backward()
    return x.grad.tolist()


def test_collectives_inside_a_backward_pass_want_threads_and_say_so():
    assert SimulatedFabric(3, seed=0, coroutines="threads").run([mean_in_backward] * 3) == [[2.0] * N] * 3
    with pytest.raises(FabricError, match="coroutines='threads'"):
        SimulatedFabric(3, seed=0).run([mean_in_backward] * 3)
