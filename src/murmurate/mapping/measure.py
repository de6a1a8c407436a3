"""Measures a recipe's primitives on the devices here, and adds them to a device profile."""

from __future__ import annotations

import dataclasses
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import psutil

from murmurate.errors import Refusal, RunFailed
from murmurate.fabric.processes.fork_server import workers_on_one_core
from murmurate.mapping import exchange
from murmurate.mapping.candidates import changes
from murmurate.mapping.check import measured
from murmurate.mapping.cost import predict
from murmurate.mapping.lines import fit
from murmurate.mapping.periods import label
from murmurate.mapping.pilot import Pilot, sizes
from murmurate.mapping.primitives import FLOAT_BYTES, PRIMITIVES, on_cpu, records_of, shape_of
from murmurate.mapping.profile import (
    DeviceProfile,
    RecipeCosts,
    exchange_key,
    key,
    variant_key,
)
from murmurate.mapping.rounds import Measured, Repeated, in_rounds, last_line, milliseconds
from murmurate.mapping.variants import variants_here
from murmurate.strategies.solo import Solo
from murmurate.training.memory import planned_bytes
from murmurate.training.run import Run

Log = Callable[[str], None]
_HANDOVER_SECONDS, _HANDOVER_ROUNDS = 4.0, 2
_CLEARLY = 0.95  # a smaller gain of several threads may be noise
_MUCH_BUSY = 0.2  # share of the cores that others use, above which measured costs mean little


def busy_elsewhere(seconds: float = 0.5) -> float:
    """The share of the cores which this process may use that was busy in the next ``seconds``, in which this
    process sleeps: from 0 (all idle) to 1."""
    percents = psutil.cpu_percent(seconds, percpu=True)
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(len(percents))
    return statistics.fmean(percents[core] for core in usable if core < len(percents)) / 100


def add_variants(
    profile: DeviceProfile, run: Run, log: Log, again: bool = False, keep: Callable[[], None] = lambda: None
) -> bool:
    """Measure the primitives of ``run`` and of its variants for this machine: of those that the profile
    lacks, or of all if they are to be measured ``again``. ``keep`` is called when the profile has changed.
    Returns False if nothing was measured.

    A variant that fails, or whose several threads are not faster than one, is left out. Raises Refusal and
    RunFailed for ``run`` itself as ``in_rounds`` does.
    """
    missing = [
        variant
        for variant in variants_here(run, profile.cores)
        if again or (key(variant) not in profile.recipes and variant_key(variant) not in profile.left_out)
    ]
    if not missing:
        return False
    if (busy := busy_elsewhere()) > _MUCH_BUSY:
        log(
            f"other programs keep {busy:.0%} of the cores busy, so the measured costs will be too high. Stop "
            "them, and measure again: --profile"
        )
    log(f"measuring {run.recipe} on this machine")
    missing.sort(key=lambda variant: not on_cpu(variant))  # actors of learners on GPUs are on the CPU
    names = {" ".join([run.recipe, *changes(run, variant)]): variant for variant in missing}
    several = {name: v for name, v in names.items() if v.placement.threads > 1 and v != run}
    added: set[str] = set()

    def add(group: Mapping[str, Run]) -> None:
        for name, found in in_rounds(group, run, profile.cores, log):
            try:
                add_costs(profile, found, name, log)
            except (Refusal, RunFailed) as failure:
                if found.run == run:
                    raise
                log(f"left out: {name}: {last_line(failure)}")
            else:
                added.add(name)
                keep()

    add({name: variant for name, variant in names.items() if name not in several})
    add({name: variant for name, variant in several.items() if _threads_pay(variant, name, log)})
    failed = {variant_key(variant) for name, variant in names.items() if name not in added}
    profile.left_out = sorted({*profile.left_out, *failed} - {variant_key(names[name]) for name in added})
    for name, variant in names.items():
        if name not in added:
            profile.recipes.pop(key(variant), None)  # of an earlier measurement
    keep()
    return True


def _threads_pay(variant: Run, name: str, log: Log) -> bool:
    """Whether the largest pilot of ``variant`` is clearly faster than the same one with one thread."""
    largest = sizes(variant)[-1]
    placement = dataclasses.replace(largest.placement, threads=1)
    several, one = Repeated(largest), Repeated(dataclasses.replace(largest, placement=placement))
    try:
        for pilot in (several, one, several, one):
            pilot.measure()
    except (Refusal, RunFailed) as failure:
        log(f"left out: {name}: {last_line(failure)}")
        return False
    log(f"{name}: {several.newest}; with one thread {milliseconds(one.fastest):.2f} ms")
    return milliseconds(several.fastest) < _CLEARLY * milliseconds(one.fastest)


