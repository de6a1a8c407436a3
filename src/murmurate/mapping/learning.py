"""How many env steps a run needs to reach a target return, by a rule fitted to training runs.

Larger batches and more replicas see more env steps between two updates; infrequent averaging lets replicas
drift apart, and so does not waiting for one another. Each of these factors changes what is learned from an
env step. The rule is a power law in each factor, S = S_0 prod_k (x_k / x_k0) ** e_k, whose exponents e_k are
fitted to runs in which one factor changes.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from murmurate.errors import Refusal
from murmurate.launch.local import Local
from murmurate.mapping.quiet import started
from murmurate.strategies import strategy
from murmurate.training.run import Run

_RECORD_SECONDS = 0.1  # between records, from which the duration is known
FACTORS = ("replicas", "simulators", "batch", "period", "asynchrony")


@dataclass
class Learning:
    """target: the mean return of the last 100 training episodes to be reached. env_steps: S_0, the env steps
    that the recipe itself needed. exponents: the exponent of each factor. runs: number of training runs.
    unfinished: number of those runs that missed the target; they count as if they had reached it at their
    end."""

    target: float
    env_steps: float
    exponents: dict[str, float]
    runs: int
    unfinished: int = 0


class Training(NamedTuple):
    """A training run to a target. seconds: from when it began to learn to its end. reached: whether it
    reached the target."""

    env_steps: float
    seconds: float
    reached: bool


def factors(run: Run) -> dict[str, float]:
    """The rule's factors for ``run``; 1 for a factor that the run does not have. asynchrony: 2 for replicas
    that do not wait for one another, else 1."""
    requires: Any = run.learner.requires
    period = getattr(run.strategy, "period", 1) if run.replicas > 1 else 1
    return {
        "replicas": float(run.replicas),
        "simulators": float(getattr(run.source, "simulators", 1)),
        "batch": float(getattr(requires, "batch", 1)),
        "period": float(period),
        "asynchrony": 2.0 if run.replicas > 1 and not run.strategy.synchronous else 1.0,
    }


def env_steps_to_target(candidate: Run, run: Run, learning: Learning) -> float:
    """The predicted env steps that ``candidate``, a variant of ``run``, needs."""
    own, base = factors(candidate), factors(run)
    ratio = math.prod((own[name] / base[name]) ** learning.exponents.get(name, 0.0) for name in FACTORS)
    return float(learning.env_steps * ratio)


def measure(run: Run, target: float, log: Callable[[str], None], seeds: int = 2) -> Learning:
    """Train ``run``, and variants of it that each change one factor, until they reach ``target``.

    Raises Refusal if ``run`` itself does not reach it, or has no returns.
    """
    check_returns(run)
    base = [to_target(run, target, seed) for seed in range(seeds)]
    reached = [steps for steps, _, hit in base if hit]
    if not reached:
        raise Refusal(
            f"{run.recipe} did not reach a return of {target:g} in its {run.env_steps or 0:,} env steps. Use "
            "a lower --target, or more --env-steps."
        )
    own = _geometric_mean([steps for steps, _, _ in base])
    log(f"{run.recipe}: {own:,.0f} env steps to a return of {target:g}")
    exponents: dict[str, float] = {}
    runs, unfinished = seeds, seeds - len(reached)
    before = factors(run)
    for name, variant in variants(run).items():
        found = [to_target(variant, target, seed) for seed in range(seeds)]
        runs, unfinished = runs + seeds, unfinished + sum(not hit for _, _, hit in found)
        steps = _geometric_mean([steps for steps, _, _ in found])
        reference = own
        if name in ("period", "asynchrony"):  # the variant has at least two replicas as well
            reference *= (variant.replicas / run.replicas) ** exponents.get("replicas", 0.0)
        ratio = factors(variant)[name] / before[name]
        exponents[name] = math.log(steps / reference) / math.log(ratio) if ratio != 1 else 0.0
        log(f"{name} {before[name]:g} -> {factors(variant)[name]:g}: {steps:,.0f} env steps")
    return Learning(target, own, exponents, runs, unfinished)


def check_returns(run: Run) -> None:
    """Raise Refusal for a run that has no returns."""
    if not run.evaluation.plays:
        raise Refusal(
            f"{run.recipe} learns from {run.unit}, which have no returns to reach. Leave --target out, and "
            "use --objective throughput."
        )


def variants(run: Run) -> dict[str, Run]:
    """Variants of ``run`` that each change one factor, keyed by that factor."""
    found: dict[str, Run] = {}
    source: Any = run.source
    learner: Any = run.learner
    shared = run.strategy if run.replicas > 1 else strategy("all-reduce")()
    found["replicas"] = dataclasses.replace(run, replicas=2 * run.replicas, strategy=shared)
    found["simulators"] = dataclasses.replace(
        run, source=dataclasses.replace(source, simulators=2 * source.simulators)
    )
    if hasattr(learner, "batch"):
        found["batch"] = dataclasses.replace(
            run, learner=dataclasses.replace(learner, batch=2 * learner.batch)
        )
    local: Any = strategy("local-sgd")()
    gossip: Any = strategy("gala")()
    found["period"] = dataclasses.replace(run, replicas=max(2, run.replicas), strategy=local)
    found["asynchrony"] = dataclasses.replace(run, replicas=max(2, run.replicas), strategy=gossip)
    accepted = {}
    for name, variant in found.items():
        try:
            variant.validate()
        except Refusal:
            continue
        accepted[name] = variant
    return accepted


def to_target(run: Run, target: float, seed: int) -> Training:
    """Train ``run`` until it reaches the return ``target``, or to its end."""
    with tempfile.TemporaryDirectory(prefix="murmurate-learning-") as folder:
        changed = dataclasses.replace(
            run,
            seed=seed,
            stop_at_return=target,
            launcher=Local.name,
            record_every_seconds=_RECORD_SECONDS,
        )
        coordinator = started(changed, Path(folder))
        records = map(json.loads, (Path(folder) / "metrics.jsonl").read_text().splitlines())
        times = [record["time_seconds"] for record in records if "env_steps_per_second" in record]
    env_steps = float(coordinator.run_state.total_env_steps())
    seconds = max(times) - min(times) + _RECORD_SECONDS
    reached = coordinator.stopped_because.startswith("the mean return")  # a time limit stops it, too
    return Training(env_steps, seconds, reached)


def _geometric_mean(values: list[float]) -> float:
    return math.exp(statistics.fmean(math.log(max(value, 1.0)) for value in values))
