"""How many env steps a run needs to reach a target return, by a rule fitted to training runs.

Larger batches and more replicas see more env steps between two updates; infrequent averaging lets replicas
drift apart, and so does not waiting for one another. Each of these factors changes what is learned from an
env step. The rule is a power law in each factor, S = S_0 prod_k (x_k / x_k0) ** e_k, whose exponents e_k are
fitted to runs in which one factor changes. All-reduce, local SGD and GALA differ in period and asynchrony;
each other strategy, with its usual period, is a factor of its own.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from murmurate.errors import Refusal, RunFailed
from murmurate.launch.local import Local
from murmurate.mapping.periods import period_of, with_usual_period
from murmurate.mapping.primitives import shape_of
from murmurate.mapping.quiet import started
from murmurate.mapping.rounds import last_line
from murmurate.mapping.variants import with_faster_precision
from murmurate.strategies import strategy
from murmurate.strategies.interface import Strategy
from murmurate.training.run import Run
from murmurate.training.run_folder import plain

LEAST_SEEDS, MOST_SEEDS = 2, 8
_SECONDS = 30.0  # of one configuration's runs, after which it gets no further seed
_SHARE_REACHED = 0.75  # of a configuration's runs, at least; with two seeds, both
_RECORD_SECONDS = 0.1  # between records, from which the duration is known
FACTORS = ("replicas", "simulators", "batch", "period", "asynchrony", "precision")
_ONLY_MORE_TRIED = ("replicas", "simulators", "batch")
_USUAL = ("all-reduce", "local-sgd", "gala")  # the strategies without a factor of their own


@dataclass
class Learning:
    """target: the mean return of the last 100 training episodes to be reached. env_steps: S_0, the env steps
    that the run itself needed. exponents: the exponent of each factor. runs: number of training runs.
    unfinished: number of those runs that missed the target. missed: the factors without an exponent, because
    a run in which they change missed the target. of: ``learned_by`` of the run; empty in profiles before
    2026-11-26. tried: by ``learned_by``, the env steps that configurations needed which were trained; None
    for those that missed the target."""

    target: float
    env_steps: float
    exponents: dict[str, float]
    runs: int
    unfinished: int = 0
    missed: list[str] = field(default_factory=list)
    of: str = ""
    tried: dict[str, float | None] = field(default_factory=dict)


class Training(NamedTuple):
    """A training run to a target. seconds: from when it began to learn to its end. reached: whether it
    reached the target."""

    env_steps: float
    seconds: float
    reached: bool


Train = Callable[[Run, float, int], Training]
"""Trains a run to a target, with a seed (see ``to_target``)."""


def factors(run: Run) -> dict[str, float]:
    """The rule's factors for ``run``; 1 for a factor that the run does not have. asynchrony: 2 for replicas
    that do not wait for one another, else 1. precision: 2 for bfloat16, else 1. simulators: where a batch has
    the steps of some of them alone, those, which depend on the number of actors. A strategy with a factor of
    its own, 2, has a period relative to its usual one, and no asynchrony."""
    requires: Any = run.learner.requires
    period = period_of(run.strategy) if run.replicas > 1 else 1
    found = {
        "replicas": float(run.replicas),
        "simulators": _simulators(run),
        "batch": float(getattr(requires, "batch", 1)),
        "period": float(period),
        "asynchrony": 2.0 if run.replicas > 1 and not run.strategy.synchronous else 1.0,
        "precision": 2.0 if getattr(run.learner, "precision", None) == "bfloat16" else 1.0,
    }
    if run.replicas > 1 and (name := strategy_factor(run.strategy)) is not None:
        usual = period_of(with_usual_period(run.strategy))
        found |= {"period": period / usual, "asynchrony": 1.0, name: 2.0}
    return found


def _simulators(run: Run) -> float:
    requires: Any = run.learner.requires
    shape = shape_of(run) if requires.kind == "rollouts" else None
    return float(getattr(run.source, "simulators", 1)) if shape is None else shape.rows / requires.steps


def strategy_factor(strategy: Strategy) -> str | None:
    """The name of the factor that is ``strategy``'s own; None if it has none."""
    return None if strategy.name in _USUAL else f"strategy ({strategy.name})"


def differences(one: Run, other: Run) -> dict[str, float]:
    """The factors in which two runs differ: by name, the ratio of ``one``'s to ``other``'s."""
    own, base = factors(one), factors(other)
    ratios = {name: own.get(name, 1.0) / base.get(name, 1.0) for name in base | own}
    return {name: ratio for name, ratio in ratios.items() if ratio != 1}


