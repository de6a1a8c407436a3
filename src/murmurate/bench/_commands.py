"""The racers: our own command line as a user types it, and Stable-Baselines3."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

from murmurate.bench._racer import Racer

# so far away that no window sees the end of the run; minutes is what ends a racer left behind
_FOR_EVER = ("--env-steps", "1000000000", "--minutes", "60", "--stop-at-return", "None")


def ours(label: str, recipe: str, where: Path, *options: str) -> Racer:
    """``murmurate train RECIPE`` with its launcher, console, recorder and checkpoints as they are."""
    folder = where / label
    command = [sys.executable, "-m", "murmurate", "train", recipe, *_FOR_EVER, *options, "--out", str(folder)]
    return Racer(label, command, folder / "metrics.jsonl", key="total_env_steps")


def sb3(label: str, world: str, simulators: int, where: Path) -> Racer:
    """Stable-Baselines3 on ``pong``, ``cartpole`` or ``pong-dqn`` (see ``murmurate.bench._sb3``)."""
    progress = where / label / "progress.jsonl"
    command = [sys.executable, "-m", "murmurate.bench._sb3", world, str(simulators), str(progress)]
    return Racer(label, command, progress)


def missing(package: str, extra: str = "bench") -> dict[str, Any] | None:
    """None if the peer can run here; else the entry that says so in the result."""
    if importlib.util.find_spec(package.replace("-", "_")) is not None:
        return None
    return {"peer": package, "status": f"not installed: pip install 'murmurate[{extra}]'"}
