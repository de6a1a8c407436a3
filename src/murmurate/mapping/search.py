"""Searches the configurations of a recipe on one host, or several, for the best by a cost model.

Zhang 2022, section 4.4.2, places the primitives of one learner on devices (``assignment``). This search
chooses what the thesis leaves open: replicas and their strategy, simulators, actors, batch and double
buffering.
"""

from __future__ import annotations

import dataclasses
import itertools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil

from murmurate.errors import Refusal
from murmurate.mapping.cost import NotMeasured, Prediction, predict
from murmurate.mapping.learning import Learning, env_steps_to_target
from murmurate.mapping.primitives import PRIMITIVES, producers
from murmurate.mapping.profile import DeviceProfile, key
from murmurate.simulation.cluster import Cluster
from murmurate.simulation.start import simulate
from murmurate.strategies import strategy
from murmurate.training.memory import planned_bytes
from murmurate.training.run import Run

Objective = Literal["throughput", "time", "energy"]
UNITS = {"throughput": "{unit}/s", "time": "s to the target", "energy": "J per 1,000 {unit}"}
UNCHANGED = "as the recipe is"  # name of the candidate without changes
_STRATEGIES = ("all-reduce", "local-sgd", "gala")
_VECTORS = 6  # vectors of N numbers in a process: parameters, gradient, moments, a target, a buffer
_PROCESS_BYTES = 400 * 2**20
_SIMULATED_UPDATES, _SIMULATED_CANDIDATES = 40, 6


@dataclass
class Candidate:
    """A configuration with its predicted value.

    name: how it differs from the recipe, as options of ``murmurate train``. changes: these options as a list.
    predicted: the objective's value, in ``unit``. why: what limits the candidate. prediction: the predicted
    throughput. bytes: the predicted memory.
    """

    name: str
    run: Run
    predicted: float
    unit: str
    why: str
    prediction: Prediction
    changes: list[str] = field(default_factory=list)
    bytes: int = 0

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
            "seconds": p.seconds,
            "changes": self.changes,
        }


def candidates(run: Run, cores: int) -> Iterator[Run]:
    """Every configuration that the search considers and the run's own checks accept; ``run`` is the first."""
    seen = [run]
    yield run
    for replicas, chosen in itertools.product(_replica_counts(run, cores), _strategies(run)):
        for fields in _field_values(run, cores):
            try:
                found = _changed(run, replicas, chosen, fields)
                found.validate()
            except Refusal:
                continue
            if found not in seen:
                seen.append(found)
                yield found


def _replica_counts(run: Run, cores: int) -> list[int]:
    powers = [2**i for i in range(cores.bit_length()) if 2**i <= cores]
    return sorted({*powers, run.replicas, cores})


def _strategies(run: Run) -> list[Any]:
    return [run.strategy, *(strategy(name)() for name in _STRATEGIES if name != run.strategy.name)]


