"""The configurations of a recipe that a plan considers: replicas and their strategy, simulators, actors,
processes that decode images, batch, double buffering, and the variants of ``variants``."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from murmurate.errors import Refusal
from murmurate.fabric.interface import Capability
from murmurate.mapping.cost import Prediction
from murmurate.mapping.periods import period_of, with_period, with_usual_period
from murmurate.mapping.primitives import computing_threads, most_processes, on_cpu, producers
from murmurate.replicator.replicator import check_capabilities
from murmurate.spec import Placement
from murmurate.strategies import strategy
from murmurate.strategies.interface import Strategy
from murmurate.training.preflight import check_compression
from murmurate.training.run import Run

_STRATEGIES = ("all-reduce", "local-sgd", "gala")
_EACH = 8  # up to so many, every number of processes is considered, and beyond it powers of two


@dataclass
class Candidate:
    """A configuration with its predicted value.

    name: how it differs from the recipe, as options of ``murmurate train``. changes: these options as a list.
    predicted: the objective's value, in ``unit``. why: what limits the candidate. prediction: the predicted
    throughput. bytes: the predicted memory. env_steps: how many are predicted to the target; None if that is
    not the objective.
    """

    name: str
    run: Run
    predicted: float
    unit: str
    why: str
    prediction: Prediction
    changes: list[str] = field(default_factory=list)
    bytes: int = 0
    env_steps: float | None = None

    @property
    def figure(self) -> str:
        """``predicted`` as rounded text."""
        return f"{self.predicted:,.0f}" if self.predicted >= 100 else f"{self.predicted:.3g}"

    def plain(self) -> dict[str, Any]:
        """The candidate as a dictionary for JSON."""
        p = self.prediction
        return {
            "name": self.name,
            "predicted": self.predicted,
            "unit": self.unit,
            "why": self.why,
            "env_steps_per_second": p.env_steps_per_second,
            "updates_per_second": p.updates_per_second,
            "bottleneck": p.bottleneck,
            "busy_cores": p.busy,
            "memory_bytes": self.bytes,
            "env_steps_to_target": self.env_steps,
            "seconds": p.seconds,
            "changes": self.changes,
        }


def candidates(
    run: Run, cores: int, strategies: Sequence[Strategy] = (), variants: Sequence[Run] = ()
) -> Iterator[Run]:
    """Every configuration that the search considers and the run's own checks accept; ``run`` is the first.

    strategies: those that are considered; () for those of ``strategies_of``. variants: those of ``run`` that
    are considered; () for itself alone. Processes of several threads get a core for each thread.
    """
    yield run
    counts = [n for n in _replica_counts(run, cores) if n > 1]
    several = itertools.product(counts, strategies or strategies_of(run))
    # with one replica the strategy makes no difference
    for replicas, chosen in [(1, run.strategy), *several]:
        for variant, fields in itertools.product(variants or [run], _field_values(run, cores)):
            try:
                found = _changed(variant, replicas, chosen, fields)
                if not _has_room(found, cores):
                    continue
                found.validate()
                check_capabilities(found.strategy, frozenset(Capability), "it", found.placement.devices)
                if replicas > 1:  # one on each of several hosts gets other strategies
                    check_compression(found)
            except Refusal:
                continue
            if found != run:
                yield found


def _has_room(run: Run, cores: int) -> bool:
    """Whether each thread of ``run`` has a core for itself, if its processes have several; and whether no GPU
    has more learners than were measured on it."""
    threads = run.placement.threads
    stepping = run.replicas * getattr(run.source, "double_buffer", False)  # other cores step the simulators
    if threads > 1 and computing_threads(run) + stepping > cores:
        return False
    return on_cpu(run) or run.replicas <= most_processes(run, cores)


def _replica_counts(run: Run, cores: int) -> list[int]:
    return sorted({*_powers(cores), run.replicas, cores})


def _process_counts(own: int, cores: int) -> list[int]:
    """Numbers of actors, or of decoding processes: the recipe's ``own`` first."""
    return [own, *sorted({*range(min(cores, _EACH) + 1), *_powers(cores), cores} - {own})]


def _powers(cores: int) -> list[int]:
    return [2**i for i in range(cores.bit_length())]


def strategies_of(run: Run, *, shorter: bool = False) -> list[Strategy]:
    """The strategies that a plan considers unless others are named; ``run``'s own is the first.

    shorter: whether those with a period are considered with shorter ones too, which cost throughput, and save
    env steps.
    """
    found = [run.strategy, *(strategy(name)() for name in _STRATEGIES if name != run.strategy.name)]
    return [each for one in found for each in _with_periods(one)] if shorter else found


