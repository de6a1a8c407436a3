"""Measures pilots in rounds: once each, and then all of them again, so that a while in which the machine is
slower does not spoil all that is known of one of them."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from murmurate.errors import Refusal, RunFailed
from murmurate.mapping.pilot import Pilot, measure, pilot_run
from murmurate.training.run import Run

Log = Callable[[str], None]
_LEAST_ROUNDS, _MOST_ROUNDS = 2, 4
_SECONDS = 0.75  # for so long each pilot is measured in each round
_STEADY = 1.15  # greatest ratio of two rounds that agree


@dataclass(eq=False)
class Repeated:
    """A pilot and what was measured of it. processes: number of processes that run it at once. rounds: the
    result of each round."""

    run: Run
    processes: int = 1
    rounds: list[Pilot] = field(default_factory=list)

    def measure(self) -> str:
        """Measure it once more. Returns what was found, in words."""
        found = measure(self.run, _SECONDS, self.processes)
        self.rounds.append(found)
        simulators = f"{found.simulators} simulators, " * hasattr(self.run.source, "simulators")
        at_once = f", {self.processes} at once" * (self.processes > 1)
        return f"{simulators}batches of {found.rows}{at_once}: {milliseconds(found):.2f} ms"

    @property
    def fastest(self) -> Pilot:
        """The one that counts, as what disturbs a measurement makes it slower."""
        return min(self.rounds, key=milliseconds)

    @property
    def is_steady(self) -> bool:
        """Whether the two fastest rounds agree."""
        fastest, *others = sorted(map(milliseconds, self.rounds))
        return bool(others) and others[0] < _STEADY * fastest


@dataclass
class Measured:
    """The pilots of ``run``: of its ``sizes``; of the first size in as many processes as keep all cores
    ``busy``; and in twice as many, which are ``crowded``."""

    run: Run
    sizes: list[Repeated]
    busy: Repeated
    crowded: Repeated

    @classmethod
    def prepare(cls, run: Run, cores: int) -> Measured:
        pilots = [Repeated(size) for size in sizes(run)]
        threads = run.placement.threads
        if 2 * threads > cores > 1:  # no other process has a core
            return cls(run, pilots, pilots[0], pilots[0])
        busy, crowded = (Repeated(pilots[0].run, times * (cores // threads)) for times in (1, 2))
        return cls(run, pilots, busy, crowded)

    @property
    def pilots(self) -> list[Repeated]:
        return list(dict.fromkeys([*self.sizes, self.busy, self.crowded]))


def in_rounds(runs: Mapping[str, Run], needed: Run, cores: int, log: Log) -> dict[str, Measured]:
    """Measure the pilots of each of ``runs``, in two rounds; and those whose rounds do not agree in up to two
    more.

    runs: by a name for the log. One that fails is left out, but for ``needed``: then Refusal or RunFailed is
    raised, as ``pilot_run`` and ``pilot.measure`` do.
    """
    found = {name: Measured.prepare(run, cores) for name, run in runs.items()}
    for number in range(1, _MOST_ROUNDS + 1):
        for name, measured in list(found.items()):
            try:
                for pilot in measured.pilots:
                    if number <= _LEAST_ROUNDS or not pilot.is_steady:
                        log(f"{name}, round {number}: {pilot.measure()}")
            except (Refusal, RunFailed) as failure:
                if measured.run == needed:
                    raise
                del found[name]
                log(f"left out: {name}: {failure}")
    return found


def milliseconds(pilot: Pilot) -> float:
    """Those of an iteration."""
    return 1e3 * statistics.median(pilot.iteration)


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
