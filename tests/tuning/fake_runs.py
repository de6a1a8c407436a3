"""Trials of which a test says what they return: they only write their files."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from murmurate.cli.options import change
from murmurate.training.run import Run
from murmurate.tuning.space import Dimension

SPACE = [Dimension("agent.learning-rate", 1e-4, 1e-2, log=True), Dimension("agent.steps", choices=("4", "8"))]
WORDS = ["train", "cartpole-a2c", "--env-steps", "1000"]


class FakeRun:
    """A run of which a function of its learning rate says the return at each tenth, and the exit code.

    It finishes with exit code 0, or if it has a return at every tenth."""

    def __init__(self, words: Sequence[str], output: Path, threads: int | None, script: Callable) -> None:
        self.words, self.folder = list(words), Path(words[words.index("--out") + 1])
        self.returns, self.exit_code = script(float(words[words.index("--agent.learning-rate") + 1]))
        self.folder.mkdir()
        output.write_text(
            "murmurate: failed: the loss of replica 0 is nan\nmurmurate: warning: a thread is left\n"
            "The run is in trial-0000 - next: murmurate report trial-0000\n"
        )
        self._at = 0
        self.signalled = 0

    def code(self) -> int | None:
        if self.signalled:
            return 128 + self.signalled
        if self._at == len(self.returns):
            if self.exit_code == 0 or len(self.returns) == 10:
                facts = {"exit": "finished", "eval_return_mean": self.returns[-1], "seed": 0}
                (self.folder / "summary.json").write_text(json.dumps(facts))
            return self.exit_code
        self._at += 1
        record = {
            "time_seconds": float(self._at),
            "env_steps": 100 * self._at,
            "updates": self._at,
            "return_mean": self.returns[self._at - 1],
            "replica": 0,
        }
        with (self.folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(record, separators=(",", ":")) + "\n")
        return None

    def signal(self, number: int) -> None:
        self.signalled = number

    def end(self) -> None:
        pass


def with_options(run: Run, words: Sequence[str]) -> Run:
    return change(run, words, "murmurate tune")


def rising(rate: float) -> tuple[list[float], int]:
    return [1e4 * rate * share / 10 for share in range(1, 11)], 0
