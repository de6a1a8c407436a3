"""The link between two hosts, from messages of a simulated network whose figures are known."""

from __future__ import annotations

import pytest
import torch

from murmurate.errors import Refusal
from murmurate.fabric.interface import FabricError
from murmurate.fabric.simulated.fabric import Member, SimulatedFabric
from murmurate.fabric.simulated.latency import Network
from murmurate.mapping.link import link, measure, messages


@pytest.mark.parametrize(("latency", "bandwidth"), [(1e-3, 1e8), (2e-5, 2e9)])
def test_the_latency_and_bandwidth_of_a_network_are_found(latency: float, bandwidth: float) -> None:
    network = Network(latency_seconds=latency, bandwidth=bandwidth)
    fabric = SimulatedFabric(2, seed=0, network=network, call_seconds=1e-9, keep_log=False)

    def member(own: Member) -> list[tuple[int, float]]:
        return messages(own, lambda: own.now)

    samples, _ = fabric.run([member, member])
    assert isinstance(samples, list)
    found = link(samples)
    assert found.latency_seconds == pytest.approx(latency, rel=0.01)
    assert found.bytes_per_second == pytest.approx(bandwidth, rel=0.01)
    assert found.how == "measured"


def test_a_host_that_does_not_answer_is_named() -> None:
    fabric = SimulatedFabric(2, seed=0, keep_log=False)
    with pytest.raises(FabricError, match="rank 1 sent nothing"):
        fabric.run([messages, lambda own: own.channel("link", torch.zeros(1_000_000))])


def test_a_link_needs_one_rank_on_each_of_two_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Refusal, match="torchrun --nnodes 2 --nproc-per-node 1"):
        measure()
    environment = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29400"}
    for name, value in (environment | {"GROUP_WORLD_SIZE": "1"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(Refusal, match="between two hosts"):
        measure()
