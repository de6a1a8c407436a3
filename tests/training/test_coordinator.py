"""The launcher's side of checkpoints: when one is asked for, and which are committed."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import a_run

from murmurate.errors import RunFailed
from murmurate.fabric.processes.run_state import RunState
from murmurate.training import checkpoint
from murmurate.training.checkpoint import write_part
from murmurate.training.coordinator import Coordinator
from murmurate.training.evaluator import best_mean
from murmurate.training.worker_context import FINAL, FINAL_REQUEST, Resume, staging


@pytest.fixture
def coordinator(tmp_path: Path) -> Any:
    (tmp_path / "checkpoints").mkdir()
    run_state = RunState(2)
    run_state.open()
    made = Coordinator(a_run("gala", checkpoint_every_env_steps=100), tmp_path, run_state, time.monotonic())
    yield made
    made.close()


def _part(coordinator: Coordinator, name: str, rank: int, steps: int) -> None:
    write_part(staging(coordinator.folder, name), rank, {"env_steps": steps, "x": torch.ones(1) * steps})


@pytest.mark.parametrize("survivor", ["centre", "replica"])
def test_what_no_run_could_be_resumed_from_is_not_committed(survivor: str, tmp_path: Path) -> None:
    """All replicas, or the centre, die while a checkpoint is being written."""
    (tmp_path / "checkpoints").mkdir()
    run_state = RunState(2)
    run_state.open()
    run = a_run("parameter-server", replicas=1, checkpoint_every_env_steps=100)
    coordinator = Coordinator(run, tmp_path, run_state, time.monotonic())
    run_state.advance(0, 110, 11)
    coordinator.poll()
    rank, other = (1, 0) if survivor == "centre" else (0, 1)
    for name in ("1", FINAL):
        _part(coordinator, name, rank, 110)
    run_state.mark_saved(rank, 1)
    run_state.mark_dead(other)
    coordinator.poll()
    assert not coordinator.commit_final()
    assert not (coordinator.checkpoints / "last").exists()
    _part(coordinator, FINAL, other, 110)
    assert coordinator.commit_final()
    coordinator.close()


def test_a_checkpoint_is_asked_for_when_due_and_committed_when_whole(coordinator: Coordinator) -> None:
    run_state, last = coordinator.run_state, coordinator.checkpoints / "last"
    run_state.advance(0, 60, 6)
    coordinator.poll()
    assert run_state.checkpoint_requested == 0
    run_state.advance(1, 50, 5)
    coordinator.poll()
    assert run_state.checkpoint_requested == 1
    _part(coordinator, "1", 0, 70)
    run_state.mark_saved(0, 1)
    coordinator.poll()
    assert not last.exists(), "one part is missing"
    _part(coordinator, "1", 1, 50)
    run_state.mark_saved(1, 1)
    run_state.advance(0, 99, 9)  # further on by now
    coordinator.poll()
    manifest = checkpoint.read_manifest(last)
    # what was saved counts, not how far they have come since
    assert (manifest["env_steps"], manifest["replica_env_steps"]) == (120, [70, 50])
    coordinator.poll()
    assert run_state.checkpoint_requested == 1, "the next one is due at 200"


def test_a_dead_replica_holds_no_checkpoint_up_and_keeps_its_count(coordinator: Coordinator) -> None:
    run_state = coordinator.run_state
    run_state.advance(0, 70, 7)
    run_state.advance(1, 50, 5)
    coordinator.poll()
    _part(coordinator, "1", 0, 80)
    run_state.mark_saved(0, 1)
    coordinator.died(1, "SIGKILL")
    coordinator.died(1, "LookupError: gone", "LookupError: gone")  # started again, and not let in yet
    coordinator.poll()
    manifest = checkpoint.read_manifest(coordinator.checkpoints / "last")
    assert (manifest["replica_env_steps"], manifest["dead"], manifest["living"]) == ([80, 50], [1], [0])
    assert [(e["event"], e.get("error")) for e in coordinator.events] == [
        ("died", None),
        ("died", "LookupError: gone"),
        ("checkpoint", None),
    ]
    lines = [json.loads(line) for line in (coordinator.folder / "metrics.jsonl").read_text().splitlines()]
    assert {line["updates"] for line in lines if line.get("event") == "died"} == {7}  # the most of a replica


def test_one_that_ended_before_it_was_asked_takes_part_with_its_last_state(coordinator: Coordinator) -> None:
    run_state = coordinator.run_state
    run_state.advance(0, 70, 7)
    run_state.advance(1, 50, 5)
    coordinator.poll()
    _part(coordinator, FINAL, 1, 50)
    run_state.mark_saved(1, FINAL_REQUEST)
    _part(coordinator, "1", 0, 80)
    run_state.mark_saved(0, 1)
    coordinator.poll()
    last = coordinator.checkpoints / "last"
    assert checkpoint.parts(last) == [0, 1]
    assert checkpoint.read_part(last, 1)["x"].item() == 50
    # and its part is still there for the end
    _part(coordinator, FINAL, 0, 90)
    assert coordinator.commit_final()
    assert checkpoint.read_manifest(last)["replica_env_steps"] == [90, 50]


def test_a_checkpoint_asked_for_when_all_had_ended_is_the_final_one(coordinator: Coordinator) -> None:
    run_state = coordinator.run_state
    run_state.advance(0, 70, 7)
    run_state.advance(1, 50, 5)
    coordinator.poll()
    assert run_state.checkpoint_requested == 1
    for rank, steps in ((0, 70), (1, 50)):
        _part(coordinator, FINAL, rank, steps)
        run_state.mark_saved(rank, FINAL_REQUEST)
    coordinator.poll()
    assert not (coordinator.checkpoints / "last").exists()
    assert coordinator.commit_final()
    assert checkpoint.read_manifest(coordinator.checkpoints / "last")["env_steps"] == 120


def test_parts_of_a_checkpoint_that_was_never_whole_are_cleared_at_the_next_start(
    coordinator: Coordinator, tmp_path: Path
) -> None:
    _part(coordinator, "3", 0, 1)
    again = Coordinator(coordinator.run, tmp_path, coordinator.run_state, time.monotonic())
    assert list((tmp_path / "checkpoints").iterdir()) == []
    again.close()


def test_the_best_checkpoint_is_that_of_the_best_hundred_returns_or_else_the_newest(
    coordinator: Coordinator,
) -> None:
    """Where a success ends an episode, the first few that end are successes."""
    best = coordinator.checkpoints / "best"

    def kept(number: int, *returns: float) -> int | None:
        """The checkpoint that is the best after ``number``, before which these episodes ended."""
        coordinator.returns.extend(returns)
        for rank in range(2):
            _part(coordinator, str(number), rank, number)
        coordinator._commit(str(number))
        return checkpoint.read_manifest(best)["env_steps"] // 2 if best.exists() else None

    assert kept(1) is None
    assert kept(2, 1.0) == 2
    assert kept(3, 0.0) == 3
    assert kept(4, *[0.5] * 98) == 4
    assert kept(5, *[0.0] * 50) == 4
    assert kept(6, *[0.9] * 100) == 6
    assert kept(7, *[0.8] * 100) == 6
    assert best_mean(coordinator.checkpoints) == pytest.approx(0.9)


def test_a_best_checkpoint_that_was_set_aside_is_back_at_the_next_start(
    coordinator: Coordinator, tmp_path: Path
) -> None:
    (tmp_path / "checkpoints" / ".old-best").mkdir()
    Coordinator(coordinator.run, tmp_path, coordinator.run_state, time.monotonic()).close()
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["best"]


def test_after_a_resume_the_next_checkpoint_is_due_where_it_would_have_been(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    run_state = RunState(2)
    run_state.open()
    resume = Resume(tmp_path / "last", {0: 0, 1: 1}, {"env_steps": 250, "best": None}, 3.0)
    run = a_run("gala", checkpoint_every_env_steps=100)
    coordinator = Coordinator(run, tmp_path, run_state, time.monotonic(), resume)
    assert coordinator.recorder.seconds >= 3.0
    run_state.advance(0, 260, 26)
    coordinator.poll()
    assert run_state.checkpoint_requested == 0
    run_state.advance(0, 300, 30)
    coordinator.poll()
    assert run_state.checkpoint_requested == 1
    coordinator.close()


def test_a_disk_that_takes_no_event_files_is_a_failure_and_closing_is_not(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(coordinator.tensorboard, "feed", full)
    monkeypatch.setattr(coordinator.tensorboard, "close", full)
    with pytest.raises(RunFailed, match="is full"):
        coordinator.poll()
    coordinator.close()


def test_a_stop_counts_also_while_members_end_for_a_new_epoch(coordinator: Coordinator) -> None:
    coordinator.run_state.request_stop()
    coordinator.stop("a callback has had enough")
    coordinator.stop("another reason")
    assert coordinator.stopped_because == "a callback has had enough"
