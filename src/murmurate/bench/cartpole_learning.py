"""Does every strategy learn CartPole? Real runs on real processes, evaluated on unseen seeds."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from murmurate.bench._result import Log, spread
from murmurate.errors import RunFailed
from murmurate.strategies import strategies

NAME = "cartpole-learning"
SUMMARY = "evaluation return of cartpole-gala under every strategy; --full: on 3 seeds each"
_GOAL = 475.0
_ENV_STEPS = 500_000


def measure(full: bool, log: Log) -> dict[str, Any]:
    """Mean evaluation return (10 whole games) of each run, and the env steps it took.

    A run ends when its last 100 training episodes reach the recipe's ``stop_at_return``, or after 500,000
    env steps over all replicas. Two sets of parameters are evaluated: the last, whatever they are, and the
    best, which is the checkpoint with the highest mean over the last 100 training episodes. A run reached the
    goal if either did; ``reached_by_last`` counts the last alone.
    """
    seeds = range(3) if full else range(1)
    rows = {name: [_run(name, seed, log) for seed in seeds] for name in strategies()}
    last = {name: sum(r["eval_return_mean"] >= _GOAL for r in runs) for name, runs in rows.items()}
    reached = {name: sum(r["best_eval_return_mean"] >= _GOAL for r in runs) for name, runs in rows.items()}
    return {
        "goal": _GOAL,
        "env_steps_at_most": _ENV_STEPS,
        "seeds": len(seeds),
        "reached": reached,
        "reached_by_last": last,
        "all_reached": all(count == len(seeds) for count in reached.values()),
        "eval_return_mean": {
            name: spread([r["eval_return_mean"] for r in runs]) for name, runs in rows.items()
        },
        "best_eval_return_mean": {
            name: spread([r["best_eval_return_mean"] for r in runs]) for name, runs in rows.items()
        },
        "env_steps": {name: spread([r["env_steps"] for r in runs]) for name, runs in rows.items()},
        "wall_seconds": {name: spread([r["wall_seconds"] for r in runs]) for name, runs in rows.items()},
        "replicas": {name: runs[0]["replicas"] for name, runs in rows.items()},
    }


def _run(strategy: str, seed: int, log: Log) -> dict[str, Any]:
    replicas = 1 if strategy == "solo" else 4
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        command = [
            sys.executable, "-m", "murmurate", "train", "cartpole-gala", "--strategy", strategy,
            "--replicas", str(replicas), "--seed", str(seed), "--env-steps", str(_ENV_STEPS),
            "--out", str(out),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise RunFailed(f"{' '.join(command)} ended with {done.returncode}: {done.stderr.strip()}")
        summary: dict[str, Any] = json.loads((out / "summary.json").read_text())
    mean, best, steps = (summary[key] for key in ("eval_return_mean", "best_eval_return_mean", "env_steps"))
    log(f"{strategy}, seed {seed}: {mean:.1f}, at best {best:.1f}, after {steps:,} env steps")
    return summary
