"""Shared by the image benchmarks on simulated clusters: the costs of a large net are measured here, while a
small net learns in its place."""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from murmurate.bench import _roles, _simulated
from murmurate.datasets.image_set import ImageBatch
from murmurate.fabric.interface import Fabric
from murmurate.replica.vector import Replica
from murmurate.replicator.learner import Context
from murmurate.spec import Batch, EnvSpec
from murmurate.workloads.image_classifier import ImageClassifier, Net

_WARM_UP = 1


@dataclasses.dataclass(frozen=True)
class NetCosts:
    """seconds: CPU seconds of measured training steps on one core. parameters: number of parameters of the
    net."""

    seconds: tuple[float, ...]
    parameters: int

    @property
    def mean_seconds(self) -> float:
        return statistics.fmean(self.seconds)


def net_costs(net: Net, side: int, classes: int, batch: int, steps: int) -> NetCosts:
    """The costs of a step of ``net`` on ``batch`` random images of ``side`` x ``side`` pixels."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # as replicas do
    spec = EnvSpec("random", (3, side, side), torch.uint8, classes, channels=3, examples=batch)
    learner = ImageClassifier(net=net, batch=batch, validate_every=0).build(Context(spec, Replica, 0))
    random = np.random.default_rng(0)
    pixels = random.integers(0, 256, (batch, side, side, 3), dtype=np.uint8)
    data = Batch(ImageBatch.of(pixels, random.integers(0, classes, batch)))
    seconds = []
    for _ in range(steps + _WARM_UP):
        start = time.process_time()
        learner.learn(data)
        seconds.append(time.process_time() - start)
    return NetCosts(tuple(seconds[_WARM_UP:]), len(learner.replica))


@dataclasses.dataclass(frozen=True)
class GlooRate:
    """The rate of torch's all-reduce over gloo between two processes of this host."""

    latency_seconds: float
    bytes_per_second: float

    @property
    def network(self) -> str:
        """As ``Cluster.network``; in a ring of two, each member sends and receives the vector's bytes
        once."""
        return f"latency={self.latency_seconds:g},bandwidth={self.bytes_per_second:g},collective=ring"


def gloo_rate(parameters: int, rounds: int) -> GlooRate:
    """The rate by the median times of all-reduces of one float32 (20 * ``rounds``), and of ``parameters``
    float32 (``rounds``)."""
    with tempfile.TemporaryDirectory(prefix="murmurate-gloo-") as folder:
        answers = _roles.run_together(2, _all_reduces, str(Path(folder) / "store"), parameters, rounds)
    latency, seconds = (statistics.median(values) for values in zip(*answers, strict=True))
    # an all-reduce in a ring of two has two steps, each with the latency once
    return GlooRate(latency / 2, 4 * parameters / max(seconds - latency, 1e-9))


def _all_reduces(fabric: Fabric, store: str, parameters: int, rounds: int) -> tuple[float, float]:
    """Median seconds of an all-reduce of one number, and of ``parameters`` numbers."""
    _roles.join_gloo(fabric, store, 2)
    try:
        return _median_seconds(torch.zeros(1), 20 * rounds), _median_seconds(torch.zeros(parameters), rounds)
    finally:
        dist.destroy_process_group()


def _median_seconds(x: torch.Tensor, rounds: int) -> float:
    seconds = []
    for _ in range(rounds + _WARM_UP):
        start = time.perf_counter()
        dist.all_reduce(x)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[_WARM_UP:])


def compute_file(costs: NetCosts, folder: Path) -> str:
    """Write the steps' seconds to a file; returns the value of ``Cluster.compute`` that repeats them."""
    path = folder / "step-seconds.txt"
    path.write_text(" ".join(f"{seconds:.6f}" for seconds in costs.seconds))
    return f"trace:{path}"


def network_for(network: str, parameters: int, costs: NetCosts) -> str:
    """``network`` on which a vector of ``parameters`` numbers takes as long as one of the measured net."""
    return _simulated.scaled_network(network, parameters / costs.parameters, 0.0)