def digest(parts: Any) -> str:
    """Identifies values that JSON can hold."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:12]


def learned_by(run: Run) -> str:
    """Identifies everything on which the env steps to a target depend."""
    parts = (run.world, run.learner, run.source, run.strategy)
    start, end = (run.initial, run.initial_except), (run.env_steps, run.updates)
    return digest([*map(plain, parts), run.replicas, *end, *start])


def unknown_factors(candidate: Run, run: Run, learning: Learning) -> list[str]:
    """The factors in which ``candidate``, a variant of ``run``, differs, and whose exponents are unknown."""
    tried = set(FACTORS) - {"precision"} | learning.exponents.keys()
    return [name for name in differences(candidate, run) if name in learning.missed or name not in tried]


def answers(known: Learning | None, run: Run, target: float, strategies: Sequence[Strategy]) -> bool:
    """Whether ``known`` tells how fast ``run`` reaches ``target``, also with each of ``strategies``."""
    if known is None or (known.target, known.of) != (target, learned_by(run)):
        return False
    wanted = {strategy_factor(each) for each in strategies} - {None}
    trained = {name for name, *_ in factor_pairs(run, strategies)}  # that of solo is not
    return wanted & trained <= {*known.exponents, *known.missed}


def env_steps_to_target(candidate: Run, run: Run, learning: Learning) -> float:
    """The predicted env steps that ``candidate``, a variant of ``run``, needs. Fewer replicas, simulators or
    examples than the run's have not been tried (see ``factor_pairs``), and are credited with no gain."""
    if (own := learned_by(candidate)) in learning.tried:
        return learning.tried[own] or math.inf
    steps = learning.env_steps
    for name, ratio in differences(candidate, run).items():
        changed = ratio ** learning.exponents.get(name, 0.0)
        steps *= max(1.0, changed) if name in _ONLY_MORE_TRIED and ratio < 1 else changed
    return float(steps)


def measure(
    run: Run,
    target: float,
    log: Callable[[str], None],
    strategies: Sequence[Strategy] = (),
    train: Train | None = None,
) -> Learning:
    """Train ``run``, and variants of it that each change one factor, until they reach ``target``; also one
    with each of ``strategies`` that has a factor of its own. train: does it; None: ``to_target``.

    Each is trained with two seeds, and with up to eight as long as that has taken less than 30 seconds. What
    it needs is the env steps of all its runs over the number of those that reached the target; a
    configuration of which less than three quarters reached it has missed it.

    Raises Refusal if ``run`` itself misses the target, or has no returns; RunFailed if ``run`` itself fails.
    A variant of which a run fails has missed the target.
    """
    check_returns(run)
    known: list[tuple[Run, list[Training]]] = []

    def needed(variant: Run) -> float | None:
        """Its env steps to the target; None if it missed it."""
        for trained, trainings in known:
            if trained == variant:
                return mean_env_steps(trainings)
        known.append((variant, trainings_of(variant, target, train, log, may_fail=variant != run)))
        return mean_env_steps(known[-1][1])

    own = needed(run)
    if own is None:
        raise Refusal(
            f"{run.recipe} did not reach a return of {target:g} in its {run.env_steps or 0:,} env steps with "
            f"{_misses(known[0][1])} of {len(known[0][1])} seeds. Use a lower --target, or more --env-steps."
        )
    log(f"{run.recipe}: {own:,.0f} env steps to a return of {target:g}")
    exponents: dict[str, float] = {}
    missed = []
    for name, before, after in factor_pairs(run, strategies):
        ratio = differences(after, before)[name]
        changed = f"{name} times {ratio:g}" if name in FACTORS else name
        if (shared := needed(before)) and (steps := needed(after)):
            exponents[name] = math.log(steps / shared) / math.log(ratio)
            log(f"{changed}: {steps / shared:.2f} times as many env steps")
        else:
            missed.append(name)
            log(f"{changed}: target missed")
    runs = [training for _, trainings in known for training in trainings]
    if unfinished := _misses(runs):
        log(f"unfinished: {unfinished} of {len(runs)} runs missed the target")
    tried = {learned_by(variant): mean_env_steps(trainings) for variant, trainings in known}
    return Learning(target, own, exponents, len(runs), unfinished, missed, learned_by(run), tried)


