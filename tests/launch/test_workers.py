"""What runs inside a local worker: a data loader with workers of its own, and an error that is reported."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from faults.commands import read_lines
from launch.test_inline import records, short
from murmurate.agents.a2c import A2C, A2CAgent
from murmurate.replicator.learner import Context
from murmurate.spec import Batch, Outcome
from short_runs import train
from waiting import until

pytestmark = pytest.mark.timeout(900)


_UPDATES = 5


class LoadingAgent(A2CAgent):
    """Takes a batch from a data loader with two workers before each update, and ends the loader."""

    batches: Iterator[Any] | None = None

    def learn(self, batch: Batch) -> Outcome:
        if self.batches is None:
            self.batches = iter(DataLoader(range(4 * _UPDATES), batch_size=4, num_workers=2))
        assert next(self.batches).tolist() == list(range(4 * self.clock, 4 * self.clock + 4))
        if self.clock == _UPDATES - 1:
            # garbage collection would close the workers' queues first, and then wait 5 s for each of them
            assert next(self.batches, None) is None
        return super().learn(batch)


@dataclasses.dataclass(frozen=True)
class WithLoader(A2C):
    def build(self, context: Context) -> A2CAgent:
        return LoadingAgent(self, context)


@pytest.mark.parametrize("launcher", ["local", "inline"])
def test_a_learner_may_have_a_data_loader_with_workers(launcher: str, tmp_path: Path) -> None:
    run = short(learner=WithLoader(), replicas=2, updates=_UPDATES, launcher=launcher)
    finish = train(run, tmp_path / "run")
    assert (finish.code, finish.summary["exit"]) == (0, "finished")
    assert finish.summary["updates"] >= _UPDATES


@dataclasses.dataclass(frozen=True)
class Breaks(A2C):
    """A2C that can no longer be built once a file is there."""

    file: str = ""

    def build(self, context: Context) -> A2CAgent:
        if Path(self.file).exists():
            raise LookupError("the pictures are gone")
        return super().build(context)


def test_the_last_error_of_a_replica_that_cannot_rejoin_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, file = tmp_path / "run", tmp_path / "gone"
    settings: dict[str, Any] = {"replicas": 2, "updates": None, "env_steps": 10**9, "restarts": 1}
    run = short(learner=Breaks(file=str(file)), launcher="local", **settings)

    def lines() -> list[dict[str, Any]]:
        metrics = folder / "metrics.jsonl"
        return read_lines(metrics) if metrics.exists() else []

    def told(event: str) -> list[dict[str, Any]]:
        return [line for line in lines() if line.get("event") == event]

    def kill_and_interrupt() -> None:
        until(lambda: {0, 1} <= {line["replica"] for line in lines()}, "both to learn")
        file.touch()
        os.kill({r["index"]: r["pid"] for r in read_lines(folder / "roles.jsonl")}[1], signal.SIGKILL)
        until(lambda: len(told("died")) == 2, "the second death")
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=kill_and_interrupt, daemon=True).start()
    finish = train(run, folder)
    assert (finish.code, finish.summary["dead_replicas"]) == (130, [1])
    killed, broke = told("died")
    assert "error" not in killed
    assert broke["error"].startswith("LookupError: the pictures are gone")
    assert "LookupError: the pictures are gone" in broke["message"]
    said = capsys.readouterr().out
    assert broke["message"] in said, said


@pytest.mark.parametrize("launcher", ["local", "inline"])
def test_a_failure_that_ends_the_run_is_kept_among_the_events(launcher: str, tmp_path: Path) -> None:
    learner = dataclasses.replace(short().learner, learning_rate=1e30)
    finish = train(short(learner=learner, launcher=launcher, updates=100), tmp_path / "run")
    assert finish.code == 1
    died = [line for line in records(tmp_path / "run") if line.get("event") == "died"]
    assert finish.summary["exit"] == f"failed: {died[-1]['message']}"
    assert died[-1]["message"] == f"replica {died[-1]['member']}: {died[-1]['error']}"
