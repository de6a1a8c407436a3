"""The simulated fabric as a cluster: time models and their formulas, own clocks, ports, who comes back."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from murmurate.fabric.interface import FabricError
from murmurate.fabric.simulated.fabric import Crashed, MailFaults, Partition, SimulatedFabric
from murmurate.fabric.simulated.latency import LogNormal, Network, Straggler, Trace, compute_model

N = 1000  # a vector of 4000 bytes
BYTES = 4 * N


def fill(value):
    return torch.full((N,), float(value))


def cluster(size, network=None, seed=0, **options):
    return SimulatedFabric(size, seed, network=network, own_clocks=True, call_seconds=1e-12, **options)


def door_to(member):
    return member.channel("model", torch.zeros(N))


def take(model, count, rank=1, seed=3):
    return list(itertools.islice(model.steps(rank, np.random.default_rng(seed)), count))


# -- compute times --------------------------------------------------------------------------------


def test_compute_times_are_what_they_say():
    assert take(LogNormal(0.25), 3) == [(0.25, 0.0)] * 3
    assert take(Straggler(0.25, 4), 2, rank=0) == [(1.0, 0.0)] * 2
    assert take(Straggler(0.25, 4), 2, rank=7) == [(0.25, 0.0)] * 2
    assert take(Straggler(0.25, 3, sleeps=True), 2, rank=0) == [(0.25, 0.75)] * 2
    drawn = np.log([busy for busy, _ in take(LogNormal(0.01, 0.5), 20_000)])
    # standard errors at 20,000 draws: 0.5/sqrt(n) = 0.0035 of the mean, 0.5/sqrt(2n) = 0.0025 of the spread
    assert np.mean(drawn) == pytest.approx(math.log(0.01), abs=4 * 0.0035)
    assert np.std(drawn) == pytest.approx(0.5, abs=4 * 0.0025)


def test_a_trace_goes_round_from_a_drawn_start():
    trace = Trace((1.0, 2.0, 3.0))
    starts = set()
    for seed in range(20):
        seconds = [busy for busy, _ in take(trace, 7, seed=seed)]
        starts.add(seconds[0])
        assert [b % 3 for b in seconds[:-1]] == [(a - 1) % 3 for a in seconds[1:]]
    assert starts == {1.0, 2.0, 3.0}


@pytest.mark.parametrize(
    ("name", "numbers", "words"),
    [
        ("constant", [], "takes 1"),
        ("constant", [0.0], "above 0"),
        ("constant", [math.inf], "above 0 and at most 1e\\+09, not inf"),
        ("trace", [1.0, math.inf], "above 0 and at most 1e\\+09, not inf"),
        ("lognormal", [1.0, math.inf], "from 0 to 50, not inf"),
        ("lognormal", [1.0], "takes 2"),
        ("lognormal", [1.0, -1.0], "from 0 to 50, not -1"),
        ("straggler", [1.0, 0.5], "from 1 to 1e\\+09, not 0.5"),
        ("straggler", [1.0], "takes 2 or 3 number"),
        ("straggler", [1.0, 4.0, 0.0], "slow replicas must be a whole number of at least 1, not 0"),
        ("sleeper", [1.0, 4.0, 2.5], "whole number of at least 1, not 2.5"),
        ("straggler", [1.0, 4.0, math.inf], "whole number of at least 1, not inf"),
        ("trace", [], "at least one"),
        ("gamma", [1.0], "no model 'gamma'"),
    ],
)
def test_models_that_make_no_sense_are_refused(name, numbers, words):
    with pytest.raises(ValueError, match=words):
        compute_model(name, numbers)


@pytest.mark.parametrize(
    ("name", "numbers", "expected"),
    [
        ("straggler", [0.5, 4.0], [(2.0, 0.0), (0.5, 0.0), (0.5, 0.0)]),
        ("straggler", [0.5, 4.0, 2.0], [(2.0, 0.0), (2.0, 0.0), (0.5, 0.0)]),
        ("sleeper", [0.5, 3.0, 2.0], [(0.5, 1.5), (0.5, 1.5), (0.5, 0.0)]),
    ],
)
def test_the_lowest_ranks_are_slow(name, numbers, expected):
    model = compute_model(name, numbers)
    assert [next(model.steps(rank, np.random.default_rng(0))) for rank in range(3)] == expected


# -- own clocks -----------------------------------------------------------------------------------


def test_members_are_processors_of_their_own():
    """Calls cost their caller alone: on one shared clock 200 members x 50 calls would be 10 s."""

    def role(member):
        fabric = door_to(member)
        for _ in range(50):
            fabric.receive("nothing")
        member.compute(1.0)
        return member.now

    fabric = SimulatedFabric(200, 0, call_seconds=1e-3, own_clocks=True, keep_log=False)
    assert fabric.run([role] * 200) == [pytest.approx(1.051)] * 200  # work is a call too


def test_polling_ends_on_own_clocks_too():
    def poll(member):
        fabric = door_to(member)
        while not fabric.version(1):
            pass
        return member.now

    def publish(member):
        member.compute(0.5)
        door_to(member).publish(fill(1))

    seen, _ = SimulatedFabric(2, 0, call_seconds=1e-4, own_clocks=True).run([poll, publish])
    assert 0.5 <= seen <= 0.5 + 2 * 100 * 1e-4  # looked at least every hundred calls


def test_what_one_member_has_set_of_autograd_is_its_own():
    """Contexts are of one thread, and torch keeps whether gradients are recorded by thread."""

    def role(member):
        seen = []
        for _ in range(5):
            with torch.set_grad_enabled(member.rank % 2 == 0):
                member.compute(0.1 * (1 + member.rank))
                seen.append(torch.is_grad_enabled())
            member.compute(0.01)
            seen.append(torch.is_grad_enabled())
        return seen

    for seed in range(5):
        even, odd, *_ = SimulatedFabric(4, seed).run([role] * 4)
        assert (even, odd) == ([True] * 10, [False, True] * 5)
    with torch.no_grad():
        assert SimulatedFabric(1, 0).run([lambda member: torch.is_grad_enabled()]) == [False]


def test_coroutines_need_neither_threads_nor_each_others_stack():
    """Begun from within one another, 3000 would exceed Python's recursion limit."""

    def role(member):
        member.compute(1.0)
        return member.rank

    assert SimulatedFabric(3000, 0, keep_log=False).run([role] * 3000) == list(range(3000))


