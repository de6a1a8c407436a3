"""One fault every 29 seconds among 32 replicas, with costs measured here: how much work is still done."""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any

from murmurate.bench import _commands, _simulated
from murmurate.bench._result import Log
from murmurate.recipes import recipe
from murmurate.simulation.cluster import Cluster
from murmurate.strategies import strategies

NAME = "chaos-simulated"
SUMMARY = "throughput kept under one fault every 29 s, 32 replicas, simulated with measured costs"


@dataclasses.dataclass(frozen=True)
class Plan:
    """A crash, a pause or a cut link every ``fault_seconds`` in the mean, for ``minutes`` virtual minutes.

    restart_seconds: until a crashed one is back. measured_updates: of a real learner, for what a step takes.
    network: between hosts; what a message costs the core is measured.
    """

    replicas: int = 32
    minutes: float = 5.0
    fault_seconds: float = 29.0
    restart_seconds: float = 10.0
    pause_seconds: float = 10.0
    cut_seconds: float = 20.0
    measured_updates: int = 60
    exchange_rounds: int = 100
    network: str = "latency=1e-4,bandwidth=1e9"
    strategies: tuple[str, ...] = ("gala", "pull-gossip", "dpsgd", "all-reduce")


def measure(full: bool, log: Log, plan: Plan | None = None) -> dict[str, Any]:
    """``kept``: updates of all under faults, over those of the same run without.

    A step takes what one of a real learner's did in the mean, of Pong where ale-py is installed; the
    gradients are those of a small CartPole learner, whose messages are stretched to the real one's size.
    The run without faults is a tenth as long: it is the same all the time.
    """
    plan = plan or (
        Plan(minutes=15.0, strategies=tuple(sorted(set(strategies()) - {"solo"}))) if full else Plan()
    )
    world = "pong" if _commands.missing("ale-py", "atari") is None else "cartpole"
    real = dataclasses.replace(recipe(f"{world}-gala"), replicas=1)
    log(f"a step of {real.recipe}")
    steps = _simulated.step_seconds(real, plan.measured_updates)
    count = _simulated.parameters(real)
    log(f"a message of {count} parameters")
    cost = _simulated.exchange_cost(count, plan.exchange_rounds)
    rows = {}
    for name in plan.strategies:
        log(name)
        rows[name] = kept(name, steps, count, cost, plan)
    return {
        "world": world,
        "step_seconds": statistics.median(steps),
        "handling_seconds": cost.handling_seconds,
        "message_seconds": cost.message_seconds,
        "strategies": rows,
        "plan": dataclasses.asdict(plan),
    }


def kept(name: str, steps: list[float], count: int, cost: _simulated.Exchange, plan: Plan) -> dict[str, Any]:
    run = _simulated.small(strategies()[name](), plan.replicas, minutes=plan.minutes)
    calm = Cluster(
        compute=f"constant:{statistics.fmean(steps)}",
        network=stretched(plan.network, _simulated.parameters(run) / count, cost.handling_seconds),
    )
    each = 3 * plan.fault_seconds  # of three kinds
    faulty = dataclasses.replace(
        calm,
        crash_every_seconds=each,
        restart_after_seconds=plan.restart_seconds,
        pause_every_seconds=each,
        pause_seconds=plan.pause_seconds,
        cut_every_seconds=each,
        cut_seconds=plan.cut_seconds,
    )
    shorter = dataclasses.replace(run, minutes=plan.minutes / 10)
    (quiet, _), (stormy, _) = _simulated.simulated(shorter, calm), _simulated.simulated(run, faulty)
    return {
        "kept": stormy["updates_per_virtual_second"] / quiet["updates_per_virtual_second"],
        "faults": {k: n for k, n in stormy["faults"].items() if k in ("died", "paused", "cut", "joined")},
        "share_waiting": stormy["share_waiting"],
        "staleness_max": stormy["staleness_max"],
        "disagreement_final": stormy["disagreement_final"],
    }


def stretched(network: str, share: float, handling_seconds: float) -> str:
    """``network`` on which messages of ``share`` of the real size take as long as real ones."""
    words = dict(pair.split("=") for pair in network.split(","))
    words["bandwidth"] = str(float(words["bandwidth"]) * share)
    words["handling"] = str(handling_seconds)
    return ",".join(f"{word}={value}" for word, value in words.items())
