"""What ``bytes_exchanged`` counts on each fabric: the formulas of docs/metrics.md, with four members."""

from __future__ import annotations

import functools
import threading

import pytest
import torch
from networked import at_once, members

from murmurate.fabric.simulated.fabric import SimulatedFabric
from murmurate.fabric.simulated.latency import Network
from murmurate.launch.together import run_together

MEMBERS = 4
LIKE = torch.zeros(1000)
B = LIKE.nbytes


def collectives(fabric, like=LIKE, meet=lambda: None):
    """The bytes that each collective adds to this member's count. meet: returns once all members call it."""
    channel, counts = fabric.channel("model", like), {}
    for name, collective in (
        ("mean", channel.mean_),
        ("gather", channel.gather),
        ("broadcast", lambda x: channel.broadcast_(x, 1)),
    ):
        before = channel.traffic.bytes
        meet()  # what the others send next is counted where it arrives
        collective(like.clone())
        meet()
        counts[name] = channel.traffic.bytes - before
    return counts


def all_operations(fabric):
    """Also those of registers and mail: this member publishes, reads the next one twice, and sends to it."""
    counts, channel = collectives(fabric), fabric.channel("other", LIKE)
    following = (channel.rank + 1) % MEMBERS

    def read_twice():
        assert channel.wait_newer([following], [0], 20.0)
        channel.peek(following)
        channel.peek(following)

    for name, act in (
        ("publish", lambda: channel.publish(LIKE)),
        ("read twice", read_twice),
        ("send", lambda: channel.send(following, "tag", LIKE)),
        ("receive", lambda: channel.wait("tag", 20.0)),
    ):
        before = channel.traffic.bytes
        act()
        counts[name] = channel.traffic.bytes - before
    return counts


ONE_BY_ONE = {"publish": B, "read twice": 2 * B, "send": B, "receive": B}


def test_in_shared_memory() -> None:
    found = run_together(MEMBERS, all_operations)
    expected = {"mean": 5 * B, "gather": 5 * B, "broadcast": B, **ONE_BY_ONE}
    assert found == [expected | {"broadcast": 2 * B if rank == 1 else B} for rank in range(MEMBERS)]


@pytest.mark.parametrize(
    ("network", "mean", "broadcast"), [(None, 5 * B, 2 * B), (Network(1e-4, 1e9), 3 * B, 0)]
)
def test_inline_and_on_a_simulated_network(network, mean, broadcast) -> None:
    found = SimulatedFabric(MEMBERS, seed=0, network=network).run([all_operations] * MEMBERS)
    assert found == [{"mean": mean, "gather": mean, "broadcast": broadcast, **ONE_BY_ONE}] * MEMBERS


@pytest.mark.parametrize("count", [1000, 1 << 16])
def test_over_the_network(count) -> None:
    """Vectors below 256 KiB go through the member of the lowest rank, larger ones do not."""
    like, n = torch.zeros(count), MEMBERS
    with members(n, shared_memory=False) as fabrics:
        meet = threading.Barrier(n).wait
        found = at_once(*(functools.partial(collectives, fabric, like, meet) for fabric in fabrics))
    in_vectors = [{name: counted / like.nbytes for name, counted in each.items()} for each in found]
    other = {"mean": 2, "gather": n + 1, "broadcast": 1}
    small = [
        {"mean": 2 * (n - 1), "gather": n**2 - 1, "broadcast": n},
        other | {"broadcast": 2},
        other,
        other,
    ]
    large = {"mean": 4 * (n - 1) / n, "gather": 2 * (n - 1), "broadcast": 1}
    expected = small if count == 1000 else [large, large | {"broadcast": n - 1}, large, large]
    assert in_vectors == expected