# -- the network ----------------------------------------------------------------------------------


def test_a_published_version_takes_latency_and_bytes():
    def publish(member):
        door_to(member).publish(fill(1))

    def wait(member):
        assert door_to(member).wait_newer([0], [0], 10.0)
        return member.now

    network = Network(latency_seconds=0.25, bandwidth=8 * BYTES)
    assert cluster(2, network).run([publish, wait])[1] == pytest.approx(0.375)


@pytest.mark.parametrize("ports", [True, False])
def test_mail_to_one_queues_at_its_port(ports):
    def send(member):
        assert door_to(member).send(0, "t", fill(member.rank))

    def take_all(member):
        fabric, times = door_to(member), []
        for _ in range(member.size - 1):
            fabric.wait("t", 10.0)
            times.append(member.now)
        return times

    network = Network(latency_seconds=0.5, bandwidth=4 * BYTES, ports=ports)  # 0.25 s a message
    times = cluster(5, network).run([take_all, send, send, send, send])[0]
    expected = [0.75, 1.0, 1.25, 1.5] if ports else [0.75] * 4
    assert times == [pytest.approx(t) for t in expected]


def test_mail_over_a_cut_link_holds_up_no_other_mail():
    """Member 1 is cut off for ten seconds: what it sends meanwhile arrives late, and nothing else does."""

    def cut_off(member):
        fabric = door_to(member)
        member.compute(1.0)
        fabric.send(0, "t", fill(1))

    def send(member):
        fabric = door_to(member)
        member.compute(2.0)
        fabric.send(0, "t", fill(2))

    def take_all(member):
        fabric = door_to(member)
        return [(fabric.wait("t", 30.0).sender, round(member.now, 3)) for _ in range(2)]

    network = Network(latency_seconds=0.25, bandwidth=4 * BYTES)
    cut = Partition(start_seconds=0.5, end_seconds=10.5, island=frozenset({1}))
    found = cluster(3, network, partitions=[cut]).run([take_all, cut_off, send])[0]
    assert found == [(2, 2.5), (1, 11.0)]


