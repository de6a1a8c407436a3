"""Shared by the benchmarks on simulated clusters: small runs, and step and message costs measured here."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, cast

import torch

from murmurate.agents.a2c import A2C
from murmurate.bench import _roles
from murmurate.bench._resumable import diverged
from murmurate.errors import RunFailed
from murmurate.evaluation.games import Games
from murmurate.fabric.interface import Fabric
from murmurate.recipes import recipe
from murmurate.record.reader import Record, read_metrics
from murmurate.replica.vector import Replica
from murmurate.simulation.cluster import Cluster
from murmurate.simulation.start import simulate
from murmurate.sources.rollouts import RolloutSourceConfig
from murmurate.strategies import strategy as strategy_named
from murmurate.strategies.interface import Strategy
from murmurate.training.members import build_learner, open_only_source
from murmurate.training.run import Run

_WARM_UP = 5


def refuse_unknown(network: str, strategies: Iterable[str] = ()) -> None:
    """Raise Refusal for a network that ``Cluster`` refuses and for an unknown strategy. Benchmarks call this
    before they measure anything."""
    Cluster(network=network).network_model()
    for name in strategies:
        strategy_named(name)


def small(strategy: Strategy, replicas: int, **changes: Any) -> Run:
    """CartPole with a tiny net and rollouts of one step, for runs of which only time is measured."""
    base = recipe("cartpole-gala")
    learner = dataclasses.replace(cast(A2C, base.learner), steps=1, hidden=8)
    return learning(strategy, replicas, learner=learner, **changes)


def learning(strategy: Strategy, replicas: int, **changes: Any) -> Run:
    """CartPole as its recipes have it, with one simulator per replica, for runs whose return is measured."""
    base = dataclasses.replace(
        recipe("cartpole-gala"), source=RolloutSourceConfig(simulators=1), env_steps=None, evaluation=Games(1)
    )
    return dataclasses.replace(base, strategy=strategy, replicas=replicas, **changes)


def simulated(run: Run, cluster: Cluster, may_diverge: bool = False) -> tuple[dict[str, Any], list[Record]]:
    """Simulate ``run``; returns its summary, and its records without events. Raises RunFailed if it fails;
    with ``may_diverge`` not where it diverged (see ``_resumable.diverged``)."""
    with tempfile.TemporaryDirectory(prefix="murmurate-bench-") as folder:
        where = Path(folder) / "run"
        summary = simulate(run, cluster, where, quiet=True).summary or {}
        records = read_metrics(where / "metrics.jsonl")
    if summary["exit"] != "finished" and not (may_diverge and diverged(summary)):
        raise RunFailed(f"{run.strategy.name} with {run.replicas} replicas: {summary['exit']}")
    return summary, [record for record in records if "kind" not in record]


def return_curve(records: Sequence[Record]) -> list[tuple[float, float]]:
    """(virtual second, mean training return over all replicas) over a run, without the time before the first
    episode's end."""
    return sorted(
        {r["time_seconds"]: r["return_mean"] for r in records if r["return_mean"] is not None}.items()
    )


def updates_per_second(records: Sequence[Record], env_steps_an_update: int) -> float:
    """Updates of all replicas together per virtual second, between a fifth and four fifths of their work.

    The end of the run is left out, because there some replicas wait in vain for others that have finished.
    env_steps_an_update: env steps of an update of one replica. Raises RunFailed if the run is too short.
    """
    points = sorted({r["time_seconds"]: r["total_env_steps"] for r in records}.items())
    total = points[-1][1]
    start, steps_before = next(point for point in points if point[1] >= total / 5)
    end, steps_after = next(point for point in points if point[1] >= 4 * total / 5)
    if end <= start:
        raise RunFailed("the run is too short to measure its speed: give more steps")
    return float((steps_after - steps_before) / (end - start) / env_steps_an_update)


def step_seconds(run: Run, updates: int, clock: Callable[[], float] = time.perf_counter) -> list[float]:
    """Seconds of each of ``updates`` updates of one learner on one core, after a warm-up.

    An update is the source's batch (acting and simulators, or choosing documents), the gradient and the
    optimizer, without an exchange. clock: what is read after each update (wall time, or CPU time). From then
    on this process computes with one thread.
    """
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # as replicas do
    learner = build_learner(run, 0, Replica)
    source = open_only_source(run, learner)
    ends = []
    try:
        for batch in itertools.islice(source, updates + _WARM_UP + 1):
            learner.learn(batch)
            ends.append(clock())
    finally:
        source.close()
    return [after - before for before, after in itertools.pairwise(ends[_WARM_UP:])]


def parameters(run: Run) -> int:
    """Length of the vectors that this run's replicas exchange."""
    return sum(len(replica) for replica in build_learner(run, 0, Replica).replicas.values())


@dataclasses.dataclass(frozen=True)
class MessageCost:
    """handling_seconds: CPU seconds at each end. message_seconds: wall seconds from end to end."""

    handling_seconds: float
    message_seconds: float


def message_cost(count: int, rounds: int) -> MessageCost:
    """The cost of a message with ``count`` float32 between two processes, through shared memory."""
    answers = _roles.run_together(2, _ping_pong, count, rounds)
    return MessageCost(
        handling_seconds=statistics.median(cpu for cpu, _ in answers),
        message_seconds=statistics.median(wall for _, wall in answers),
    )


def _ping_pong(fabric: Fabric, count: int, rounds: int) -> tuple[float, float]:
    """(CPU, wall) seconds of one message at this end, medians over ``rounds``."""
    channel = fabric.channel("ping", torch.zeros(count))
    x, peer = torch.randn(count, generator=torch.Generator().manual_seed(0)), 1 - fabric.rank
    cpu, wall = [], []
    for number in range(rounds + 3):
        wall_start, cpu_start = time.perf_counter(), time.process_time()
        if fabric.rank == 0:
            channel.send(peer, "ping", x)
        if channel.wait("ping", 30.0) is None:
            raise RunFailed(f"rank {peer} did not answer within 30 s")
        if fabric.rank == 1:
            channel.send(peer, "ping", x)
        if number >= 3:
            cpu.append((time.process_time() - cpu_start) / 2)
            wall.append((time.perf_counter() - wall_start) / 2)
    return statistics.median(cpu), statistics.median(wall)


def scaled_network(network: str, size_ratio: float, handling_seconds: float) -> str:
    """``network``, changed so that messages of ``size_ratio`` times the real size take as long as real
    ones. handling_seconds: for each message, unless ``network`` says it. Raises Refusal for a ``network``
    that ``Cluster`` refuses."""
    refuse_unknown(network)
    settings = dict(pair.split("=", 1) for pair in network.split(",") if pair)
    for rate in {"bandwidth", "handling-bandwidth"} & settings.keys():
        settings[rate] = str(float(settings[rate]) * size_ratio)
    settings.setdefault("handling", str(handling_seconds))
    return ",".join(f"{name}={value}" for name, value in settings.items())
