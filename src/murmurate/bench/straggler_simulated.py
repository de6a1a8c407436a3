"""One replica four times as slow as the rest: what the others still get done, by strategy and number."""

from __future__ import annotations

import dataclasses
from typing import Any

from murmurate.bench import _simulated
from murmurate.bench._result import Log
from murmurate.simulation.cluster import Cluster
from murmurate.strategies import strategies

NAME = "straggler-simulated"
SUMMARY = "throughput of the others beside one straggler, simulated, up to 1000 replicas"


@dataclasses.dataclass(frozen=True)
class Plan:
    """Runs of ``steps`` step times of ``step_seconds``; for learning ``learning_steps``, fewer replicas."""

    replicas: tuple[int, ...] = (4, 32, 128, 1000)
    steps: int = 16
    step_seconds: float = 0.01
    times: float = 4.0
    network: str = "latency=1e-4,bandwidth=1e9"
    learning_replicas: int = 16
    learning_steps: int = 100
    strategies: tuple[str, ...] = ()


def measure(full: bool, log: Log, plan: Plan | None = None) -> dict[str, Any]:
    """``others_kept``: updates a second of the others, over those of a learner that nobody holds up.

    Exchanges cost time too, so even without a straggler this is below 1.
    """
    plan = plan or (Plan(steps=40, learning_steps=400) if full else Plan())
    names = [name for name in plan.strategies or sorted(strategies()) if name != "solo"]
    cluster = Cluster(compute=f"straggler:{plan.step_seconds},{plan.times}", network=plan.network)
    rows: dict[str, dict[str, Any]] = {}
    for name in names:
        rows[name] = {"synchronous": _simulated.synchronous(name)}
        for replicas in plan.replicas:
            log(f"{name}, {replicas} replicas")
            rows[name][f"{replicas}_replicas"] = kept(name, replicas, cluster, plan)
        log(f"{name}, learning")
        rows[name]["learning"] = learned(name, cluster, plan)
    free = [row for row in rows.values() if not row["synchronous"]]
    bound = [row for row in rows.values() if row["synchronous"]]
    return {
        "asynchronous_least_kept": _least(free, plan),
        "synchronous_least_kept": _least(bound, plan),
        "strategies": rows,
        "plan": dataclasses.asdict(plan),
    }


def kept(name: str, replicas: int, cluster: Cluster, plan: Plan) -> dict[str, float]:
    seconds = plan.steps * plan.step_seconds
    run = _simulated.small(strategies()[name](), replicas, minutes=seconds / 60)
    summary, _ = _simulated.simulated(run, cluster)
    others = (summary["total_updates"] - summary["updates_least"]) / (replicas - 1)
    return {
        "others_kept": others / (summary["virtual_seconds"] / plan.step_seconds),
        "share_waiting": summary["share_waiting"],
        "staleness_max": summary["staleness_max"],
        "disagreement_final": summary["disagreement_final"],
    }


def learned(name: str, cluster: Cluster, plan: Plan) -> dict[str, float | None]:
    """CartPole after the same virtual time, where the asynchronous have made more updates, but staler."""
    seconds = plan.learning_steps * plan.step_seconds
    run = _simulated.learning(strategies()[name](), plan.learning_replicas, minutes=seconds / 60)
    summary, _ = _simulated.simulated(run, cluster)
    facts = ("train_return_mean", "eval_return_mean", "total_updates", "staleness_max", "disagreement_final")
    return {fact: summary[fact] for fact in facts}


def _least(rows: list[dict[str, Any]], plan: Plan) -> float | None:
    return min((row[f"{n}_replicas"]["others_kept"] for row in rows for n in plan.replicas), default=None)
