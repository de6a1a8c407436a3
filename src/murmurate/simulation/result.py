"""``summary.json`` of a simulated run: the fields of every run, and the fields about virtual time."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from murmurate.record.stored import write_json
from murmurate.simulation.member import Centre, Costs
from murmurate.simulation.monitor import Monitor, disagreement
from murmurate.training import checkpoint
from murmurate.training.evaluate import figures, without_nan
from murmurate.training.run import Run


def summarize(
    run: Run,
    folder: Path,
    monitor: Monitor,
    centre: Centre | None,
    wall_seconds: float,
    exit_status: str,
) -> dict[str, Any]:
    """Write and return ``summary.json``; a finished run is evaluated first. Fields: ``docs/metrics.md``,
    ``docs/simulate.md``."""
    costs = monitor.costs()
    staleness_max = [monitor.former_staleness_max, *(x.staleness_max for x in monitor.learners.values())]
    centre_bytes = [centre.replicator.bytes_exchanged] if centre is not None else []
    finished = [monitor.learners[rank] for rank in sorted(monitor.finished)]
    virtual_seconds = max(monitor.finished.values(), default=monitor.fabric.virtual_seconds)
    frames = monitor.env_steps * run.world.spec().frames_per_step
    fields: dict[str, Any] = {
        "recipe": run.recipe,
        "agent": run.learner.name,
        "strategy": run.strategy.name,
        "replicas": run.replicas,
        "launcher": run.launcher,
        "seed": run.seed,
        "env_steps": monitor.env_steps,
        "frames": frames,
        "updates": int(statistics.median(learner.updates for learner in finished)) if finished else 0,
        "updates_least": min((learner.updates for learner in finished), default=0),
        "updates_greatest": max((learner.updates for learner in finished), default=0),
        "wall_seconds": wall_seconds,
        "virtual_seconds": virtual_seconds,
        "env_steps_per_second": monitor.env_steps / max(wall_seconds, 1e-9),
        "env_steps_per_virtual_second": monitor.env_steps / max(virtual_seconds, 1e-12),
        "updates_per_virtual_second": monitor.updates / max(virtual_seconds, 1e-12),
        "total_updates": monitor.updates,
        **shares(costs),
        "bytes_exchanged": sum(cost.bytes for cost in costs) + sum(centre_bytes),
        "staleness_max": max(staleness_max),
        "disagreement_final": disagreement(finished) if len(finished) > 1 else None,
        "train_return_mean": statistics.fmean(monitor.returns) if monitor.returns else None,
        "dead_replicas": sorted(monitor.died),
        "faults": {
            name: monitor.event_counts[name] for name in sorted(monitor.event_counts) if name != "stopping"
        },
        "events": monitor.events,
        "stopped_because": monitor.stopped_because,
        "resume_exact": False,
        "exit": exit_status,
        "eval_return_mean": None,
        "eval_return_stderr": None,
        "episodes": None,
        "best_eval_return_mean": None,
    }
    if (skipped := run.world.skipped()) is not None:
        fields["skipped"] = skipped[1]
    last_checkpoint = folder / "checkpoints" / "last"
    if exit_status == "finished" and checkpoint.damage(last_checkpoint) is None:
        evaluation = figures(run, last_checkpoint, alone=True)
        evaluation.pop("returns", None)
        fields |= evaluation
    fields = without_nan(fields)
    write_json(folder / "summary.json", fields)
    return fields


def shares(costs: Sequence[Costs]) -> dict[str, float]:
    """Shares of the learners' virtual time: computing, waiting, exchanging, the rest (asleep, paused)."""
    total = max(sum(cost.alive_seconds for cost in costs), 1e-12)
    values = {
        "share_computing": sum(cost.computing_seconds for cost in costs) / total,
        "share_waiting": sum(cost.waiting_seconds for cost in costs) / total,
        "share_exchanging": sum(cost.exchanging_seconds for cost in costs) / total,
    }
    return values | {"share_idle": max(0.0, 1.0 - sum(values.values()))}
