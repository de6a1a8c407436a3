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
from murmurate.mapping.pilot import Pilot
from murmurate.mapping.primitives import FLOAT_BYTES, PRIMITIVES, records_of, shape_of
from murmurate.mapping.profile import DeviceProfile, RecipeCosts, exchange_key, key, with_usual_period
from murmurate.mapping.rounds import Measured, Repeated, in_rounds, milliseconds, sizes
from murmurate.mapping.variants import variants_here
from murmurate.spec import Placement
from murmurate.strategies.solo import Solo
from murmurate.training.memory import planned_bytes
from murmurate.training.run import Run

Log = Callable[[str], None]
_HANDOVER_SECONDS = 4.0
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
    lacks, or of all if they are to be measured ``again``. ``keep`` is called after each that is added.
    Returns False if nothing was measured.

    A variant that fails is left out. Raises Refusal and RunFailed for ``run`` itself as ``in_rounds`` does.
    """
    known: set[str] = set() if again else {*profile.recipes, *profile.slower}
    missing = [variant for variant in variants_here(run, profile.cores) if key(variant) not in known]
    if not missing:
        return False
    if (busy := busy_elsewhere()) > _MUCH_BUSY:
        log(
            f"other programs keep {busy:.0%} of the cores busy, so the measured costs will be too high. Stop "
            "them, and measure again: --profile"
        )
    log(f"measuring {run.recipe} on this machine")
    names = {" ".join([run.recipe, *changes(run, variant)]): variant for variant in missing}
    for name, variant in list(names.items()):
        if variant != run and variant.placement.threads > 1 and not _threads_pay(variant, name, log):
            del names[name]
            profile.slower = sorted({*profile.slower, key(variant)})
            keep()
    for name, found in in_rounds(names, run, profile.cores, log).items():
        add_costs(profile, found, name, log)
        keep()
    return True


def _threads_pay(variant: Run, name: str, log: Log) -> bool:
    """Whether the largest pilot of ``variant`` is faster than the same one with one thread."""
    largest = sizes(variant)[-1]
    several, one = Repeated(largest), Repeated(dataclasses.replace(largest, placement=Placement()))
    try:
        for pilot in (several, one, several, one):
            pilot.measure()
    except (Refusal, RunFailed) as failure:
        log(f"left out: {name}: {failure}")
        return False
    times = milliseconds(several.fastest), milliseconds(one.fastest)
    log(f"{name}: {times[0]:.2f} ms; {times[1]:.2f} ms with one thread")
    return times[0] < times[1]


def add_costs(profile: DeviceProfile, found: Measured, name: str, log: Log) -> RecipeCosts:
    """Add the costs of the primitives of a run whose pilots were measured. What the profile says of how fast
    the recipe learns is kept. name: of the run, for the log."""
    run, pilots = found.run, [pilot.fastest for pilot in found.sizes]
    busy, crowded = found.busy.fastest, found.crowded.fastest
    all_busy, shared = milliseconds(busy), milliseconds(crowded)
    if found.busy is not found.sizes[0]:
        log(
            f"{name}: {milliseconds(pilots[0]):.2f} ms alone, {all_busy:.2f} ms with all cores busy, "
            f"{shared:.2f} ms with two threads a core"
        )
    if unsteady := sum(not pilot.is_steady for pilot in found.pilots):
        log(
            f"{name}: {unsteady} of {len(found.pilots)} pilots took another time in each round. Other "
            "programs, or other users of this machine, disturb them: measure again with --profile."
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
