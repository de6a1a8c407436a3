"""What the coordinator does in time: checkpoints that are due or hang, and evaluations that fail."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from evaluated_runs import Timed

from murmurate.fabric.processes.run_state import RunState
from murmurate.recipes import recipe
from murmurate.training import checkpoint, coordinator
from murmurate.training.coordinator import Coordinator
from murmurate.training.evaluator import Evaluated, Snapshot
from murmurate.training.run_folder import claim


def test_a_checkpoint_is_due_by_time_too_and_rarer_where_saving_takes_long(tmp_path: Path) -> None:
    timed = Timed(tmp_path / "run", checkpoint_every_seconds=60.0, evaluate_every_env_steps=0)
    requested = lambda: timed.run_state.checkpoint_requested  # noqa: E731
    for timed.now, number in ((59.0, 0), (61.0, 1)):
        timed.coordinator.poll()
        assert requested() == number
    timed.save(seconds=0.5)
    for timed.now, number in ((120.0, 1), (122.0, 2)):
        timed.coordinator.poll()
        assert requested() == number
    timed.save(seconds=10.0, waited=30.0)  # so that the next comes after 200 s: to wait costs nothing
    for timed.now, number in ((361.0, 2), (363.0, 3)):
        timed.coordinator.poll()
        assert requested() == number
    assert (tmp_path / "run" / "checkpoints" / "last" / "state.json").exists()
    timed.coordinator.close()


def test_none_is_due_by_time_if_none_is_asked_for(tmp_path: Path) -> None:
    timed = Timed(tmp_path / "run", checkpoint_every_seconds=None, evaluate_every_env_steps=0)
    timed.now = 1e9
    timed.coordinator.poll()
    assert timed.run_state.checkpoint_requested == 0
    timed.coordinator.close()


def test_under_inline_the_clock_decides_nothing(tmp_path: Path) -> None:
    timed = Timed(tmp_path / "run", in_process=True, checkpoint_every_seconds=60.0)
    timed.now = 1e9
    timed.coordinator.poll()
    assert timed.run_state.checkpoint_requested == 0
    timed.coordinator.close()


def test_an_evaluation_that_fails_is_an_event_and_the_run_goes_on(tmp_path: Path) -> None:
    timed = Timed(tmp_path / "run", evaluate_every_env_steps=100)
    timed.run_state.advance(0, 120, 6)
    timed.coordinator.evaluator._in_process = True
    timed.coordinator.poll()
    assert timed.run_state.is_snapshot(timed.run_state.checkpoint_requested)
    timed.save()  # parts that are of no run
    (event,) = timed.coordinator.events
    assert event["event"] == "evaluation failed"
    assert "the run goes on" in event["message"]
    assert not (tmp_path / "run" / "checkpoints" / "last").exists()
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []
    timed.run_state.advance(0, 220, 11)
    timed.coordinator.poll()
    assert timed.run_state.checkpoint_requested == 2, "the next one is due at 200"
    timed.coordinator.close()


def test_a_folder_that_moves_during_an_evaluation_keeps_the_best_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed = Timed(tmp_path / "run", evaluate_every_env_steps=100)
    evaluator, begun = timed.coordinator.evaluator, list[Snapshot]()
    monkeypatch.setattr(evaluator, "begin", begun.append)
    timed.run_state.advance(0, 120, 6)
    timed.coordinator.poll()
    timed.save()
    (snapshot,) = begun
    moved = (tmp_path / "run").rename(tmp_path / "elsewhere")
    ended = Evaluated(snapshot, 1.0, {"eval_return_mean": 9.0, "episodes": 2})
    monkeypatch.setattr(evaluator, "poll", lambda: ended)
    timed.coordinator.poll()
    assert checkpoint.read_manifest(moved / "checkpoints" / "best")["score"] == 9.0
    assert list((moved / "checkpoints").glob(".staging*")) == []
    timed.coordinator.close()


def test_a_checkpoint_that_hangs_is_given_up_and_another_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = dataclasses.replace(recipe("cartpole-gala"), replicas=2, checkpoint_every_env_steps=100)
    claim(tmp_path / "run")
    run_state = RunState(2)
    run_state.open()
    watcher = Coordinator(run, tmp_path / "run", run_state, started_at=0.0)
    run_state.advance(0, 150, 1)
    watcher.poll()
    assert run_state.checkpoint_requested == 1
    run_state.mark_saved(0, 1)
    run_state.advance(0, 250, 2)
    watcher.poll()
    assert run_state.checkpoint_requested == 1  # replica 1 still has time
    monkeypatch.setattr(coordinator, "_CHECKPOINT_DEADLINE_SECONDS", -1.0)
    watcher.poll()
    assert run_state.checkpoint_requested == 2
    assert [e["event"] for e in watcher.events] == ["warning"]
    watcher.close()
