"""Measures a recipe's primitives on the devices here, and adds them to a device profile."""

from __future__ import annotations

import dataclasses
import os
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import psutil

from murmurate.errors import Refusal, RunFailed
from murmurate.mapping import exchange
from murmurate.mapping.candidates import changes
from murmurate.mapping.check import measured
from murmurate.mapping.cost import predict
from murmurate.mapping.lines import fit
from murmurate.mapping.pilot import Pilot, measure, pilot_run
from murmurate.mapping.primitives import FLOAT_BYTES, PRIMITIVES, records_of, shape_of
from murmurate.mapping.profile import DeviceProfile, RecipeCosts, exchange_key, key, with_usual_period
from murmurate.mapping.variants import variants_here
from murmurate.strategies.solo import Solo
from murmurate.training.memory import planned_bytes
from murmurate.training.run import Run

Log = Callable[[str], None]
_ROUNDS, _SECONDS = 2, 0.75  # for so long each pilot is measured in each round
_HANDOVER_SECONDS = 4.0
_MUCH_BUSY = 0.2  # share of the cores that others use, above which measured costs mean little
_STEADY = 1.2  # greatest ratio of two measurements of one quantity on a steady machine


def busy_elsewhere(seconds: float = 0.5) -> float:
    """The share of the cores which this process may use that was busy in the next ``seconds``, in which this
    process sleeps: from 0 (all idle) to 1."""
    percents = psutil.cpu_percent(seconds, percpu=True)
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(len(percents))
    return statistics.fmean(percents[core] for core in usable if core < len(percents)) / 100