def named_strategies(run: Run, names: str) -> list[Strategy]:
    """The strategies in ``names``, NAME or NAME:PERIOD separated by commas, after ``run``'s own, whose
    settings those of its name have, too.

    Raises Refusal for a name or a period that there is not, and for a strategy with which several replicas of
    ``run`` are refused.
    """
    found = [run.strategy]
    for word in names.split(","):
        name, colon, period = word.strip().partition(":")
        chosen = run.strategy if name == run.strategy.name else strategy(name)()
        if colon and not hasattr(chosen, chosen.period_field):
            raise Refusal(f"--strategies {word}: {name} has no period. Leave :{period} out.")
        if colon and not period.isdecimal():
            raise Refusal(f"--strategies {word}: a period is a whole number, as in {name}:20.")
        chosen = with_period(chosen, int(period)) if colon else chosen
        dataclasses.replace(run, strategy=chosen, replicas=max(2, run.replicas)).validate()
        found += [chosen] * (chosen not in found)
    return found


def _with_periods(strategy: Strategy) -> list[Strategy]:
    """``strategy`` with its own period, a half and a quarter of it, those above 1. Longer ones are not
    considered: how fast the recipe learns with them was not measured."""
    own = period_of(strategy)
    periods = dict.fromkeys(own // divisor for divisor in (1, 2, 4) if own // divisor > 1)
    return [with_period(strategy, period) for period in periods] or [strategy]


def _field_values(run: Run, cores: int) -> Iterator[dict[str, Any]]:
    """Combinations of values of ``simulators``, ``actors``, ``workers``, ``double_buffer`` and ``batch``, as
    far as the run has them."""
    source: Any = run.source
    axes: dict[str, Sequence[Any]] = {}
    if hasattr(source, "simulators"):
        axes["simulators"] = (source.simulators, max(1, source.simulators // 2), 2 * source.simulators)
    if hasattr(source, "actors"):
        axes["actors"] = _process_counts(source.actors, cores)
    if hasattr(source, "double_buffer"):
        axes["double_buffer"] = (False, True)
    if hasattr(source, "workers") and producers(run):
        axes["workers"] = _process_counts(source.workers, cores)
    if run.learner.requires.kind in ("transitions", "sequences", "examples"):
        batch = run.learner.requires.batch  # type: ignore[attr-defined]
        axes["batch"] = (batch, 2 * batch, 4 * batch)
    for values in itertools.product(*map(dict.fromkeys, axes.values())):
        yield dict(zip(axes, values, strict=True))


def _changed(run: Run, replicas: int, chosen: Any, fields: dict[str, Any]) -> Run:
    """``run`` with other settings. chosen: the strategy. fields: values from ``_field_values``."""
    source: Any = run.source
    learner: Any = run.learner
    if "batch" in fields:
        learner = dataclasses.replace(learner, batch=fields["batch"])
    source = dataclasses.replace(source, **{name: v for name, v in fields.items() if name != "batch"})
    if replicas == 1:  # the strategy makes no difference
        chosen = run.strategy if run.replicas == 1 else strategy("all-reduce")()
    return dataclasses.replace(run, replicas=replicas, strategy=chosen, source=source, learner=learner)


def changes(run: Run, found: Run) -> list[str]:
    """The options of ``murmurate train`` that turn ``run`` into ``found``."""
    words: list[str] = []
    if run.placement.devices != found.placement.devices:
        words += ["--placement.devices", *found.placement.devices]
    strategy_before = run.strategy
    if with_usual_period(found.strategy) != with_usual_period(strategy_before):
        words += ["--strategy", found.strategy.name]
        strategy_before = with_usual_period(found.strategy)
    period = found.strategy.period_field
    for option, before, after in (
        (f"--strategy.{period.replace('_', '-')}", *_values(strategy_before, found.strategy, period)),
        ("--replicas", run.replicas, found.replicas),
        ("--simulators", *_values(run.source, found.source, "simulators")),
        ("--actors", *_values(run.source, found.source, "actors")),
        ("--workers", *_values(run.source, found.source, "workers")),
        ("--double-buffer", *_values(run.source, found.source, "double_buffer")),
        ("--agent.batch", *_values(run.learner, found.learner, "batch")),
        ("--agent.precision", *_values(run.learner, found.learner, "precision")),
        ("--placement.threads", run.placement.threads, found.placement.threads),
        ("--replay.images", *_values(_replay(run), _replay(found), "images")),
    ):
        if before != after:
            words += [option, str(after).lower()]
    return words


def _replay(run: Run) -> Any:
    return getattr(run.source, "replay", None)


def _values(before: Any, after: Any, name: str) -> tuple[Any, Any]:
    return getattr(before, name, None), getattr(after, name, None)


def runs_with_exchange(run: Run, cores: int, strategies: Sequence[Strategy] = ()) -> list[Run]:
    """Runs whose exchange must be measured for a search with these ``strategies`` (see ``candidates``), on
    the CPU: one for each strategy and number of replicas."""
    found: dict[tuple[str, int], Run] = {}
    # on the CPU with one thread each there are the most replicas
    for candidate in candidates(dataclasses.replace(run, placement=Placement()), cores, strategies):
        if candidate.replicas > 1:
            found.setdefault((repr(candidate.strategy), candidate.replicas), candidate)
    return list(found.values())
