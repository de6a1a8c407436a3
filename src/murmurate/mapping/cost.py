"""Predicts the throughput of a run from the costs of its primitives: a queueing model of its dataflow.

A replica's actors and its learner are stages of a pipeline with bounded queues. The slowest stage limits the
pipeline's throughput (Zhang 2022, eq. 4.2), and so do the cores, which replicas and actors share if there are
more of them than cores. Under a synchronous strategy, replicas wait for the slowest one in each round.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

from murmurate.mapping.periods import label, period_of
from murmurate.mapping.primitives import (
    PRIMITIVES,
    calls,
    computing_threads,
    most_processes,
    producers,
    records_of,
    shape_of,
    size_of,
)
from murmurate.mapping.profile import DeviceProfile, RecipeCosts, exchange_key, key
from murmurate.mapping.variants import placed_on_cpu
from murmurate.sources.interface import BatchShape
from murmurate.spec import Placement
from murmurate.training.run import Run

_EXPOSED = 0.6  # share of a handover that counts where cores are shared, if that was not measured
_SLICE_SECONDS = 0.75e-3  # Linux's time slice on one core; up to 8 cores it grows with their logarithm


@dataclass(frozen=True)
class Prediction:
    """env_steps_per_second, updates_per_second: rates of the whole run; every batch of a replica counts as
    one update.

    seconds: for one batch of a replica, the seconds of each primitive, slowed down by other busy cores; of
    ``exchange`` and ``waiting``; and, with actors, of ``handover`` (from actor to learner process).
    bottleneck: what limits the rates: ``learner``, ``actors`` or ``cores``. busy: the mean number of busy
    cores. own_seconds: seconds of a batch in a learner's process without exchange and waiting.
    least_seconds: the fewest seconds of a batch that actors and cores allow, however fast the learner is; 0
    without actors.
    """

    env_steps_per_second: float
    updates_per_second: float
    seconds: dict[str, float]
    bottleneck: str
    busy: float
    own_seconds: float
    least_seconds: float = 0.0


class NotMeasured(Exception):
    """The profile lacks the costs of a run; the message names them."""


def predict(run: Run, profile: DeviceProfile) -> Prediction:
    """The throughput of ``run`` on the profile's device.

    Raises NotMeasured if the profile lacks the costs of its recipe or of its exchange, and for sources that
    are not modelled.
    """
    costs, shape = profile.recipes.get(key(run)), shape_of(run)
    if costs is None or shape is None or set(costs.lines) != set(PRIMITIVES):
        raise NotMeasured(f"the costs of {run.recipe}")
    actors = producers(run)
    threads, computing = run.placement.threads, computing_threads(run)
    processes = run.replicas * (1 + actors)
    seconds = _batch_seconds(costs, shape, most_processes(run, profile.cores), processes)
    if actors and run.placement != Placement():  # they are on the CPU, with one thread each
        of_actors = profile.recipes.get(key(placed_on_cpu(run)), costs)
        acting_seconds = _batch_seconds(of_actors, shape, profile.cores, processes)
        seconds |= {name: s for name, s in acting_seconds.items() if not _is_learner_work(name)}
    # the exchange was measured among as many processes of one thread, which shared the cores already
    learners = threads * run.replicas
    shared = max(1.0, learners / profile.cores) * _crowd(costs, learners, profile.cores)
    seconds["exchange"] = _exchange(run, shape, costs, profile) / shared
    learner_work = [
        n for n in (*PRIMITIVES, "exchange") if not actors or n == "exchange" or _is_learner_work(n)
    ]
    learning = working = sum(seconds[name] for name in learner_work)
    alone = sum(seconds[name] for name in learner_work if name != "exchange")
    seconds["waiting"] = alone * _waiting(run, costs)
    if not actors and getattr(run.source, "double_buffer", False) and computing < profile.cores:
        learning -= _overlap(seconds, costs.background)  # another core does it
    total = learning + seconds["waiting"]
    if not actors:
        crowd = _crowd(costs, computing, profile.cores)
        share = max(1.0, computing / profile.cores)
        rate = 1 / (total * share * crowd)
        bottleneck = "learner" if share == 1 else "cores"
        busy = min(computing * working / total, profile.cores)
        own = (learning - seconds["exchange"]) * share * crowd
        return _prediction(run, shape, rate, seconds, bottleneck, busy, own)
    acting = sum(seconds[name] for name in PRIMITIVES if not _is_learner_work(name))
    records = records_of(run, shape)
    handover = seconds["handover"] = costs.handover_seconds * records
    stages = {"learner": total + handover, "actors": (acting + handover) / actors}
    # how many threads would compute at a time, if each had a core: learners and actors wait for each other
    computed = run.replicas * (threads * learning + acting)
    crowd = _crowd(costs, computed / max(stages.values()), profile.cores)
    stages["cores"] = crowd * computed / profile.cores
    if computing > profile.cores:
        stages["cores"] += _shared_handover_seconds(costs) * records
    bottleneck = max(stages, key=lambda name: stages[name])
    descheduled = _descheduled(run, computing, profile.cores)
    rate = 1 / (stages[bottleneck] + descheduled)
    busy = crowd * computed * rate
    own = learning - seconds["exchange"] + handover + descheduled
    least = max(stages["actors"], stages["cores"]) + descheduled
    return _prediction(run, shape, rate, seconds, bottleneck, busy, own, least)


def _prediction(
    run: Run,
    shape: BatchShape,
    rate: float,
    seconds: dict[str, float],
    bottleneck: str,
    busy: float,
    own: float,
    least: float = 0.0,
) -> Prediction:
    """The prediction for replicas that make ``rate`` batches per second each."""
    updates = run.replicas * rate
    return Prediction(shape.env_steps * updates, updates, seconds, bottleneck, busy, own, least)


def _crowd(costs: RecipeCosts, threads: float, cores: int) -> float:
    """How much slower the cores are because that many computing threads share them: 1 up to one thread per
    core, ``crowded`` from two on, linear in between."""
    return 1 + (costs.crowded - 1) * min(max(0.0, threads / cores - 1), 1.0)


def _shared_handover_seconds(costs: RecipeCosts) -> float:
    """Of a record, where processes share cores: while one of them waits, another may use its core."""
    measured = costs.shared_handover_seconds
    return _EXPOSED * costs.handover_seconds if measured is None else measured


def _is_learner_work(primitive: str) -> bool:
    return PRIMITIVES[primitive].role == "learner"


def _batch_seconds(costs: RecipeCosts, shape: BatchShape, most: int, processes: int) -> dict[str, float]:
    """Seconds of each primitive for one batch of a replica. most: number of processes for which
    ``costs.busy`` holds."""
    loaded = (min(processes, most) - 1) / (most - 1) if most > 1 else 0.0
    return {
        name: calls(shape, name)
        * costs.lines[name].seconds(size_of(shape, name))
        * (1 + loaded * (costs.busy[name] - 1))
        for name in PRIMITIVES
    }


def _exchange(run: Run, shape: BatchShape, costs: RecipeCosts, profile: DeviceProfile) -> float:
    """Seconds that the strategy adds to the updates from one batch of a replica, and to those of a model for
    each batch."""
    if run.replicas == 1:
        return 0.0
    name = exchange_key(run.strategy, run.replicas)
    line = profile.exchange.get(name)
    if line is None:
        raise NotMeasured(f"the exchange of {label(run.strategy)} among {run.replicas} replicas")
    return sum(updates * line.seconds(size) for size, updates in vectors_of(run, shape, costs))


def vectors_of(run: Run, shape: BatchShape, costs: RecipeCosts) -> list[tuple[int, float]]:
    """(number of parameters, updates for each batch) of each vector of a replica, also of models'."""
    whole = [(costs.parameters, float(run.learner.updates(1)))]
    vectors = costs.vectors or whole  # profiles before 2026-11-27 do not tell vectors apart
    for primitive, within in costs.vectors_within.items():
        vectors = vectors + [(size, calls(shape, primitive) * updates) for size, updates in within]
    return vectors