def add_costs(profile: DeviceProfile, found: Measured, name: str, log: Log) -> RecipeCosts:
    """Add the costs of the primitives of a run whose pilots were measured. What the profile says of how fast
    the recipe learns is kept. name: of the run, for the log."""
    run, pilots = found.run, [pilot.fastest for pilot in found.sizes]
    busy, crowded = found.busy.fastest, found.crowded.fastest
    all_busy, shared = milliseconds(busy), milliseconds(crowded)
    if found.crowded is not found.sizes[0]:
        log(
            f"{name}: {milliseconds(pilots[0]):.2f} ms alone, {all_busy:.2f} ms in {found.busy.processes} "
            f"processes at once, {shared:.2f} ms in {found.crowded.processes}"
        )
    if unsteady := sum(not pilot.is_steady for pilot in found.pilots):
        log(
            f"{name}: {unsteady} of {len(found.pilots)} pilots took different times in all rounds. Other "
            "programs, or other users of this machine, disturb them: measure again with --profile."
        )
    before = profile.recipes.get(key(run))
    batch, of_steps = statistics.median(pilots[0].iteration), pilots[0].step_deviation
    costs = RecipeCosts(
        {name: fit(_samples(pilots, name)) for name in PRIMITIVES},
        {name: _factor(pilots[0], busy, name) for name in PRIMITIVES},
        pilots[0].deviation / batch,
        parameters(run),
        [(pilot.simulators, pilot.rows) for pilot in pilots],
        learning=None if before is None else before.learning,
        crowded=max(1.0, shared / (2 * all_busy)),
        background=pilots[0].background,
        vectors=pilots[0].vectors,
        vectors_within=pilots[0].vectors_within,
        step_deviation=None if of_steps is None else of_steps / batch,
    )
    profile.recipes[key(run)] = costs
    profile.renew()
    if hasattr(run.source, "actors"):
        costs.handover_seconds, costs.shared_handover_seconds = _handovers(profile, run, log)
    return costs


def _handovers(profile: DeviceProfile, run: Run, log: Log) -> tuple[float, float | None]:
    """Seconds of a record in a run with one actor process (see ``RecipeCosts``): where learner and actor have
    cores of their own, and where they share one. If the records are steps, the actor has a quarter of its
    simulators: a batch then has four times as many records, and little else is measured."""
    source: Any = run.source
    own = source.simulators // max(1, source.actors)
    few = max(1, own // 4) if run.learner.requires.kind == "transitions" else own
    one = dataclasses.replace(source, actors=1, simulators=few)
    actor_run = dataclasses.replace(run, source=one, replicas=1, strategy=Solo())
    own_cores, shared = 0.0, None
    if profile.cores > run.placement.threads:
        own_cores = _handover(actor_run, profile, "an actor process", log)
    # a plan gives each of several threads a core
    if run.placement.threads == 1 and hasattr(os, "sched_setaffinity"):
        of_one_core = dataclasses.replace(profile, cores=1)
        try:
            with workers_on_one_core():
                shared = _handover(actor_run, of_one_core, "an actor process on its core", log)
        except RunFailed as failure:  # too slow on one core
            log(f"{run.recipe}: handovers on shared cores were not measured: {last_line(failure)}")
    return own_cores, shared


def _handover(actor_run: Run, profile: DeviceProfile, actor: str, log: Log) -> float:
    """Seconds that a batch takes longer, for each of its records, than predicted without handing over. The
    faster of two runs counts, as of pilots."""
    shape = shape_of(actor_run)
    assert shape is not None
    rate = max(measured(actor_run, _HANDOVER_SECONDS) for _ in range(_HANDOVER_ROUNDS))
    batch = shape.env_steps / rate
    rest = shape.env_steps / predict(actor_run, profile).env_steps_per_second
    log(f"{actor_run.recipe} with {actor}: {1e3 * batch:.2f} ms, {1e3 * rest:.2f} ms without handing over")
    return max(0.0, batch - rest) / records_of(actor_run, shape)


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
    measure, or the profile has it already and it is not to be measured ``again``. One that fails is left out:
    the profile then lacks it."""
    name = exchange_key(run.strategy, run.replicas)
    if run.replicas == 1 or (name in profile.exchange and not again):
        return False
    among = f"{label(run.strategy)} among {run.replicas}"
    try:
        line = exchange.measure(run.strategy, run.replicas)
    except (Refusal, RunFailed) as failure:
        profile.exchange.pop(name, None)  # of an earlier measurement
        log(f"left out: the exchange of {among}: {last_line(failure)}")
        return True
    profile.exchange[name] = line
    profile.renew()
    log(f"{among}: {1e6 * line.a:.0f} us + {1e9 * line.b:.2f} ns for each parameter")
    return True
