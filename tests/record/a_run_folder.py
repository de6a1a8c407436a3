"""Writes run folders with known numbers, for the tests of what reads them."""

import json
import math
from pathlib import Path

import numpy as np

from murmurate.record.recorder import Recorder


def write_run(
    folder: Path,
    *,
    replicas: int = 4,
    recipe: str = "pong-gala",
    strategy: dict | None = None,
    seconds: int = 1500,
    every: int = 5,
    seed: int = 0,
    dead: int | None = 2,
    summary: bool = True,
    rate: float = 500.0,
    leave_out: frozenset[str] = frozenset(),
) -> None:
    """A run that learns along a logistic curve; replica ``dead`` dies half way."""
    folder.mkdir(parents=True)
    generator = np.random.default_rng(seed)
    now = [0.0]
    path = folder / "metrics.jsonl"
    writers = [Recorder(path, i, 0.0, clock=lambda: now[0]) for i in range(replicas)]
    launcher = Recorder(path, None, 0.0, clock=lambda: now[0])
    launcher.event("started", f"{replicas} replicas started")
    for t in range(every, seconds + 1, every):
        now[0] = float(t)
        if dead is not None and t == seconds // 2:
            launcher.event("died", f"replica {dead} died (SIGKILL); {replicas - 1} go on", member=dead)
        if t % 300 == 0:
            launcher.event("checkpoint", f"checkpoint at {t} s")
        for i, writer in enumerate(writers):
            if i == dead and t >= seconds // 2:
                continue
            metrics = _metrics(t, i, replicas, seconds, rate, generator)
            writer.record({k: v for k, v in metrics.items() if k not in leave_out})
    for writer in (*writers, launcher):
        writer.close()
    run = {
        "recipe": recipe,
        "agent": "a2c",
        "strategy": strategy or {"name": "gala", "topology": "ring", "staleness_bound": 100},
        "replicas": replicas,
        "launcher": "local",
        "seed": seed,
        "env_steps": int(rate * seconds * replicas),
        "command": ["murmurate", "train", recipe, "--replicas", str(replicas), "--seed", str(seed)],
        "hardware": {"cpu": "a processor of 2 cores", "memory_gib": 8.0, "gpu": None},
        "versions": {"murmurate": "0.1.0", "torch": "2.13.0"},
    }
    (folder / "run.json").write_text(json.dumps(run))
    if summary:
        ended = {
            "env_steps": int(rate * seconds * replicas),
            "frames": int(4 * rate * seconds * replicas),
            "wall_seconds": float(seconds),
            "env_steps_per_second": rate * replicas,
            "train_return_mean": 18.25,
            "eval_return_mean": 19.125,
            "eval_return_stderr": 0.25,
            "dead_replicas": [] if dead is None else [dead],
            "disagreement_final": 0.0021,
            "staleness_max": 9,
            "exit": "finished",
        }
        (folder / "summary.json").write_text(json.dumps(ended))


def _metrics(t: int, i: int, replicas: int, seconds: int, rate: float, generator) -> dict:
    progress = t / seconds
    score = -20.5 + 39 / (1 + math.exp(-14 * (progress - 0.5 - 0.03 * i))) + generator.normal() * 0.35
    norm = 0.04 * (1 - 0.6 * progress) * (1 + 0.1 * generator.normal())
    cosines = [0.25 if (i - 1) % replicas == j else 0.125 for j in range(replicas)]
    cosines[i] = 1.0
    return {
        "env_steps": int(rate * t),
        "updates": int(rate * t / 80),
        "rounds": int(rate * t / 160),
        "return_mean": score,
        "env_steps_per_second": rate * (1 + 0.04 * generator.normal()),
        "waiting_seconds": 0.001 * t * (1 + i / 4),
        "loss": 0.4 * math.exp(-2 * progress) + 0.03 * generator.normal(),
        "value_loss": 0.2 * math.exp(-progress) + 0.02 * generator.normal(),
        "entropy": 1.79 * math.exp(-1.2 * progress) + 0.02 * generator.normal(),
        "gradient_norm": 0.5 + 0.1 * generator.normal(),
        "staleness": int(generator.integers(0, 6)),
        "staleness_max": 9,
        "heard": 2,
        "disagreement": 0.0021 * (1 - 0.5 * progress) * (1 + 0.05 * generator.normal()),
        "distance_to_mean": 0.05 * (1 - 0.5 * progress) * (1 + 0.05 * generator.normal()),
        "update_norm": norm,
        "gradient_cosine": cosines,
        "bytes_exchanged": int(t * 6.8e6),
        "learning_rate": 7e-4,
        "staleness_counts": {"0": 300, "1": 60, "5": 40},
        "spans": spans(t, i),
    }


def spans(t: float, member: int) -> list[list]:
    """A burst of ten turns of 10 ms before ``t``: of each, member i waits i ms, and exchanges for one."""
    found: list[list] = []
    for turn in range(10):
        start = t - 0.2 + 0.01 * turn
        wait = 0.001 * member
        found.append(["collect", start, 0.005 - wait])
        found.append(["learn", start + 0.005 - wait, 0.004])
        if wait:
            found.append(["wait", start + 0.009 - wait, wait])
        found.append(["exchange", start + 0.009, 0.001])
    return found


def write_records(folder: Path, records: list[dict], *, replicas: int, strategy: dict, **more: dict) -> None:
    """A run folder that holds just ``records``; ``more`` stands in its run.json."""
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    run = {"recipe": "cartpole-gala", "strategy": strategy, "replicas": replicas, "seed": 3}
    (folder / "run.json").write_text(json.dumps(run | more))


def line(t: float, replica: int, **fields) -> dict:
    return {
        "time_seconds": t,
        "replica": replica,
        "env_steps": int(100 * t),
        "updates": int(10 * t),
        **fields,
    }


def a_run(folder: Path, records: list[dict], strategy: dict, *, replicas: int = 2, **of_run) -> Path:
    write_records(folder, records, replicas=replicas, strategy=strategy)
    run = json.loads((folder / "run.json").read_text()) | of_run
    (folder / "run.json").write_text(json.dumps(run))
    return folder
