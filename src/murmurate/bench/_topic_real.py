"""DPSVI on real processes of this machine: documents per second, and time to a perplexity."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from murmurate.bench._cache import cached_run, keyed
from murmurate.bench._result import Log, spread
from murmurate.bench._topic_plan import SpeedupPlan
from murmurate.bench._topic_runs import PerplexityPoint, reached
from murmurate.datasets.corpus_world import CorpusWorld
from murmurate.errors import Refusal, RunFailed
from murmurate.record.runs import RecordedRun

# (threads, workers)
_SHAPES: dict[str, tuple[int, int] | None] = {
    "serial": None,
    "1 node": (1, 1),
    "2 threads": (2, 1),
    "2 workers": (1, 2),
}


def refuse_late_target(plan: SpeedupPlan) -> None:
    """Raise Refusal if the runs whose perplexity is computed end before the target's documents."""
    # the last evaluation may be almost an interval before the end, and one is at least a mini-batch of 64
    least = 2 * (plan.real_target + max(plan.real_look, 64))
    if 0 < plan.real_documents < least:
        raise Refusal(
            f"--real-documents is {plan.real_documents}, and runs of half as many may end before the target, "
            f"--real-target {plan.real_target}. Use --real-documents {least}, or 0."
        )


def real(plan: SpeedupPlan, world: CorpusWorld, log: Log) -> dict[str, Any]:
    """``serial`` (one process, without a master), one and two threads, and one and two workers (B = 15,
    M = nW) under the step rule ``average``, on this machine.

    The time to the target, T, is the number of documents that a run took to reach it, divided by the
    documents per second of another run, in which no perplexity is computed. The perplexity is that of rank
    0's own topics. Each seed has its own target, ratios and times. The master is a further process: on two
    cores it competes with two learners.
    """
    seeds = [_real_seed(plan, world, seed, log) for seed in range(plan.real_seeds)]
    return {"seeds": seeds} | spreads(seeds)


def _real_seed(plan: SpeedupPlan, world: CorpusWorld, seed: int, log: Log) -> dict[str, Any]:
    measured = {}
    for name, shape in _SHAPES.items():
        words: list[Any] = [
            *("--world.path", world.path, "--world.validation", plan.kept, "--world.test", 0),
            *("--agent.topics", plan.topics, "--agent.batch", 64, "--agent.step-rule", "average"),
            *("--agent.rate", plan.rate, "--checkpoint-every-env-steps", 10**9, "--seed", seed),
        ]
        replicas = 1
        if shape is None:
            words += ["--strategy", "solo", "--replicas", 1]
        else:
            threads, workers = shape
            replicas = threads * workers
            words += ["--strategy", "dpsgd", "--replicas", replicas]
            words += ["--strategy.threads", threads, "--strategy.local-updates", 15]
            words += ["--strategy.batch", workers, "--strategy.wait", "true"]
        # counted in rank 0's own updates
        validate_every = max(1, plan.real_look // 64 // replicas)
        evaluating = ["--agent.validate-every", validate_every, "--env-steps", plan.real_documents // 2]
        only_running = ["--agent.validate-every", 0, "--env-steps", plan.real_documents]
        where = Path(plan.where)
        evaluated = _run(name, [*words, *evaluating, "--record-every-seconds", 0.01], where, log)
        timed = _run(name, [*words, *only_running, "--record-every-seconds", 0.05], where, log)
        measured[name] = {"points": _points(evaluated), "documents_per_second": _per_second(timed)}
    return {"seed": seed} | times(measured, plan.real_target)


def times(measured: dict[str, Any], target_documents: int) -> dict[str, Any]:
    """Seconds to the perplexity that ``serial`` has after ``target_documents``; speeds; TSP and the speed-up.

    TSP and the speed-up say how many times sooner a run reaches that perplexity than ``serial`` (TSP) or one
    node (the speed-up).
    """
    points = measured["serial"]["points"]
    target = next(perplexity for documents, perplexity in points if documents >= target_documents)
    seconds = {}
    for name, run in measured.items():
        curve = [PerplexityPoint(n, n / run["documents_per_second"], x) for n, x in run["points"]]
        first = reached(curve, target)
        seconds[name] = None if first is None else first.seconds
    speeds = {name: run["documents_per_second"] for name, run in measured.items()}

    def relative_to(baseline: str) -> dict[str, float | None]:
        reference = seconds[baseline]
        return {
            name: None if reference is None or value is None else reference / value
            for name, value in seconds.items()
            if name not in ("serial", baseline)
        }

    return {
        "target_perplexity": target,
        "documents_per_second": speeds,
        "speed_over_one_node": {name: speeds[name] / speeds["1 node"] for name in ("2 threads", "2 workers")},
        "seconds": seconds,
        "tsp_serial": relative_to("serial"),
        "speedup": relative_to("1 node"),
    }


def spreads(seeds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Spreads over the seeds; None where no seed's run reached the target."""

    def over_seeds(figure: str, name: str) -> dict[str, Any] | None:
        values = [seed[figure][name] for seed in seeds if seed[figure][name] is not None]
        return spread(values) if values else None

    figures = ("documents_per_second", "speed_over_one_node", "tsp_serial", "speedup")
    return {figure: {name: over_seeds(figure, name) for name in seeds[0][figure]} for figure in figures}


def _run(shape: str, options: Sequence[Any], where: Path, log: Log) -> RecordedRun:
    """A run of real processes below ``where``, made once on a machine for the same options."""
    words = [str(word) for word in options]
    return cached_run(where / keyed(f"real-{shape}", words), "corpus-lda", words, log)


def _points(run: RecordedRun) -> list[tuple[int, float]]:
    """(documents of all replicas, perplexity) during the run."""
    return [
        (int(record["total_env_steps"]), float(record["perplexity"]))
        for record in run.records
        if record.get("perplexity") is not None
    ]


def _per_second(run: RecordedRun) -> float:
    """Documents of all replicas per second, without the first tenth and so without the start-up."""
    points = sorted({float(r["time_seconds"]): int(r["total_env_steps"]) for r in run.records}.items())
    late = [point for point in points if point[1] >= points[-1][1] / 10]
    if len(late) < 2 or late[-1][0] <= late[0][0]:
        raise RunFailed("the run is too short to measure its speed: give more documents")
    return (late[-1][1] - late[0][1]) / (late[-1][0] - late[0][0])
