"""How long replicas wait in the fabric when one of four is slow, under each strategy."""

from __future__ import annotations

import dataclasses
import statistics
import time
from typing import Annotated, Any

import torch
from torch import nn

from murmurate.bench import _roles
from murmurate.bench._result import Log, spreads
from murmurate.fabric.interface import Fabric
from murmurate.ranges import NonNegativeFloat, PositiveInt, PositiveSeconds, Range
from murmurate.replicator.replicator import Replicator
from murmurate.strategies import strategy

NAME = "straggler"
SUMMARY = "share of time blocked in the fabric when one of four replicas sleeps three of its step times"

_ASYNCHRONOUS = ("gala", "pull-gossip", "push-gossip", "push-sum", "dpsgd", "hogwild", "parameter-server")
_SYNCHRONOUS = ("all-reduce", "local-sgd")


@dataclasses.dataclass(frozen=True)
class StragglerPlan:
    """seconds: duration of a measurement. repetitions: number of measurements of each strategy. replicas:
    number of processes that learn. sleeps: how many of its own step times the last replica sleeps after each
    step. width: width of the net. batch: rows of a step. strategies: the strategies that are run.
    """

    seconds: PositiveSeconds = 4.0
    repetitions: PositiveInt = 1
    replicas: Annotated[int, Range(2)] = 4
    sleeps: NonNegativeFloat = 3.0
    width: PositiveInt = 512
    batch: PositiveInt = 64
    strategies: tuple[str, ...] = (*_ASYNCHRONOUS, *_SYNCHRONOUS)


QUICK, FULL = StragglerPlan(), StragglerPlan(seconds=15.0, repetitions=3)


def measure(plan: StragglerPlan, log: Log) -> dict[str, Any]:
    """Blocked time is time inside the fabric's waits: a replica that only waits for a core is not blocked."""
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in plan.strategies}
    for number in range(plan.repetitions):
        for name in plan.strategies:
            log(f"{name}, {number + 1} of {plan.repetitions}")
            members = plan.replicas + strategy(name).centre
            rows[name].append(figures(_roles.run_together(members, work, name, plan), plan.replicas))
    return {"fabric": "processes", "strategies": {name: spreads(measured) for name, measured in rows.items()}}


def figures(answers: list[dict[str, float]], replicas: int) -> dict[str, float]:
    """The fast replicas' share of blocked time, and rates of updates: of all replicas for each CPU second of
    all members, of a fast replica, and of the slow one. answers: of the members, a centre last."""
    learners, fast = answers[:replicas], answers[: replicas - 1]
    return {
        "blocked_share": statistics.fmean(a["blocked_seconds"] / a["wall_seconds"] for a in fast),
        "updates_per_cpu_second": sum(a["updates"] for a in learners)
        / sum(a["cpu_seconds"] for a in answers),
        "updates_of_the_quick_per_second": statistics.fmean(a["updates"] / a["wall_seconds"] for a in fast),
        "updates_of_the_slow_per_second": learners[-1]["updates"] / learners[-1]["wall_seconds"],
    }


def work(fabric: Fabric, name: str, plan: StragglerPlan) -> dict[str, float]:
    """What one member measures: least squares with a small net; the last learner sleeps after each step."""
    generator = torch.Generator().manual_seed(fabric.rank)
    net = nn.Sequential(nn.Linear(plan.width, plan.width), nn.ReLU(), nn.Linear(plan.width, 1))
    replicator = Replicator(strategy(name)(), fabric)
    replica = replicator.replicate("model", net, lambda p: torch.optim.SGD(p, lr=1e-3))
    x = torch.randn(plan.batch, plan.width, generator=generator)
    y = x[:, :1].clone()
    channel = fabric.channel("step seconds", torch.zeros(1))
    step_seconds = max(
        float(t) for t in channel.gather(torch.tensor([_gradient_seconds(net, x, y)])).values()
    )
    bound = replicator.bound_replicas["model"]
    # synchronous members all end at the same round, asynchronous ones when the time is up
    rounds = max(20, int(plan.seconds / (step_seconds * (1 + plan.sleeps))))
    synchronous, centre = bound.strategy.synchronous, fabric.rank >= plan.replicas
    blocked_before = bound.channel.traffic.waiting_seconds
    ends = fabric.channel("ends", torch.zeros(1))
    cpu_start, start = time.process_time(), time.monotonic()
    replica.grad.zero_()
    while replica.clock < rounds if synchronous else time.monotonic() - start < plan.seconds:
        if centre:
            bound.strategy.serve(replica, bound.channel)
            continue
        began, waiting_before = time.monotonic(), bound.channel.traffic.waiting_seconds
        replica.descend((net(x) - y).square().mean())
        if fabric.rank == plan.replicas - 1:
            waited = bound.channel.traffic.waiting_seconds - waiting_before
            time.sleep(plan.sleeps * (time.monotonic() - began - waited))
    result = {
        "blocked_seconds": bound.channel.traffic.waiting_seconds - blocked_before,
        "wall_seconds": time.monotonic() - start,
        "cpu_seconds": time.process_time() - cpu_start,
        "updates": float(0 if centre else replica.clock),
    }
    if not centre:
        ends.publish(torch.ones(1))
    learners = [r for r in range(plan.replicas) if r != fabric.rank]
    while centre and not ends.wait_newer(learners, [0] * len(learners), 0.0):
        bound.strategy.serve(replica, bound.channel)  # a learner may still wait for an answer
    return result


def _gradient_seconds(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    """Median seconds of a gradient."""
    times = []
    for _ in range(15):
        start = time.monotonic()
        (net(x) - y).square().mean().backward()
        times.append(time.monotonic() - start)
    return statistics.median(times)
