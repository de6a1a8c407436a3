"""Throughput of the other replicas when one is four times as slow, by strategy and number of replicas."""

from __future__ import annotations

import dataclasses
from fractions import Fraction
from typing import Annotated, Any

from murmurate.bench import _simulated
from murmurate.bench._result import Log
from murmurate.errors import Refusal
from murmurate.ranges import PositiveFloat, PositiveInt, PositiveSeconds, Range
from murmurate.simulation.cluster import Cluster
from murmurate.strategies import strategies, strategy

NAME = "straggler-simulated"
SUMMARY = "throughput of the other replicas with one straggler, simulated, up to 1000 replicas"


@dataclasses.dataclass(frozen=True)
class SimulatedStragglerPlan:
    """strategies: the strategies that are run; empty: all but solo.

    replicas: the numbers of replicas whose throughput is measured. steps: number of steps of each replica in
    the runs that measure throughput, a multiple of ``times``. step_seconds: virtual seconds of a step. times:
    how many times as long the straggler's steps take. network: latency and bandwidth. learning_replicas:
    number of replicas in the runs that measure learning. learning_steps: number of steps of these runs.
    """

    replicas: tuple[Annotated[int, Range(2)], ...] = (4, 32, 128, 1000)
    steps: PositiveInt = 16
    step_seconds: PositiveSeconds = 0.01
    times: PositiveFloat = 4.0
    network: str = "latency=1e-4,bandwidth=1e9"
    learning_replicas: PositiveInt = 16
    learning_steps: PositiveInt = 100
    strategies: tuple[str, ...] = ()


QUICK, FULL = SimulatedStragglerPlan(), SimulatedStragglerPlan(steps=40, learning_steps=400)


def measure(plan: SimulatedStragglerPlan, log: Log) -> dict[str, Any]:
    """``others_kept``: updates per second of the other replicas, over those of a learner that runs alone.

    Exchanges cost time, too, so ``others_kept`` is below 1 even without a straggler.
    """
    # of any other number of steps the straggler's last one would end late, and the others would wait for it
    least = Fraction(str(plan.times)).numerator
    if plan.steps % least:
        steps = least * max(1, round(plan.steps / least))
        raise Refusal(f"--steps is {plan.steps}, no multiple of --times. Use --steps {steps}.")
    names = [name for name in plan.strategies or sorted(strategies()) if name != "solo"]
    _simulated.refuse_unknown(plan.network, names)
    cluster = Cluster(compute=f"straggler:{plan.step_seconds},{plan.times}", network=plan.network)
    rows: dict[str, dict[str, Any]] = {}
    for name in names:
        rows[name] = {"synchronous": strategy(name).synchronous}
        for replicas in plan.replicas:
            log(f"{name}, {replicas} replicas")
            rows[name][f"{replicas}_replicas"] = throughput_row(name, replicas, cluster, plan)
        log(f"{name}, learning")
        rows[name]["learning"] = learning_row(name, cluster, plan)
    return {
        "asynchronous_least_kept": _least_kept(rows, plan, synchronous=False),
        "synchronous_least_kept": _least_kept(rows, plan, synchronous=True),
        "strategies": rows,
    }


def throughput_row(
    name: str, replicas: int, cluster: Cluster, plan: SimulatedStragglerPlan
) -> dict[str, float]:
    seconds = plan.steps * plan.step_seconds
    run = _simulated.small(strategy(name)(), replicas, minutes=seconds / 60)
    summary, _ = _simulated.simulated(run, cluster)
    updates_of_others = (summary["total_updates"] - summary["updates_least"]) / (replicas - 1)
    return {
        "others_kept": updates_of_others / (summary["virtual_seconds"] / plan.step_seconds),
        "share_waiting": summary["share_waiting"],
        "staleness_max": summary["staleness_max"],
        "disagreement_final": summary["disagreement_final"],
    }


def learning_row(name: str, cluster: Cluster, plan: SimulatedStragglerPlan) -> dict[str, float | None]:
    """Results on CartPole after the same virtual time, in which asynchronous strategies make more, but staler
    updates."""
    seconds = plan.learning_steps * plan.step_seconds
    run = _simulated.learning(strategy(name)(), plan.learning_replicas, minutes=seconds / 60)
    summary, _ = _simulated.simulated(run, cluster)
    facts = ("train_return_mean", "eval_return_mean", "total_updates", "staleness_max", "disagreement_final")
    return {fact: summary[fact] for fact in facts}


def _least_kept(
    rows: dict[str, dict[str, Any]], plan: SimulatedStragglerPlan, synchronous: bool
) -> float | None:
    chosen = [row for row in rows.values() if row["synchronous"] == synchronous]
    return min((row[f"{n}_replicas"]["others_kept"] for row in chosen for n in plan.replicas), default=None)
