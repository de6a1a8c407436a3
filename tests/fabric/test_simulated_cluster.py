"""The simulated fabric as a cluster: own clocks, ports, the network's time models and their formulas."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fabric.simulated_cluster import BYTES, cluster, door_to, fill
from murmurate.fabric.simulated.fabric import Partition, SimulatedFabric
from murmurate.fabric.simulated.latency import Network

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