def _field_values(run: Run, cores: int) -> Iterator[dict[str, Any]]:
    """Combinations of values of ``simulators``, ``actors``, ``workers``, ``double_buffer`` and ``batch``, as
    far as the run has them."""
    source: Any = run.source
    axes: dict[str, Sequence[Any]] = {}
    if hasattr(source, "simulators"):
        axes["simulators"] = (source.simulators, max(1, source.simulators // 2), 2 * source.simulators)
    if hasattr(source, "actors"):
        axes["actors"] = sorted({0, source.actors, *range(1, cores + 1)})
    if hasattr(source, "double_buffer"):
        axes["double_buffer"] = (False, True)
    if hasattr(source, "workers") and producers(run):
        axes["workers"] = (source.workers, *range(cores + 1))
    if run.learner.requires.kind in ("transitions", "examples"):
        batch = run.learner.requires.batch  # type: ignore[attr-defined]
        axes["batch"] = (batch, 2 * batch, 4 * batch)
    for values in itertools.product(*axes.values()):
        yield dict(zip(axes, values, strict=True))


def _changed(run: Run, replicas: int, chosen: Any, fields: dict[str, Any]) -> Run:
    """chosen: the strategy. fields: values from ``_field_values``."""
    source_fields = {name: value for name, value in fields.items() if name != "batch"}
    source: Any = run.source
    learner: Any = run.learner
    if "batch" in fields:
        learner = dataclasses.replace(learner, batch=fields["batch"])
    source = dataclasses.replace(source, **source_fields)
    if replicas == 1:  # the strategy makes no difference
        chosen = run.strategy if run.replicas == 1 else strategy("all-reduce")()
    return dataclasses.replace(run, replicas=replicas, strategy=chosen, source=source, learner=learner)


def changes(run: Run, found: Run) -> list[str]:
    """The options of ``murmurate train`` that turn ``run`` into ``found``."""
    words: list[str] = []
    if found.strategy != run.strategy:
        words += ["--strategy", found.strategy.name]
    for option, before, after in (
        ("--replicas", run.replicas, found.replicas),
        ("--simulators", *_values(run.source, found.source, "simulators")),
        ("--actors", *_values(run.source, found.source, "actors")),
        ("--workers", *_values(run.source, found.source, "workers")),
        ("--double-buffer", *_values(run.source, found.source, "double_buffer")),
        ("--agent.batch", *_values(run.learner, found.learner, "batch")),
    ):
        if before != after:
            words += [option, str(after).lower()]
    return words


def _values(before: Any, after: Any, name: str) -> tuple[Any, Any]:
    return getattr(before, name, None), getattr(after, name, None)


def runs_with_exchange(run: Run, cores: int) -> list[Run]:
    """Runs whose exchange must be measured for a search: one for each strategy and number of replicas."""
    found: dict[tuple[str, int], Run] = {}
    for candidate in candidates(run, cores):
        if candidate.replicas > 1:
            found.setdefault((repr(candidate.strategy), candidate.replicas), candidate)
    return list(found.values())


def search(
    run: Run,
    profile: DeviceProfile,
    objective: Objective = "throughput",
    hosts: int = 1,
    log: Callable[[str], None] = lambda line: None,
) -> list[Candidate]:
    """Candidates, best first, of those that fit in the memory of the profile's host.

    Raises Refusal if the profile lacks the costs of this recipe, or what the objective needs.
    """
    costs = profile.recipes.get(key(run))
    if costs is None:
        known = ", ".join(sorted(name.rpartition(" ")[0] for name in profile.recipes)) or "nothing"
        raise Refusal(
            f"the profile holds the costs of {known}, and not of {run.recipe} with these settings. Measure "
            f"them: murmurate plan {run.recipe} --profile."
        )
    learning = costs.learning
    if objective == "time" and learning is None:
        raise Refusal(
            f"how fast {run.recipe} learns was not measured, so the time to a target is unknown. Measure it: "
            f"murmurate plan {run.recipe} --profile --target RETURN; or use --objective throughput."
        )
    if objective == "energy" and profile.watts is None:
        raise Refusal(
            "the power of a core is unknown, so energy cannot be predicted. Give it: --watts 6; or use "
            "--objective throughput."
        )
    parameters_bytes = planned_bytes(run) or 0
    available = int(profile.hardware.get("memory_bytes", psutil.virtual_memory().total))
    found: list[Candidate] = []
    unmeasured: set[str] = set()
    for candidate in candidates(run, profile.cores):
        try:
            source_bytes = candidate.source.memory_bytes(candidate)
        except Refusal:  # its replays do not fit on the disk, say
            if candidate == run:
                raise
            continue
        memory = candidate.replicas * (_PROCESS_BYTES + _VECTORS * parameters_bytes + source_bytes)
        if memory > available:
            continue
        try:
            prediction = predict(candidate, profile)
        except NotMeasured as missing:
            unmeasured.add(str(missing))
            continue
        value = _value(objective, candidate, run, prediction, profile, learning)
        words = changes(run, candidate)
        name = " ".join(words) or UNCHANGED
        unit = UNITS[objective].format(unit=run.unit)
        found.append(Candidate(name, candidate, value, unit, "", prediction, words, memory))
    if not found and unmeasured:
        raise Refusal(
            f"the profile lacks {', '.join(sorted(unmeasured))}. Measure it there: murmurate plan "
            f"{run.recipe} --profile"
        )
    if not found:
        raise Refusal(
            f"no configuration of {run.recipe} fits in {available / 2**30:.1f} GiB. Use fewer --simulators, "
            "or a smaller --replay.capacity."
        )
    for name in sorted(unmeasured):
        log(f"left out, because the profile lacks {name}")
    _sort(found, objective)
    if hosts > 1:
        found = _on_hosts(found[:_SIMULATED_CANDIDATES], run, profile, hosts, objective, learning, log)
        _sort(found, objective)
    for candidate_found in found:
        candidate_found.why = _why(candidate_found, found[0], hosts * profile.cores)
    return found


def _sort(found: list[Candidate], objective: Objective) -> None:
    found.sort(key=lambda c: -c.predicted if objective == "throughput" else c.predicted)


def _value(
    objective: Objective,
    candidate: Run,
    run: Run,
    prediction: Prediction,
    profile: DeviceProfile,
    learning: Learning | None,
) -> float:
    rate = prediction.env_steps_per_second
    if objective == "time":
        assert learning is not None
        return env_steps_to_target(candidate, run, learning) / rate
    if objective == "energy":
        assert profile.watts is not None
        return 1000 * profile.watts * prediction.busy / rate
    return rate


def _on_hosts(
    best: Sequence[Candidate],
    run: Run,
    profile: DeviceProfile,
    hosts: int,
    objective: Objective,
    learning: Learning | None,
    log: Callable[[str], None],
) -> list[Candidate]:
    """The candidates on ``hosts`` hosts: each replica's own work takes the seconds that the cost model
    predicts, and the strategy's own code sends messages through a simulated network."""
    link = profile.links.get("network")
    network = "latency=1e-4,bandwidth=1e9"
    if link is not None:
        network = f"latency={link.latency_seconds:g},bandwidth={link.bytes_per_second:g}"
    log(f"{hosts} hosts, {'assumed' if link is None else link.how} network: {network}")
    found = []
    for candidate in best:
        replicas = hosts * candidate.run.replicas
        own = {n: s for n, s in candidate.prediction.seconds.items() if n not in ("exchange", "waiting")}
        batch_seconds = candidate.run.replicas / candidate.prediction.updates_per_second
        batch_seconds -= candidate.prediction.seconds["exchange"] + candidate.prediction.seconds["waiting"]
        chosen = candidate.run.strategy if candidate.run.replicas > 1 else strategy("all-reduce")()
        whole = dataclasses.replace(candidate.run, replicas=replicas, strategy=chosen)  # on all hosts
        seconds = max(batch_seconds, max(own.values()))
        with tempfile.TemporaryDirectory(prefix="murmurate-plan-") as folder:
            source: Any = whole.source
            for processes in ("actors", "workers"):  # their work is part of ``seconds``
                if hasattr(source, processes):
                    source = dataclasses.replace(source, **{processes: 0})
            simulated = dataclasses.replace(
                whole,
                source=source,
                env_steps=None,
                minutes=None,
                updates=_SIMULATED_UPDATES,
                stop_at_return=None,
                launcher="local",  # a simulated run launches no processes
            )
            finish = simulate(
                simulated,
                Cluster(compute=f"constant:{seconds:g}", network=network),
                Path(folder) / "run",
                quiet=True,
            )
        assert finish.summary is not None
        updates = finish.summary["updates_per_virtual_second"] / whole.learner.updates(1)
        ratio = updates / candidate.prediction.updates_per_second
        prediction = dataclasses.replace(
            candidate.prediction,
            env_steps_per_second=candidate.prediction.env_steps_per_second * ratio,
            updates_per_second=updates,
            busy=candidate.prediction.busy * hosts,
        )
        value = _value(objective, whole, run, prediction, profile, learning)
        words = changes(run, whole)
        found.append(
            Candidate(" ".join(words), whole, value, candidate.unit, "", prediction, words, candidate.bytes)
        )
    return found


def _why(candidate: Candidate, best: Candidate, cores: int) -> str:
    """cores: number of cores of all hosts."""
    prediction, run = candidate.prediction, candidate.run
    longest = sorted(prediction.seconds.items(), key=lambda item: -item[1])[:2]
    total = sum(prediction.seconds.values()) or 1.0
    parts = " and ".join(f"{name} ({seconds / total:.0%})" for name, seconds in longest)
    actors = producers(run)
    kind = "actors" if hasattr(run.source, "actors") else "decoding processes"
    processes = run.replicas * (1 + actors) + run.strategy.centre
    limits = {
        "learner": f"the learner limits it, mostly {parts}",
        "actors": f"its {actors} {kind} limit it, mostly {parts}",
        "cores": f"{processes} processes share {cores} cores",
    }[prediction.bottleneck]
    if candidate is best:
        return f"best of those predicted: {limits}; {prediction.busy:.1f} of {cores} cores are busy"
    factor = max(candidate.predicted, best.predicted) / max(min(candidate.predicted, best.predicted), 1e-12)
    idle = cores - prediction.busy
    reason = f"{limits}"
    if idle >= 0.5 and prediction.busy < best.prediction.busy:
        reason += f"; {idle:.1f} cores are idle"
    if prediction.seconds["exchange"] + prediction.seconds["waiting"] > 0.1 * total:
        reason += f"; {run.strategy.name} takes {_exchange_share(prediction):.0%} of a batch"
    return f"{factor:.2f} times worse: {reason}"


def _exchange_share(prediction: Prediction) -> float:
    total = sum(prediction.seconds[name] for name in (*PRIMITIVES, "exchange", "waiting"))
    return (prediction.seconds["exchange"] + prediction.seconds["waiting"]) / total
