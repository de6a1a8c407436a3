"""The end of a run: its evaluation, and ``summary.json``."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from murmurate.record.reader import read_metrics
from murmurate.record.runs import ascending
from murmurate.record.stored import write_json
from murmurate.training import checkpoint
from murmurate.training.coordinator import Coordinator
from murmurate.training.data_record import read_fingerprint
from murmurate.training.divergence import relative_spread
from murmurate.training.evaluate import figures, without_nan
from murmurate.training.run import Run


def disagreement(states: Sequence[dict[str, Any]]) -> float | None:
    """The relative spread of the parameters in the parts of a checkpoint; None with fewer than two.

    states: the part of each replica, without the centre's.
    """
    if len(states) < 2:
        return None
    vectors = []
    for state in states:
        replicas = state["replicas"]
        tensors = [
            t.flatten().double() * math.exp(replicas[r]["replica"].get("log_scale", 0.0))
            for r in sorted(replicas)
            for _, t in sorted(replicas[r]["replica"]["params"].items())
        ]
        vectors.append(torch.cat(tensors))
    return relative_spread(torch.stack(vectors))


def summarize(
    run: Run, folder: Path, coordinator: Coordinator, exit_reason: str, *, evaluated: bool = True
) -> dict[str, Any]:
    """Evaluate, then write and return ``summary.json`` (fields: ``docs/metrics.md``).

    Without ``evaluated`` the fields of the evaluation are null. Raises what the evaluation raises, and
    OSError if the file cannot be written.
    """
    last = folder / "checkpoints" / "last"
    best = folder / "checkpoints" / "best"
    seconds = coordinator.recorder.seconds
    # until the last replica had ended: afterwards the run may have waited for an evaluation
    trained_seconds = seconds if coordinator.trained_seconds is None else coordinator.trained_seconds
    run_state = coordinator.run_state
    facts: dict[str, Any] = {
        "recipe": run.recipe,
        "agent": run.learner.name,
        "strategy": run.strategy.name,
        "replicas": run.replicas,
        "launcher": run.launcher,
        "seed": run.seed,
        "env_steps": run_state.total_env_steps(),
        "frames": run_state.total_env_steps() * run.world.spec(read_fingerprint(folder)).frames_per_step,
        "updates": int(statistics.median(run_state.clock(r) for r in range(run.replicas))),
        "wall_seconds": seconds,
        "env_steps_per_second": (run_state.total_env_steps() - coordinator.steps_before)
        / max(trained_seconds - coordinator.seconds_before, 1e-9),
        "train_return_mean": coordinator.return_mean() if coordinator.returns else None,
        "dead_replicas": coordinator.dead,
        "checkpoints_skipped": coordinator.skipped_checkpoints,
        "events": coordinator.events,
        "stopped_because": coordinator.stopped_because,
        "exit": exit_reason,
    }
    if (skipped := run.world.skipped()) is not None:
        facts["skipped"] = skipped[1]
    facts = without_nan(facts | _from_checkpoint(run, folder, last, best, evaluated))
    write_json(folder / "summary.json", facts)
    return facts


def _lost_bytes(folder: Path, saved: Collection[int]) -> int:
    """Recorded bytes that are in no part of a checkpoint: those that replicas had exchanged before they were
    started again, since when they count from 0, and all of the dead. saved: ranks that have a part."""
    counts = defaultdict[int, list[float]](list)
    for record in read_metrics(folder / "metrics.jsonl"):
        replica, exchanged = record.get("replica"), record.get("bytes_exchanged")
        if replica is not None and exchanged is not None:
            counts[replica].append(exchanged)
    return sum(
        int(ascending(np.array(each))[-1] - (each[-1] if rank in saved else 0))
        for rank, each in counts.items()
    )


def _from_checkpoint(run: Run, folder: Path, last: Path, best: Path, evaluated: bool) -> dict[str, Any]:
    empty = dict.fromkeys(
        (
            "eval_return_mean", "eval_return_stderr", "episodes", "staleness_max", "disagreement_final",
            "bytes_exchanged", "refused", "best_eval_return_mean", "resume_exact",
        )
    )  # fmt: skip
    if checkpoint.damage(last, replays=False) is not None:
        return empty
    ranks = checkpoint.parts(last)
    states = [checkpoint.read_part(last, rank) for rank in ranks]
    of_replicas = [state for rank, state in zip(ranks, states, strict=True) if rank < run.replicas]
    evaluation = figures(run, last, best=best, alone=True) if evaluated else {}
    evaluation.pop("returns", None)  # the return of each game, which only murmurate eval prints
    lost_bytes = _lost_bytes(folder, ranks) if run.replicas > 1 else 0
    return {
        **empty,
        **evaluation,
        "staleness_max": max(max(s["staleness_max"].values()) for s in states),
        "disagreement_final": disagreement(of_replicas),
        "bytes_exchanged": sum(s["bytes_exchanged"] for s in states) + lost_bytes,
        "refused": sum(s.get("refused", 0) for s in states),
        # asynchronous members lose the messages in flight, and depend on the order in which they run; a dead
        # replica is back after a resume
        "resume_exact": (run.strategy.synchronous or run.members == 1)
        and len(states) == run.members
        and all(s["exact"] for s in states),
    }