@pytest.mark.parametrize(
    "network",
    [
        Network(handling_seconds=0.125),
        Network(handling_bandwidth=8 * BYTES),
        Network(handling_seconds=0.0625, handling_bandwidth=16 * BYTES),
    ],
)
def test_handling_is_work_of_the_core(network):
    def send(member):
        fabric = door_to(member)
        for _ in range(4):
            fabric.send(1, "t", fill(0))
        member.compute(1.0)
        return member.now, member.exchanging_seconds

    def take_all(member):
        fabric = door_to(member)
        while fabric.wait("t", 3.0):
            pass
        return member.exchanging_seconds, fabric.traffic.waiting_seconds

    sent, taken = cluster(2, network).run([send, take_all])
    assert sent == (pytest.approx(1.5), 0.5)
    assert taken[0] == 0.5
    assert taken[1] == pytest.approx(3.0)  # what it worked it did not wait


@pytest.mark.parametrize("size", [2, 5, 16])
@pytest.mark.parametrize("shape", ["ring", "tree", "fastest"])
def test_a_collective_takes_what_the_model_says(size, shape):
    latency, bandwidth = 1e-3, BYTES / 0.5
    network = Network(latency_seconds=latency, bandwidth=bandwidth, collective=shape)
    ring = 2 * (size - 1) / size * BYTES / bandwidth + 2 * (size - 1) * latency
    tree = 2 * math.ceil(math.log2(size)) * (BYTES / bandwidth + latency)
    expected = {"ring": ring, "tree": tree, "fastest": min(ring, tree)}[shape]

    def role(member):
        member.compute(1.0 + member.rank)
        fabric, x = door_to(member), fill(member.rank)
        assert fabric.mean_(x) == size
        return float(x[0]), member.now, fabric.traffic.waiting_seconds, member.exchanging_seconds

    for rank, (mean, now, waited, exchanged) in enumerate(cluster(size, network).run([role] * size)):
        assert mean == pytest.approx((size - 1) / 2)
        assert now == pytest.approx(size + expected)
        assert waited == pytest.approx(size - 1 - rank, abs=1e-9)
        assert exchanged == pytest.approx(expected)


@pytest.mark.parametrize("trace", [(), (0.5, 0.5, 4.0)])
def test_the_slowest_message_of_a_step_is_drawn_as_the_largest_of_so_many(trace):
    network = Network(latency_seconds=1.0, spread=0.7, trace_seconds=trace, collective="ring")
    n, generator, oracle = 50, np.random.default_rng(1), np.random.default_rng(2)
    ours = [network.collective_seconds(0, n, generator) for _ in range(300)]
    shape = 300, 2 * (n - 1), n
    theirs = oracle.choice(trace or (1.0,), shape) * np.exp(0.7 * oracle.standard_normal(shape))
    theirs = theirs.max(2).sum(1)
    error = math.hypot(np.std(ours), np.std(theirs)) / math.sqrt(300)
    assert np.mean(ours) == pytest.approx(theirs.mean(), abs=4 * error)


def test_lost_messages_hold_a_collective_up_as_often_as_they_are_lost():
    network = Network(loss=0.3, resend_seconds=1.0, collective="ring")
    n, generator, oracle = 8, np.random.default_rng(1), np.random.default_rng(2)
    ours = [network.collective_seconds(0, n, generator) for _ in range(400)]
    theirs = (oracle.geometric(0.7, (400, 2 * (n - 1), n)) - 1).max(2).sum(1)
    error = math.hypot(np.std(ours), np.std(theirs)) / math.sqrt(400)
    assert np.mean(ours) == pytest.approx(theirs.mean(), abs=4 * error)


def test_lost_versions_are_never_seen_and_newer_ones_are():
    count = 1600

    def publish(member):
        fabric = door_to(member)
        for k in range(count):
            fabric.publish(fill(k + 1))
            member.compute(1.0)

    def look(member):
        fabric, seen = door_to(member), []
        member.compute(0.5)
        for _ in range(count):
            seen.append(fabric.version(0))
            member.compute(1.0)
        return seen

    seen = cluster(2, Network(loss=0.25), keep_log=False).run([publish, look])[1]
    assert seen == sorted(seen)
    fresh = np.mean([version == k + 1 for k, version in enumerate(seen)])
    assert fresh == pytest.approx(0.75, abs=4 * math.sqrt(0.25 * 0.75 / count))


# -- coming back ----------------------------------------------------------------------------------


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
