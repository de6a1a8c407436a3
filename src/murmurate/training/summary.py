"""The end of a run: the consensus parameters play their evaluation games, and all is summed up."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from murmurate.errors import Refusal
from murmurate.evaluation.games import EvalResult, evaluate
from murmurate.evaluation.held_out import held_out
from murmurate.sources.examples import CorpusWorld
from murmurate.spec import derive_seed
from murmurate.training import checkpoint
from murmurate.training.coordinator import Coordinator
from murmurate.training.restore import learners, load_agent
from murmurate.training.run import Run
from murmurate.training.run_folder import write_json
from murmurate.worlds.interface import ExampleWorld, spec_of


def play(run: Run, folder: Path, episodes: int, seed: int | None = None) -> EvalResult:
    """Evaluation games of a checkpoint: argmax, up to 30 no-ops, seeds training never saw.

    Raises Refusal where there is nothing to play.
    """
    if isinstance(run.world, ExampleWorld):
        further = "Use murmurate topics evaluate." if run.unit == "documents" else "See summary.json."
        raise Refusal(f"{run.unit} are not played. {further}")
    agent = load_agent(run, folder)
    where = derive_seed(run.seed, "evaluation games") if seed is None else seed
    return evaluate(run.world, agent, episodes, where)


def disagreement(folder: Path, ranks: Sequence[int]) -> float | None:
    """sqrt(mean_i ||x_i - mean||^2) / ||mean|| over the parts of a checkpoint; None with one part."""
    if len(ranks) < 2:
        return None
    vectors = []
    for rank in ranks:
        replicas = checkpoint.read_part(folder, rank)["replicas"]
        tensors = [
            t.flatten().double() * math.exp(replicas[r]["replica"].get("log_scale", 0.0))
            for r in sorted(replicas)
            for _, t in sorted(replicas[r]["replica"]["params"].items())
        ]
        vectors.append(torch.cat(tensors))
    x = torch.stack(vectors)
    mean = x.mean(0)
    return float((x - mean).square().sum(1).mean().sqrt() / mean.norm())


def summarize(
    run: Run, folder: Path, coordinator: Coordinator, exit_reason: str, *, games: bool = True
) -> dict[str, Any]:
    """Evaluate, then write and return ``summary.json`` (fields: ``docs/metrics.md``).

    Without ``games`` nothing is played, and all that games would tell is null.
    """
    last = folder / "checkpoints" / "last"
    best = folder / "checkpoints" / "best"
    seconds = coordinator.recorder.seconds
    run_state = coordinator.run_state
    facts: dict[str, Any] = {
        "recipe": run.recipe,
        "agent": run.agent.name,
        "strategy": run.strategy.name,
        "replicas": run.replicas,
        "launcher": run.launcher,
        "seed": run.seed,
        "env_steps": run_state.total_env_steps(),
        "frames": run_state.total_env_steps() * spec_of(run.world).frames_per_step,
        "updates": int(statistics.median(run_state.clock(r) for r in range(run.replicas))),
        "wall_seconds": seconds,
        "env_steps_per_second": (run_state.total_env_steps() - coordinator.steps_before)
        / max(seconds - coordinator.seconds_before, 1e-9),
        "train_return_mean": _number(coordinator.return_mean()),
        "dead_replicas": coordinator.dead,
        "checkpoints_skipped": coordinator.skipped,
        "events": coordinator.events,
        "stopped_because": coordinator.stopped_because,
        "exit": exit_reason,
    }
    if isinstance(run.world, CorpusWorld):
        facts["skipped"] = dict(run.world.skipped().causes)
    facts |= _from_checkpoint(run, last, best, games)
    write_json(folder / "summary.json", facts)
    return facts


def _from_checkpoint(run: Run, last: Path, best: Path, games: bool) -> dict[str, Any]:
    nothing = dict.fromkeys(
        (
            "eval_return_mean", "eval_return_stderr", "episodes", "staleness_max", "disagreement_final",
            "bytes_exchanged", "refused", "best_eval_return_mean", "resume_exact",
        )
    )  # fmt: skip
    if checkpoint.damage(last) is not None:
        return nothing
    ranks = checkpoint.parts(last)
    states = [checkpoint.read_part(last, rank) for rank in ranks]
    played: dict[str, Any] = {}
    if games:
        played = held_out(run, last) if isinstance(run.world, ExampleWorld) else _games(run, last, best)
    return {
        **nothing,
        **played,
        "staleness_max": max(max(s["staleness_max"].values()) for s in states),
        "disagreement_final": disagreement(last, learners(run, last)),
        "bytes_exchanged": sum(s["bytes_exchanged"] for s in states),
        "refused": sum(s.get("refused", 0) for s in states),
        "resume_exact": all(s["exact"] for s in states),
    }


def _games(run: Run, last: Path, best: Path) -> dict[str, Any]:
    result = play(run, last, run.eval_episodes)
    best_mean = result.mean
    if checkpoint.damage(best) is None:
        best_mean = max(best_mean, play(run, best, run.eval_episodes).mean)
    return {
        "eval_return_mean": result.mean,
        "eval_return_stderr": _number(result.stderr),
        "episodes": len(result.returns),
        "best_eval_return_mean": best_mean,
    }


def _number(x: float) -> float | None:
    return None if x != x else x
