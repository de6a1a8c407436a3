"""Plans of GALA's table and sweep, and what takes the place of training in their tests."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from murmurate.bench._gala import GalaPlan, Job
from murmurate.bench._result import progress_log
from murmurate.training.checkpoint import commit, write_part

SILENT = progress_log()


def plan(where: Path, **fields: Any) -> GalaPlan:
    small: dict[str, Any] = {
        "games": ("cartpole",),
        "seeds": 2,
        "env_steps": (1_000, 4_000),
        "learners": 2,
        "simulators": (16, 32),
        "eval_episodes": 2,
    }
    return GalaPlan(**{**small, **fields}, where=str(where / "runs"))


def option(words: Sequence[str], name: str) -> str:
    return words[list(words).index(name) + 1]


class Trainer:
    """In place of ``murmurate train`` and ``resume``: notes its commands and leaves what they would."""

    def __init__(self) -> None:
        self.commands: list[list[str]] = []
        self.returns: dict[str, float] = {}  # by a part of the folder's name
        self.diverges: str | None = None
        self.stops_after: int | None = None  # commands until one is cut off, with its checkpoint saved
        self.asked = 0

    def __call__(self, words: Sequence[str], output: Path) -> int:
        self.commands.append(list(words))
        folder = Path(words[1] if words[0] == "resume" else option(words, "--out"))
        end = int(option(words, "--env-steps"))
        if words[0] == "train":
            assert not folder.exists()
        cut = self.stops_after is not None and len(self.commands) > self.stops_after
        save(folder, end // 2 if cut else end)
        if cut:
            (folder / "summary.json").write_text(json.dumps({"exit": "interrupted", "env_steps": end // 2}))
            output.write_text("somebody pressed Ctrl-C")
            return 130
        value = next((v for part, v in self.returns.items() if part in folder.name), 10.0)
        failed = self.diverges is not None and self.diverges in folder.name
        facts = {
            "exit": "failed: replica 0: the gradient of replica 'a2c' is not finite at its update 7, though"
            if failed
            else "finished",
            "env_steps": end // 3 if failed else end,
            "seed": int(folder.name.rsplit("-", 1)[1]),
            "eval_return_mean": value + 1,
            "eval_return_stderr": 0.5,
            "train_return_mean": value,
            "dead_replicas": [],
            "wall_seconds": 1800.0,
        }
        (folder / "summary.json").write_text(json.dumps(facts))
        return 1 if failed else 0

    def speed(self, job: Job) -> float:
        self.asked += 1
        return 100.0


def save(folder: Path, env_steps: int) -> None:
    staging = folder / "checkpoints" / ".staging"
    staging.parent.mkdir(parents=True, exist_ok=True)
    write_part(staging, 0, {"env_steps": env_steps})
    commit(folder / "checkpoints", staging, {"env_steps": env_steps, "seconds": 1.0, "replicas": 1})