def _descheduled(run: Run, threads: int, cores: int) -> float:
    """Seconds per batch by which a synchronous round takes longer because all replicas wait for one whose
    core an actor has: on average for half a time slice."""
    if run.replicas == 1 or not run.strategy.synchronous or threads <= cores:
        return 0.0
    time_slice = _SLICE_SECONDS * (1 + int(math.log2(min(cores, 8))))
    return time_slice / 2 / _batches_of_a_round(run)


def _waiting(run: Run, costs: RecipeCosts) -> float:
    """How long replicas wait for the slowest one during a batch, relative to the seconds that a batch takes
    alone. The slowest one's round of H updates is expected to take the maximum of R normally distributed
    times."""
    if run.replicas == 1 or not run.strategy.synchronous:
        return 0.0
    period, updates = period_of(run.strategy), run.learner.updates(1)
    if period < updates and costs.step_deviation is not None:  # each of a batch's rounds waits
        deviation = costs.step_deviation / math.sqrt(period)
    else:
        deviation = costs.deviation / math.sqrt(_batches_of_a_round(run))
    return deviation * _expected_maximum(run.replicas)


def _batches_of_a_round(run: Run) -> float:
    """Number of batches of a replica between two exchanges of its strategy, at least 1."""
    return max(1.0, period_of(run.strategy) / run.learner.updates(1))


def _expected_maximum(count: int) -> float:
    """The expected maximum of ``count`` independent standard normal variables (Blom 1958)."""
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25))


def _overlap(seconds: dict[str, float], background: float) -> float:
    """Seconds that double buffering hides, where a core is free: native threads step one half of the
    simulators while the policy acts for the other half, or both halves at the same time."""
    stepping = background * seconds["simulate"]
    return min(stepping, max(seconds["act"], stepping / 2))
