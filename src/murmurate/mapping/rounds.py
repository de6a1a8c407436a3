"""Measures pilots in rounds: once each, and then all of them again, so that a while in which the machine is
slower does not spoil all that is known of one of them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from murmurate.errors import Refusal, RunFailed
from murmurate.mapping.pilot import Pilot, measure, sizes
from murmurate.mapping.primitives import most_processes
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

    def measure(self) -> None:
        self.rounds.append(measure(self.run, _SECONDS, self.processes))

    @property
    def newest(self) -> str:
        """The result of the newest round, in words."""
        found = self.rounds[-1]
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
    """The pilots of ``run``: of its ``sizes``; of the first size in as many processes as keep its devices
    ``busy``; and in twice as many, which are ``crowded``."""

    run: Run
    sizes: list[Repeated]
    busy: Repeated
    crowded: Repeated

    @classmethod
    def prepare(cls, run: Run, cores: int) -> Measured:
        """Pilots that are still to be measured."""
        pilots = [Repeated(size) for size in sizes(run)]
        first, most = pilots[0], most_processes(run, cores)
        busy = first if most == 1 else Repeated(first.run, most)
        # where the threads of one process take all cores, no other one is considered beside it
        crowded = first if most == 1 and run.placement.threads > 1 else Repeated(first.run, 2 * most)
        return cls(run, pilots, busy, crowded)

    @property
    def pilots(self) -> list[Repeated]:
        return list(dict.fromkeys([*self.sizes, self.busy, self.crowded]))

    @property
    def is_steady(self) -> bool:
        return all(pilot.is_steady for pilot in self.pilots)


def in_rounds(runs: Mapping[str, Run], needed: Run, cores: int, log: Log) -> Iterator[tuple[str, Measured]]:
    """Measure the pilots of all ``runs``, in two rounds; and those whose rounds do not agree in up to two
    more. Yields each run's as soon as they are measured.

    runs: by a name for the log. One that fails is left out, but for ``needed``: then Refusal or RunFailed is
    raised, as ``pilot_run`` and ``pilot.measure`` do.
    """
    waiting = {name: Measured.prepare(run, cores) for name, run in runs.items()}
    for number in range(1, _MOST_ROUNDS + 1):
        for name, measured in list(waiting.items()):
            try:
                for pilot in measured.pilots:
                    if number <= _LEAST_ROUNDS or not pilot.is_steady:
                        pilot.measure()
                        log(f"{name}, round {number}: {pilot.newest}")
            except (Refusal, RunFailed) as failure:
                if measured.run == needed:
                    raise
                del waiting[name]
                log(f"left out: {name}: {last_line(failure)}")
                continue
            if number == _MOST_ROUNDS or (number >= _LEAST_ROUNDS and measured.is_steady):
                del waiting[name]
                yield name, measured


def last_line(failure: Exception) -> str:
    """What went wrong, without the traceback of the process in which it did."""
    return str(failure).strip().splitlines()[-1]


def milliseconds(pilot: Pilot) -> float:
    """Those of an iteration."""
    return 1e3 * statistics.median(pilot.iteration)