def sizes(run: Run) -> list[Run]:
    """Pilots of ``run``: first with its own simulators and batch, then with fewer and more of each."""
    base = pilot_run(run)
    if base.learner.requires.kind == "examples":
        batch = base.learner.requires.batch  # type: ignore[attr-defined]
        return [_with_batch(base, size) for size in (batch, max(1, batch // 4), 2 * batch)]
    source: Any = base.source
    own = source.simulators // max(1, getattr(run.source, "actors", 0))
    pilots = [base]
    requires: Any = base.learner.requires
    least = getattr(requires, "simulators", 1)
    for simulators in dict.fromkeys((max(1, own // 4), own, 2 * source.simulators)):
        if simulators != source.simulators and simulators >= least:
            pilots.append(
                dataclasses.replace(base, source=dataclasses.replace(source, simulators=simulators))
            )
    if requires.kind == "transitions":
        for batch in (max(8, requires.batch // 4), 4 * requires.batch):
            # as many env steps for each batch as the recipe has
            ratio = source.replay.samples_per_insert * batch / requires.batch
            starts = min(max(source.replay.learning_starts, batch), source.replay.capacity)
            replay = dataclasses.replace(source.replay, samples_per_insert=ratio, learning_starts=starts)
            changed = dataclasses.replace(base, source=dataclasses.replace(source, replay=replay))
            pilots.append(_with_batch(changed, batch))
    if requires.kind == "sequences":
        pilots += [_with_batch(base, size) for size in (max(1, requires.batch // 4), 4 * requires.batch)]
    return pilots


def _with_batch(run: Run, batch: int) -> Run:
    learner: Any = run.learner
    return dataclasses.replace(run, learner=dataclasses.replace(learner, batch=batch))


def add_recipe(profile: DeviceProfile, run: Run, log: Log) -> RecipeCosts:
    """Measure ``run``'s primitives at several sizes, and at its own size also while all cores compute. What
    the profile says of how fast the recipe learns is kept. Raises Refusal and RunFailed as ``pilot_run`` and
    ``pilot.measure`` do."""
    # what disturbs a measurement makes it slower, so of each pilot the faster one counts
    rounds = [_round(run, profile.cores, f"{number}/{_ROUNDS}", log) for number in range(1, _ROUNDS + 1)]
    *pilots, busy, crowded = [min(found, key=_milliseconds) for found in zip(*rounds, strict=True)]
    alone, all_busy, shared = (_milliseconds(pilot) for pilot in (pilots[0], busy, crowded))
    log(f"{run.recipe}: {alone:.2f} ms alone, {all_busy:.2f} ms with all {profile.cores} cores busy")
    log(f"{run.recipe}: {shared:.2f} ms with two threads a core")
    first, last = _milliseconds(rounds[0][0]), _milliseconds(rounds[-1][0])
    if max(first, last) > _STEADY * min(first, last):
        log(
            f"{run.recipe}: a batch took {first:.2f} ms at first, and {last:.2f} ms in the end. Other "
            "programs, or other users of this machine, disturb the measurement: measure again with --profile."
        )
    before = profile.recipes.get(key(run))
    costs = RecipeCosts(
        {name: fit(_samples(pilots, name)) for name in PRIMITIVES},
        {name: _factor(pilots[0], busy, name) for name in PRIMITIVES},
        pilots[0].deviation / statistics.median(pilots[0].iteration),
        parameters(run),
        [(pilot.simulators, pilot.rows) for pilot in pilots],
        learning=None if before is None else before.learning,
        crowded=max(1.0, shared / (2 * all_busy)),
        background=pilots[0].background,
        vectors=pilots[0].vectors,
    )
    profile.recipes[key(run)] = costs
    profile.renew()
    if hasattr(run.source, "actors") and profile.cores >= 2 * run.placement.threads:
        costs.handover_seconds = _handover(profile, run, log)
    return costs


def add_variants(
    profile: DeviceProfile, run: Run, log: Log, again: bool = False, keep: Callable[[], None] = lambda: None
) -> bool:
    """Measure ``run`` and its variants for this machine: those that the profile lacks, or all if they are to
    be measured ``again``. ``keep`` is called after each. Returns False if nothing was measured.

    A variant that fails is left out. Raises Refusal and RunFailed for ``run`` itself as ``add_recipe`` does.
    """
    missing = [v for v in variants_here(run, profile.cores) if again or key(v) not in profile.recipes]
    if missing and (busy := busy_elsewhere()) > _MUCH_BUSY:
        log(
            f"other programs keep {busy:.0%} of the cores busy, so the measured costs will be too high. Stop "
            "them, and measure again: --profile"
        )
    for variant in missing:
        log(f"measuring {' '.join([run.recipe, *changes(run, variant)])} on this machine")
        try:
            add_recipe(profile, variant, log)
        except (Refusal, RunFailed) as failure:
            if variant == run:
                raise
            log(f"left out: {failure}")
        else:
            keep()
    return bool(missing)


def _round(run: Run, cores: int, number: str, log: Log) -> list[Pilot]:
    """Pilots of all ``sizes``; then two of the first, while all cores compute, and with two threads a core.
    number: that of the round, for the log."""
    pilots, runs = [], sizes(run)
    for size in runs:
        found = measure(size, _SECONDS)
        pilots.append(found)
        simulators = f"{found.simulators} simulators, " * hasattr(run.source, "simulators")
        log(f"{run.recipe} {number}: {simulators}batches of {found.rows}: {_milliseconds(found):.2f} ms")
    threads = run.placement.threads
    if 2 * threads > cores > 1:  # no other process has a core
        return [*pilots, pilots[0], pilots[0]]
    full = cores // threads
    return [*pilots, *(measure(runs[0], _SECONDS, processes) for processes in (full, 2 * full))]


def _milliseconds(pilot: Pilot) -> float:
    """Those of an iteration."""
    return 1e3 * statistics.median(pilot.iteration)


def _handover(profile: DeviceProfile, run: Run, log: Log) -> float:
    """Seconds that a batch takes longer than its slowest stage for each record, in a run with one actor
    process. If the records are steps, it has a quarter of the simulators of an actor: a batch then has four
    times as many, and little else is measured."""
    source: Any = run.source
    own = source.simulators // max(1, source.actors)
    few = max(1, own // 4) if run.learner.requires.kind == "transitions" else own
    one = dataclasses.replace(source, actors=1, simulators=few)
    actor_run = dataclasses.replace(run, source=one, replicas=1, strategy=Solo())
    shape = shape_of(actor_run)
    assert shape is not None
    batch = shape.env_steps / measured(actor_run, _HANDOVER_SECONDS)
    stage = shape.env_steps / predict(actor_run, profile).env_steps_per_second
    log(
        f"{run.recipe} with an actor process: {1e3 * batch:.2f} ms, {1e3 * stage:.2f} ms without handing over"
    )
    return max(0.0, batch - stage) / records_of(actor_run, shape)


def _samples(pilots: Sequence[Pilot], name: str) -> list[tuple[int, float]]:
    kind = PRIMITIVES[name].size
    return [
        ({"simulators": pilot.simulators, "batch": pilot.rows, "none": 0}[kind], seconds)
        for pilot in pilots
        for seconds in pilot.seconds[name]
    ]


def _factor(alone: Pilot, busy: Pilot, name: str) -> float:
    before, after = (statistics.median(pilot.seconds[name]) for pilot in (alone, busy))
    return max(1.0, after / before) if before > 0 else 1.0


def parameters(run: Run) -> int:
    """N: the number of parameters of one learner."""
    return (planned_bytes(run) or 0) // FLOAT_BYTES


def add_exchange(profile: DeviceProfile, run: Run, log: Log, again: bool = False) -> bool:
    """Measure the exchange of ``run``'s strategy among its replicas. Returns False if there is nothing to
    measure, or the profile has it already and it is not to be measured ``again``."""
    name = exchange_key(run.strategy, run.replicas)
    if run.replicas == 1 or (name in profile.exchange and not again):
        return False
    line = exchange.measure(with_usual_period(run.strategy), run.replicas)
    profile.exchange[name] = line
    profile.renew()
    among = f"{run.strategy.name} among {run.replicas}"
    log(f"{among}: {1e6 * line.a:.0f} us + {1e9 * line.b:.2f} ns for each parameter")
    return True
