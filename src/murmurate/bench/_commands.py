"""Commands that benchmarks run: our own command line as a user types it, and Stable-Baselines3."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from murmurate.bench._racer import Racer
from murmurate.errors import RunFailed

# limits that no measurement reaches; --minutes ends a run whose benchmark was killed
_WITHOUT_END = ("--env-steps", "1000000000", "--minutes", "600", "--stop-at-return", "None")


def murmurate_train(label: str, recipe: str, where: Path, *options: str) -> Racer:
    """``murmurate train RECIPE`` with its default launcher, console, recorder and checkpoints."""
    folder = where / label
    command = [sys.executable, "-m", "murmurate", "train", recipe, *_WITHOUT_END, *options]
    return Racer(label, [*command, "--out", str(folder)], folder / "metrics.jsonl", key="total_env_steps")


def sb3(label: str, world: str, simulators: int, where: Path) -> Racer:
    """Stable-Baselines3 on one of the worlds of ``murmurate.bench._sb3``."""
    return appending(label, [sys.executable, "-m", "murmurate.bench._sb3", world, str(simulators)], where)


def appending(label: str, command: Sequence[str], where: Path) -> Racer:
    """A command whose last argument is the file to which it appends its env steps."""
    progress = where / label / "progress.jsonl"
    return Racer(label, [*command, str(progress)], progress)


def missing(package: str, extra: str = "bench") -> dict[str, Any] | None:
    """None if the package is installed; otherwise an entry for the result's ``peers``, which says how to
    install it."""
    if importlib.util.find_spec(package.replace("-", "_")) is not None:
        return None
    return {"peer": package, "status": f"not installed: pip install 'murmurate[{extra}]'"}


def installed_world() -> str:
    """``pong`` where ale-py is installed, else ``cartpole``."""
    return "cartpole" if missing("ale-py", "atari") else "pong"


def run_murmurate(words: Sequence[str]) -> None:
    """Run ``murmurate WORDS`` to its end. Raises RunFailed with its error output if it fails."""
    command = [sys.executable, "-m", "murmurate", *words]
    completed = subprocess.run(command, capture_output=True, text=True)
    if completed.returncode != 0:
        raise RunFailed(f"{' '.join(command)} ended with {completed.returncode}: {completed.stderr.strip()}")
