"""Searches the configurations of a recipe on one host, or several, for the best by a cost model.

Zhang 2022, section 4.4.2, places the primitives of one learner on devices (``assignment``). This search
chooses what the thesis leaves open (``candidates``).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from murmurate.errors import Refusal, quoted
from murmurate.fabric.processes.memory_limits import available_bytes
from murmurate.mapping.candidates import Candidate, candidates, changes, strategies_of
from murmurate.mapping.cost import NotMeasured, Prediction, predict
from murmurate.mapping.hosts import on_hosts
from murmurate.mapping.learning import Learning, env_steps_to_target, learned_by, unknown_factors
from murmurate.mapping.primitives import on_cpu, producers, role_of
from murmurate.mapping.profile import DeviceProfile, key
from murmurate.mapping.variants import variants
from murmurate.native.cores import usable_cores
from murmurate.strategies.interface import Strategy
from murmurate.training.memory import needed_bytes, planned_bytes
from murmurate.training.run import Run

Objective = Literal["throughput", "time", "energy", "memory"]
UNITS = {
    "throughput": "{unit}/s",
    "time": "s to the target",
    "energy": "J per 1,000 {unit}",
    "memory": "MiB",
}
UNCHANGED = "as the recipe is"  # name of the candidate without changes
_SIMULATED_CANDIDATES = 6
_ROLES = {"learner": "learner", "actors": "actor"}  # of the stage that is a bottleneck


def search(
    run: Run,
    profile: DeviceProfile,
    objective: Objective = "throughput",
    hosts: int = 1,
    log: Callable[[str], None] = lambda line: None,
    strategies: Sequence[Strategy] = (),
) -> list[Candidate]:
    """Candidates, best first, of those that fit in the memory of the profile's host. With ``memory`` as the
    objective, those that are slower than ``run`` are left out, if that fits itself.

    strategies: those that are considered; () for those of ``strategies_of``.
    Raises Refusal if the profile lacks the costs of this recipe, or what the objective needs.
    """
    strategies = strategies or strategies_of(run, shorter=objective == "time")
    learning = _checked(run, profile, objective, hosts, log)
    searching = _Search(run, profile, objective, hosts, log, strategies, learning)
    found = searching.on_one_host()
    if hosts > 1:
        placed = on_hosts(found, run, profile, hosts, log, strategies, _SIMULATED_CANDIDATES)
        found = searching.ranked(
            searching.candidate(whole, p, one.bytes) for one, whole, p in placed if searching.knows(whole)
        )
    missed = f"other {', '.join(sorted(searching.unknown))}: such runs missed the target, or were not trained"
    if not found and searching.unknown:
        raise Refusal(
            f"every configuration is left out, as it has {missed}. Use a lower --target, or --objective "
            "throughput."
        )
    if not found:
        raise Refusal(f"no configuration can be simulated on {hosts} hosts: see above. Leave out --hosts.")
    for candidate in found:
        candidate.why = _why(candidate, found[0], objective, hosts * profile.cores)
    if searching.unknown:
        found[0].why += f"; left out are those with {missed}"
    return found


@dataclass
class _Search:
    """What a search is for, and what it has left out. learning: how fast ``run`` learns, as far as that was
    measured. unknown: factors of ``learning`` without exponents in which configurations differed."""

    run: Run
    profile: DeviceProfile
    objective: Objective
    hosts: int
    log: Callable[[str], None]
    strategies: Sequence[Strategy]
    learning: Learning | None
    unknown: set[str] = field(default_factory=set)

    def on_one_host(self) -> list[Candidate]:
        """Those that can be predicted; none if what is ``unknown`` rules them all out. Raises Refusal if none
        fits in memory, or the profile lacks the costs of all."""
        found: list[Candidate] = []
        unmeasured: set[str] = set()
        fitting = list(self._fitting())
        if not fitting:
            raise Refusal(
                f"no configuration of {self.run.recipe} fits in {_memory_bytes(self.profile) / 2**30:.1f} "
                "GiB. Use fewer --simulators, or a smaller --replay.capacity."
            )
        for run, size in fitting:
            # with one replica on each of several hosts it gets other strategies, which are looked at later
            whole = dataclasses.replace(run, replicas=self.hosts * run.replicas)
            if (self.hosts == 1 or run.replicas > 1) and not self.knows(whole):
                continue
            try:
                found.append(self.candidate(run, predict(run, self.profile), size))
            except NotMeasured as missing:
                unmeasured.add(str(missing))
        if not found and unmeasured:
            raise Refusal(
                f"the profile lacks {', '.join(sorted(unmeasured))}. Measure it there, with the same "
                f"options: murmurate plan {quoted(self.run.recipe)} --profile --on FILE."
            )
        for name in sorted(unmeasured):
            self.log(f"left out, because the profile lacks {name}")
        if self.objective == "memory":
            own = [each.prediction.env_steps_per_second for each in found if each.run == self.run]
            found = [each for each in found if each.prediction.env_steps_per_second >= max(own, default=0.0)]
        return self.ranked(found)

    def _fitting(self) -> Iterator[tuple[Run, int]]:
        """The configurations that fit in memory, with the bytes that they need."""
        run, profile = self.run, self.profile
        vector_bytes, available = planned_bytes(run) or 0, _memory_bytes(profile)
        if math.isinf(available):
            self.log(
                "the profile does not say how much memory its machine has, so nothing is left out for want "
                "of it. Add memory_bytes to its hardware"
            )
        known = [v for v in variants(run, profile.cores, _gpus(profile)) if key(v) in profile.recipes]
        for candidate in candidates(run, profile.cores, self.strategies, known):
            if self.objective == "energy" and not on_cpu(candidate):
                continue
            try:
                needed = needed_bytes(candidate, vector_bytes)
            except Refusal:  # its replays do not fit on the disk, say
                if candidate == run:
                    raise
                continue
            if needed <= available:
                yield candidate, needed

    def knows(self, run: Run) -> bool:
        """Whether the exponents of all factors in which it differs are known, if the objective needs them."""
        if self.objective != "time" or self.learning is None:
            return True
        if self.learning.tried.get(learned_by(run), 0.0) is None:
            return False  # it missed the target
        missing = unknown_factors(run, self.run, self.learning)
        self.unknown.update(missing)
        return not missing

    def candidate(self, run: Run, prediction: Prediction, size: int) -> Candidate:
        env_steps = None
        if self.objective == "time":
            assert self.learning is not None
            env_steps = env_steps_to_target(run, self.run, self.learning)
        value = _value(self.objective, prediction, self.profile, size, env_steps)
        words, unit = changes(self.run, run), UNITS[self.objective].format(unit=self.run.unit)
        name = " ".join(words) or UNCHANGED
        return Candidate(name, run, value, unit, "", prediction, words, size, env_steps)

    def ranked(self, found: Iterable[Candidate]) -> list[Candidate]:
        """Best first, of equal ones the fastest."""
        sign = -1 if self.objective == "throughput" else 1
        return sorted(found, key=lambda c: (sign * c.predicted, -c.prediction.env_steps_per_second))


def _checked(
    run: Run, profile: DeviceProfile, objective: Objective, hosts: int, log: Callable[[str], None]
) -> Learning | None:
    """How fast ``run`` learns, as far as that was measured. Raises Refusal for what ``objective`` lacks."""
    costs = profile.recipes.get(key(run))
    if costs is None:
        known = ", ".join(sorted({name.rpartition(" ")[0] for name in profile.recipes})) or "nothing"
        raise Refusal(
            f"the profile holds the costs of {known}, and not of {run.recipe} with these settings. Measure "
            f"them there, with the same options: murmurate plan {quoted(run.recipe)} --profile --on FILE."
        )
    check_objective(run, profile, objective, hosts)
    learning = costs.learning
    if objective == "time" and learning is not None and learning.unfinished:
        log(f"unfinished: {learning.unfinished} of {learning.runs} runs missed {learning.target:g}")
    return learning


def check_objective(run: Run, profile: DeviceProfile, objective: Objective, hosts: int = 1) -> None:
    """Raise Refusal if the profile lacks what ``objective`` needs beside the costs of ``run``, and for an
    objective that is of one host alone."""
    if objective == "memory" and hosts > 1:
        raise Refusal("--objective memory is for the memory of one host: leave out --hosts.")
    costs = profile.recipes.get(key(run))
    learning = None if costs is None else costs.learning
    if objective == "time" and learning is None:
        raise Refusal(
            f"how fast {run.recipe} learns was not measured, so the time to a target is unknown. Measure it: "
            f"murmurate plan {quoted(run.recipe)} --profile --target RETURN; or use --objective throughput."
        )
    if objective == "time" and learning is not None and learning.of != learned_by(run):
        raise Refusal(
            f"how fast {run.recipe} learns was measured with other settings, or by an earlier version. "
            f"Measure it with these: murmurate plan {quoted(run.recipe)} --profile --target "
            f"{learning.target:g}; or use --objective throughput."
        )
    if objective == "energy" and not on_cpu(run):
        raise Refusal(
            "the power of a GPU is unknown, so energy cannot be predicted. Use --placement.devices cpu, or "
            "--objective throughput."
        )
    if objective == "energy" and profile.watts is None:
        raise Refusal(
            "the power of a core is unknown, so energy cannot be predicted. Give it: --watts 6; or use "
            "--objective throughput."
        )


def _gpus(profile: DeviceProfile) -> int:
    """Number of GPUs that torch sees here; of another machine, of those that the profile names."""
    return torch.cuda.device_count() if profile.is_here(usable_cores()) else profile.gpus


def _memory_bytes(profile: DeviceProfile) -> float:
    """What is free here; all memory of another machine, infinite if its profile does not tell."""
    if profile.is_here(usable_cores()):
        return available_bytes()
    return float(profile.hardware.get("memory_bytes", math.inf))


def _value(
    objective: Objective,
    prediction: Prediction,
    profile: DeviceProfile,
    size: int,
    env_steps: float | None,
) -> float:
    """size: bytes of memory that the candidate needs. env_steps: those to the target."""
    rate = prediction.env_steps_per_second
    if objective == "time":
        assert env_steps is not None
        return env_steps / rate
    if objective == "energy":
        assert profile.watts is not None
        return 1000 * profile.watts * prediction.busy / rate
    if objective == "memory":  # no estimate is better than three digits; of equal ones the fastest is first
        return float(f"{size / 2**20:.3g}")
    return rate


def _why(candidate: Candidate, best: Candidate, objective: Objective, cores: int) -> str:
    """cores: number of cores of all hosts."""
    prediction, run = candidate.prediction, candidate.run
    actors, stage = producers(run), _ROLES.get(prediction.bottleneck)
    seconds = {n: s for n, s in prediction.seconds.items() if not (actors and stage) or role_of(n) == stage}
    longest = sorted(seconds, key=lambda name: -seconds[name])[:2]
    total = sum(seconds.values()) or 1.0
    parts = " and ".join(f"{name} ({seconds[name] / total:.0%})" for name in longest)
    kind = "actors" if hasattr(run.source, "actors") else "decoding processes"
    processes = run.replicas * (1 + actors) + run.strategy.centre
    limits = {
        "learner": f"the learner limits it, mostly {parts}",
        "actors": f"its {actors} {kind} limit it, mostly {parts}",
        "cores": f"{processes} processes share {cores} cores",
    }[prediction.bottleneck]
    if candidate is best:
        needed = "" if best.env_steps is None else f", in {best.env_steps:,.0f} {run.unit}"
        return f"best of those predicted{needed}: {limits}; {prediction.busy:.1f} of {cores} cores are busy"
    faster = prediction.env_steps_per_second / best.prediction.env_steps_per_second
    if objective == "memory":
        memory = candidate.predicted / best.predicted
        return f"{memory:.2f} times as much memory, for {faster:.2f} times the throughput: {limits}"
    factor = max(candidate.predicted, best.predicted) / max(min(candidate.predicted, best.predicted), 1e-12)
    idle = cores - prediction.busy
    reason = limits
    if idle >= 0.5 and prediction.busy < best.prediction.busy:
        reason += f"; {idle:.1f} cores are idle"
    exchanging = sum(seconds.get(name, 0.0) for name in ("exchange", "waiting")) / total
    if exchanging > 0.1:
        reason += f"; {run.strategy.name} takes {exchanging:.0%} of a batch"
    if candidate.env_steps is not None and best.env_steps is not None:
        # a candidate with a higher throughput than the best loses by what it learns from an env step
        more = candidate.env_steps / best.env_steps
        reason = f"{more:.2f} times the {run.unit}, with {faster:.2f} times the throughput: {reason}"
    return f"{factor:.2f} times worse: {reason}"
