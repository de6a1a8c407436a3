"""Runs that are evaluated while they learn, and a coordinator of one whose clock stands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from murmurate.fabric.processes.run_state import RunState
from murmurate.recipes import recipe
from murmurate.record.reader import read_metrics
from murmurate.strategies import strategies
from murmurate.training.checkpoint import write_part
from murmurate.training.coordinator import Coordinator
from murmurate.training.run import Run
from murmurate.training.worker_context import staging
from short_runs import altered

STEPS = 8 * 3 * 2  # a common round of two replicas


def a_run(strategy: str = "all-reduce", **fields: Any) -> Run:
    settings: dict[str, Any] = {
        "strategy": strategies()[strategy](), "replicas": 2, "simulators": 3, "env_steps": None,
        "updates": 60, "stop_at_return": None, "launcher": "inline", "eval_episodes": 2,
        "evaluate_every_env_steps": 15 * STEPS,
    }  # fmt: skip
    return altered(recipe("cartpole-gala"), **{**settings, **fields})


def evaluations(folder: Path) -> list[dict[str, Any]]:
    return [r for r in read_metrics(folder / "metrics.jsonl") if r.get("kind") == "evaluation"]


# -- the coordinator -------------------------------------------------------------------------------------


class Timed:
    """A coordinator of two replicas whose clock is ``now``."""

    def __init__(self, folder: Path, in_process: bool = False, **fields: Any) -> None:
        (folder / "checkpoints").mkdir(parents=True)
        self.run_state, self.now = RunState(2), 0.0
        self.run_state.open()
        self.coordinator = Coordinator(a_run(**fields), folder, self.run_state, 0.0, in_process=in_process)
        self.coordinator.recorder._clock = lambda: self.now
        self.coordinator._next_at_seconds = self.coordinator._seconds_of_next_checkpoint()

    def save(self, seconds: float = 0.0, waited: float = 0.0) -> None:
        """Both replicas answer the request after ``waited`` seconds, and are done after ``seconds`` more."""
        number = self.run_state.checkpoint_requested
        for rank, later in ((0, waited), (1, seconds)):
            self.now += later
            state = {"env_steps": 50, "updates": 5, "x": torch.ones(1)}
            write_part(staging(self.coordinator.folder, str(number)), rank, state)
            self.run_state.mark_saved(rank, number)
            self.coordinator.poll()
