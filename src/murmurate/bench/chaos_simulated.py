"""Throughput under one fault every 29 seconds among 32 replicas, with costs that are measured here."""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any

from murmurate.bench import _commands, _simulated
from murmurate.bench._result import Log
from murmurate.bench._simulated import MessageCost, scaled_network
from murmurate.ranges import PositiveFloat, PositiveInt, PositiveSeconds
from murmurate.recipes import recipe
from murmurate.simulation.cluster import Cluster
from murmurate.strategies import strategies, strategy

NAME = "chaos-simulated"
SUMMARY = "throughput kept under one fault every 29 s, 32 replicas, simulated with measured costs"


@dataclasses.dataclass(frozen=True)
class SimulatedChaosPlan:
    """A crash, a pause or a broken connection every ``fault_seconds`` on average, for virtual ``minutes``.

    restart_seconds: time until a crashed replica is back. measured_updates: number of updates of a real
    learner that are timed for the cost of a step. network: latency and bandwidth between hosts; the CPU cost
    of a message is measured.

    replicas: number of learners. minutes: virtual minutes of each run. fault_seconds: average time between
    two faults. pause_seconds: length of a pause. cut_seconds: time for which a connection is broken.
    exchange_rounds: number of rounds that are timed for the cost of a message. strategies: the strategies
    that are run.
    """

    replicas: PositiveInt = 32
    minutes: PositiveFloat = 5.0
    fault_seconds: PositiveSeconds = 29.0
    restart_seconds: PositiveSeconds = 10.0
    pause_seconds: PositiveSeconds = 10.0
    cut_seconds: PositiveSeconds = 20.0
    measured_updates: PositiveInt = 60
    exchange_rounds: PositiveInt = 100
    network: str = "latency=1e-4,bandwidth=1e9"
    strategies: tuple[str, ...] = ("gala", "pull-gossip", "dpsgd", "all-reduce")


QUICK = SimulatedChaosPlan()
FULL = SimulatedChaosPlan(minutes=15.0, strategies=tuple(sorted(set(strategies()) - {"solo"})))


def measure(plan: SimulatedChaosPlan, log: Log) -> dict[str, Any]:
    """``kept``: updates per second of all replicas under faults, over those of the same run without faults.

    A step takes the mean time of a real learner's step, on Pong where ale-py is installed. The gradients are
    those of a small CartPole learner, whose messages take as long as messages of the real learner's size. The
    run without faults is a tenth as long, because its speed does not change. Raises Refusal for an unknown
    strategy or an invalid network.
    """
    _simulated.refuse_unknown(plan.network, plan.strategies)
    world = _commands.installed_world()
    real = dataclasses.replace(recipe(f"{world}-gala"), replicas=1)
    log(f"a step of {real.recipe}")
    step_seconds = _simulated.step_seconds(real, plan.measured_updates)
    parameters = _simulated.parameters(real)
    log(f"a message of {parameters} parameters")
    cost = _simulated.message_cost(parameters, plan.exchange_rounds)
    rows = {}
    for name in plan.strategies:
        log(name)
        rows[name] = throughput_kept(name, step_seconds, parameters, cost, plan)
    return {
        "world": world,
        "step_seconds": statistics.fmean(step_seconds),
        "handling_seconds": cost.handling_seconds,
        "message_seconds": cost.message_seconds,
        "strategies": rows,
    }


def throughput_kept(
    name: str, step_seconds: list[float], parameters: int, cost: MessageCost, plan: SimulatedChaosPlan
) -> dict[str, Any]:
    """A row of the result. step_seconds, parameters: of the real learner."""
    run = _simulated.small(strategy(name)(), plan.replicas, minutes=plan.minutes)
    without_faults = Cluster(
        compute=f"constant:{statistics.fmean(step_seconds)}",
        network=scaled_network(plan.network, _simulated.parameters(run) / parameters, cost.handling_seconds),
    )
    every_seconds = 3 * plan.fault_seconds  # for each of the three kinds of fault
    with_faults = dataclasses.replace(
        without_faults,
        crash_every_seconds=every_seconds,
        restart_after_seconds=plan.restart_seconds,
        pause_every_seconds=every_seconds,
        pause_seconds=plan.pause_seconds,
        cut_every_seconds=every_seconds,
        cut_seconds=plan.cut_seconds,
    )
    shorter = dataclasses.replace(run, minutes=plan.minutes / 10)
    (normal, _), (faulty, _) = (
        _simulated.simulated(shorter, without_faults),
        _simulated.simulated(run, with_faults),
    )
    return {
        "kept": faulty["updates_per_virtual_second"] / normal["updates_per_virtual_second"],
        "faults": {k: n for k, n in faulty["faults"].items() if k in ("died", "paused", "cut", "joined")},
        "share_waiting": faulty["share_waiting"],
        "staleness_max": faulty["staleness_max"],
        "disagreement_final": faulty["disagreement_final"],
    }