def trainings_of(
    run: Run, target: float, train: Train | None, log: Callable[[str], None], may_fail: bool = True
) -> list[Training]:
    """Trains ``run`` to ``target`` with two seeds, and with up to eight as long as that has taken less than
    30 seconds and not all have missed it. may_fail: whether a run that fails has missed it."""
    found: list[Training] = []
    while len(found) < LEAST_SEEDS or (
        len(found) < MOST_SEEDS
        and any(training.reached for training in found)
        and sum(training.seconds for training in found) < _SECONDS
    ):
        try:
            found.append((train or to_target)(run, target, len(found)))
        except (Refusal, RunFailed) as failure:
            if not may_fail:
                raise
            log(f"a run to the target failed: {last_line(failure)}")
            found.append(Training(math.inf, math.inf, reached=False))
    return found


def check_returns(run: Run) -> None:
    """Raise Refusal for a run that has no returns."""
    if not run.evaluation.plays:
        raise Refusal(
            f"{run.recipe} learns from {run.unit}, which have no returns to reach. Leave --target out, and "
            "use --objective throughput."
        )


def factor_pairs(run: Run, strategies: Sequence[Strategy] = ()) -> Iterator[tuple[str, Run, Run]]:
    """Pairs of runs that differ in one factor alone, with its name; among the factors are those of
    ``strategies``. One of each pair is ``run`` itself, or of as many replicas, two at least, with all-reduce.
    """
    source: Any = run.source
    learner: Any = run.learner
    pairs: list[tuple[str, Run, Run]] = []
    all_reduce, local, gossip = (strategy(name)() for name in _USUAL)
    shared = run if run.replicas > 1 else dataclasses.replace(run, replicas=2, strategy=all_reduce)
    doubled = shared if run.replicas == 1 else dataclasses.replace(run, replicas=2 * run.replicas)
    pairs.append(("replicas", run, doubled))
    if hasattr(source, "simulators"):
        twice = dataclasses.replace(source, simulators=2 * source.simulators)
        pairs.append(("simulators", run, dataclasses.replace(run, source=twice)))
    if hasattr(learner, "batch"):
        larger = dataclasses.replace(learner, batch=2 * learner.batch)
        pairs.append(("batch", run, dataclasses.replace(run, learner=larger)))
    pairs.append(("precision", run, with_faster_precision(run)[-1]))
    # synchronous without a period, with one, and asynchronous: the run's own strategy in place of its kind
    others = [dataclasses.replace(shared, strategy=each) for each in (all_reduce, local, gossip)]
    kinds = {_kind(each): each for each in [*others, shared] if strategy_factor(each.strategy) is None}
    plain_run = kinds[False, False]
    pairs.append(("period", plain_run, kinds[True, False]))
    pairs.append(("asynchrony", plain_run, kinds[False, True]))
    for each in {each.name: with_usual_period(each) for each in [*strategies, run.strategy]}.values():
        if (factor := strategy_factor(each)) is not None:
            pairs.append((factor, plain_run, dataclasses.replace(shared, strategy=each)))
    for name, before, after in pairs:
        if [*differences(after, before)] == [name] and _stands(before) and _stands(after):
            yield name, before, after


def _kind(run: Run) -> tuple[bool, bool]:
    """Whether the strategy of ``run`` has a period, and whether it is asynchronous."""
    own = factors(run)
    return own["period"] > 1, own["asynchrony"] > 1


def _stands(run: Run) -> bool:
    """Whether the checks of ``run`` accept it."""
    try:
        run.validate()
    except Refusal:
        return False
    return True


def to_target(run: Run, target: float, seed: int) -> Training:
    """Train ``run`` until it reaches the return ``target``, or to its end."""
    with tempfile.TemporaryDirectory(prefix="murmurate-learning-") as folder:
        changed = dataclasses.replace(
            run,
            seed=seed,
            stop_at_return=target,
            launcher=Local.name,
            record_every_seconds=_RECORD_SECONDS,
            evaluate_every_env_steps=0,
            loggers=(),
            compression="none",  # of what hosts send each other
        )
        coordinator = started(changed, Path(folder))
        records = map(json.loads, (Path(folder) / "metrics.jsonl").read_text().splitlines())
        times = [record["time_seconds"] for record in records if "env_steps_per_second" in record]
    env_steps = float(coordinator.run_state.total_env_steps())
    seconds = max(times) - min(times) + _RECORD_SECONDS
    reached = coordinator.stopped_because.startswith("the mean return")  # a time limit stops it, too
    return Training(env_steps, seconds, reached)


def _misses(trainings: Sequence[Training]) -> int:
    return sum(not training.reached for training in trainings)


def mean_env_steps(trainings: Sequence[Training]) -> float | None:
    """Env steps for each run that reached the target, the others' counted; None if too few reached it."""
    reached = len(trainings) - _misses(trainings)
    if reached < _SHARE_REACHED * len(trainings):
        return None
    return sum(training.env_steps for training in trainings) / reached
