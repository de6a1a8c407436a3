"""Evaluations while a run learns."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import shutil
import time
from pathlib import Path
from typing import cast

import gymnasium
import pytest
import torch
from evaluated_runs import STEPS, Timed, a_run, evaluations

from murmurate import load
from murmurate.cli.main import main
from murmurate.fabric.processes.run_state import RunState
from murmurate.recipes import stored
from murmurate.spec import derive_seed
from murmurate.training import checkpoint, coordinator
from murmurate.training.checkpoint import write_part
from murmurate.training.coordinator import Coordinator
from murmurate.training.evaluate import evaluate_folder, figures
from murmurate.training.evaluator import Evaluated, Evaluator, Snapshot
from murmurate.training.worker_context import Resume, staging
from short_runs import altered, resume, train
from waiting import until


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run that was evaluated while it learned, and what its console showed."""
    folder = tmp_path_factory.mktemp("evaluated") / "run"
    with contextlib.redirect_stdout(io.StringIO()) as console:
        assert train(a_run(), folder).code == 0
    return folder, console.getvalue()


@pytest.fixture(scope="module")
def evaluated(shown: tuple[Path, str]) -> Path:
    return shown[0]


def test_a_run_is_evaluated_at_every_multiple_and_records_it(evaluated: Path) -> None:
    records = evaluations(evaluated)
    assert len(records) >= 3
    every, ordered = 15 * STEPS, [record["env_steps"] for record in records]
    assert ordered == sorted(ordered)
    assert all(record["env_steps"] % every <= STEPS for record in records), "at the next common round"
    assert [record["env_steps"] // every for record in records] == list(range(1, len(records) + 1))
    for record in records:
        assert record["replica"] is None
        assert record["updates"] * STEPS == record["env_steps"]
        assert len(record["returns"]) == record["episodes"] == 2
        assert record["eval_return_mean"] == pytest.approx(sum(record["returns"]) / 2)
        assert record["time_seconds"] >= record["snapshot_seconds"]
        assert "best_eval_return_mean" not in record
    summary = json.loads((evaluated / "summary.json").read_text())
    assert summary["exit"] == "finished"
    assert "kind" not in summary
    assert list((evaluated / "checkpoints").glob(".staging*")) == []


def test_the_best_checkpoint_is_the_snapshot_with_the_best_evaluation(evaluated: Path) -> None:
    best = evaluated / "checkpoints" / "best"
    records = evaluations(evaluated)
    highest = max(records, key=lambda record: record["eval_return_mean"])
    manifest = checkpoint.read_manifest(best)
    assert (manifest["score"], manifest["env_steps"]) == (highest["eval_return_mean"], highest["env_steps"])
    run = stored(evaluated)
    again = figures(run, best, seed=derive_seed(run.seed, "evaluation while training"))
    assert again["returns"] == highest["returns"]
    assert "source" not in checkpoint.read_part(best, 0), "a snapshot holds nothing of the source"
    assert main(["eval", str(evaluated), "--best", "--episodes", "1", "--json"]) == 0


def test_evaluating_changes_nothing_that_is_learned(evaluated: Path, tmp_path: Path) -> None:
    without = tmp_path / "run"
    train(a_run(evaluate_every_env_steps=0), without)
    assert evaluations(without) == []
    for rank in (0, 1):
        one, other = (
            checkpoint.read_part(folder / "checkpoints" / "last", rank)["replicas"]["a2c"]["replica"][
                "params"
            ]
            for folder in (evaluated, without)
        )
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_console_and_report_show_it(shown: tuple[Path, str], tmp_path: Path) -> None:
    folder, said = shown
    page = tmp_path / "report.html"
    assert main(["report", str(folder), "--out", str(page)]) == 0
    text = page.read_text()
    assert "Evaluation return while it learned" in text
    assert "lowest to highest game" in text
    first = evaluations(folder)[0]
    line = f"at {first['env_steps']:,} env steps: Evaluation over 2 games: {first['eval_return_mean']:.2f}"
    assert line in said


@pytest.mark.parametrize("strategy", ["gala", "parameter-server"])
def test_under_every_kind_of_strategy(strategy: str, tmp_path: Path) -> None:
    """And all-reduce in the tests before."""
    assert train(a_run(strategy, updates=32), tmp_path / "run").code == 0
    assert len(evaluations(tmp_path / "run")) >= 1


def test_figures_of_test_data_are_recorded_and_choose_nothing(tmp_path: Path) -> None:
    rows = tmp_path / "rows.csv"
    drawn = torch.randn(400, 2, generator=torch.Generator().manual_seed(0))
    rows.write_text("".join(f"{x:.4f},{y:.4f}\n" for x, y in drawn.tolist()))
    folder = tmp_path / "run"
    arguments = ["--world.path", str(rows), "--launcher", "inline", "--updates", "80", "--out", str(folder)]
    assert main(["train", "table-gmm", *arguments, "--evaluate-every-env-steps", "100"]) == 0
    assert evaluations(folder)
    for record in evaluations(folder):
        assert record["log_likelihood"] < 0 < record["log_likelihood_stderr"]
    assert not (folder / "checkpoints" / "best").exists()
    assert main(["report", str(folder), "--out", str(tmp_path / "page.html")]) == 0
    assert "Log-likelihood of the test rows while it learned" in (tmp_path / "page.html").read_text()


def test_a_confusion_matrix_is_in_no_record(tmp_path: Path) -> None:
    """It has up to 10,000 numbers, and the one of the run's end is in its summary."""
    found = {"accuracy": 0.5, "class_recall": [1, 0], "confusion": [[1, 0], [1, 0]]}
    record = Evaluated(Snapshot(tmp_path, 100, 10, 1.0), 2.0, found).record("", "100 images")
    assert record["class_recall"] == [1, 0]
    assert "confusion" not in record


def test_checkpoints_and_evaluations_that_are_always_due_are_made_in_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a learner makes more env steps while a checkpoint is saved than are between two."""
    timed = Timed(tmp_path / "run", evaluate_every_env_steps=10, checkpoint_every_env_steps=10)
    run_state, evaluator = timed.run_state, timed.coordinator.evaluator
    monkeypatch.setattr(evaluator, "begin", lambda snapshot: evaluator.begin_at(snapshot.env_steps))
    are_snapshots = []
    for step in range(1, 7):
        run_state.advance(0, 1000 * step, step)
        timed.coordinator.poll()
        number = run_state.checkpoint_requested
        are_snapshots.append(run_state.is_snapshot(number))
        for rank in range(2):
            state = {"env_steps": 50, "updates": 5, "x": torch.ones(1)}
            write_part(staging(timed.coordinator.folder, str(number)), rank, state)
            run_state.mark_saved(rank, number)
    timed.coordinator.close()
    assert are_snapshots == [False, True] * 3


def test_after_a_resume_a_worse_snapshot_does_not_replace_the_best(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    train(a_run(updates=31), folder)
    best = folder / "checkpoints" / "best"
    manifest = json.loads((best / "state.json").read_text())
    checkpoint.keep_as_best(best.parent, best.parent / "last", score=1e6)
    resume(folder, lambda run: dataclasses.replace(run, updates=62))
    assert checkpoint.read_manifest(best)["score"] == 1e6
    assert [record["env_steps"] // (15 * STEPS) for record in evaluations(folder)] == [1, 2, 3, 4]
    assert manifest["score"] < 1e6


def test_a_crash_while_the_best_is_replaced_costs_neither_it_nor_its_score(
    evaluated: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(evaluated, folder)
    checkpoints = folder / "checkpoints"
    # the run is too short for a mean of 100 returns
    checkpoint.keep_as_best(checkpoints, checkpoints / "last", score=5.0, best=20.0)
    best = checkpoint.read_manifest(checkpoints / "best")
    (checkpoints / "best").rename(checkpoints / ".old-best")  # between the two renames of ``keep_as_best``
    assert evaluate_folder(a_run(), folder, which="best", count=1)["episodes"] == 1
    assert load(folder, best=True).folder == folder
    run_state = RunState(2)
    run_state.open()
    manifest = checkpoint.read_manifest(checkpoints / "last") | {"best": best["best"] + 100}
    again = Coordinator(a_run(), folder, run_state, 0.0, Resume(checkpoints / "last", {}, manifest, 0.0))
    assert again.best_score == best["score"]
    assert again.best == best["best"], "the newest checkpoint counts a mean that was not kept"
    again.close()


def test_an_evaluation_that_a_kill_cut_is_made_after_the_resume(evaluated: Path, tmp_path: Path) -> None:
    last = evaluated / "checkpoints" / "last"
    manifest = checkpoint.read_manifest(last)
    assert manifest["evaluated_env_steps"] == evaluations(evaluated)[-1]["env_steps"]
    (tmp_path / "checkpoints").mkdir()
    # at 1,250 env steps the evaluation of 1,200 was not complete; an earlier folder does not say so
    for known, snapshots in (({"evaluated_env_steps": 1_100}, 1), ({}, 0)):
        run_state = RunState(2)
        run_state.open()
        run_state.advance(0, 1_250, 60)
        resumed = Resume(last, {0: 0, 1: 1}, {"env_steps": 1_250, "best": None, **known}, 3.0)
        run = a_run(evaluate_every_env_steps=200)
        coordinator = Coordinator(run, tmp_path, run_state, time.monotonic(), resumed)
        coordinator.poll()
        assert run_state.checkpoint_requested == snapshots
        coordinator.close()


# -- the process -----------------------------------------------------------------------------------------


@pytest.fixture
def snapshot(evaluated: Path) -> Snapshot:
    return Snapshot(evaluated / "checkpoints" / "last", 100, 10, 1.0)


def _end(evaluator: Evaluator) -> Evaluated:
    return cast(Evaluated, until(lambda: evaluator.poll(0.1), "the evaluation's end"))


def test_a_process_of_its_own_has_the_same_figures(evaluated: Path, snapshot: Snapshot) -> None:
    run = stored(evaluated)
    evaluator = Evaluator(run, in_process=False)
    evaluator.begin(snapshot)
    assert evaluator.is_busy
    assert not evaluator.is_due(10**9), "one at a time"
    ended = _end(evaluator)
    assert ended.failure == ""
    expected = figures(run, snapshot.folder, seed=derive_seed(run.seed, "evaluation while training"))
    assert ended.figures == {k: v for k, v in expected.items() if k != "best_eval_return_mean"}
    assert not evaluator.is_busy


def test_the_run_survives_an_evaluator_that_is_killed_or_fails(evaluated: Path, tmp_path: Path) -> None:
    run = stored(evaluated)
    evaluator = Evaluator(altered(run, eval_episodes=10**6), in_process=False)
    evaluator.begin(Snapshot(evaluated / "checkpoints" / "last", 100, 10, 1.0))
    assert evaluator._workers is not None
    evaluator._workers.by_rank[0].kill("SIGKILL")
    assert _end(evaluator).failure == "SIGKILL"
    for in_process in (True, False):
        evaluator = Evaluator(run, in_process)
        evaluator.begin(Snapshot(tmp_path / "checkpoints" / "none", 100, 10, 1.0))
        assert "does not fit this run" in _end(evaluator).failure


def test_an_evaluation_that_hangs_does_not_hold_up_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot: Snapshot
) -> None:
    monkeypatch.setattr(coordinator, "_EVALUATION_DEADLINE_SECONDS", 0.05)
    timed = Timed(tmp_path / "run", evaluate_every_env_steps=100)
    endless = altered(timed.coordinator.run, eval_episodes=10**6)
    timed.coordinator.evaluator.run = endless
    timed.coordinator.evaluator.begin(snapshot)
    for rank in (0, 1):
        state = {"env_steps": 50, "updates": 5, "x": torch.ones(1)}
        write_part(staging(timed.coordinator.folder, "final"), rank, state)
    assert timed.coordinator.commit_final()
    assert [event["event"] for event in timed.coordinator.events] == ["checkpoint", "evaluation failed"]
    assert not timed.coordinator.evaluator.is_busy
    timed.coordinator.close()


def test_an_evaluation_goes_on_in_the_next_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timed = Timed(tmp_path / "run", evaluate_every_env_steps=100)
    coordinator = timed.coordinator
    monkeypatch.setattr(coordinator.evaluator, "poll", lambda **_: pytest.fail("waited for"))
    monkeypatch.setattr(Evaluator, "is_busy", True)
    snapshot, old = staging(coordinator.folder, "evaluated"), staging(coordinator.folder, "1")
    for folder in (snapshot, old, staging(coordinator.folder, "final")):
        write_part(folder, 0, {"env_steps": 50, "updates": 5, "x": torch.ones(1)})
    assert coordinator.commit_final(goes_on=True)
    assert snapshot.exists()
    assert not old.exists()
    coordinator.close()


@pytest.mark.parametrize("actions", [[], ["--sample"]], ids=["greedy", "sampled"])
def test_a_video_shows_an_evaluated_game_in_its_own_time(
    evaluated: Path, actions: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    ffmpeg = pytest.importorskip("imageio_ffmpeg")
    pytest.importorskip("pygame")
    assert main(["eval", str(evaluated), "--episodes", "1", "--video", "--json", *actions]) == 0
    result = json.loads(capsys.readouterr().out)
    frames, seconds = ffmpeg.count_frames_and_secs(result["video"])
    assert frames == result["returns"][0]  # a reward of 1 for each step
    assert seconds == pytest.approx(frames / 50)  # CartPole's own rate
    assert (evaluated / "videos" / "frames.png").stat().st_size > 1_000


def test_a_world_without_pictures_is_refused_before_its_games_are_played(
    evaluated: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("imageio_ffmpeg")

    def draw(*_: object) -> None:
        raise gymnasium.error.DependencyNotInstalled("pygame")

    monkeypatch.setattr("gymnasium.envs.classic_control.CartPoleEnv.render", draw)
    monkeypatch.setattr("murmurate.training.evaluate.figures", lambda *_, **__: pytest.fail("played"))
    assert main(["eval", str(evaluated), "--video"]) == 2
    assert "needs the package pygame-ce, which is not installed" in capsys.readouterr().err


def test_a_video_that_does_not_fit_on_the_disk_is_not_kept(
    evaluated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ffmpeg = pytest.importorskip("imageio_ffmpeg")
    pytest.importorskip("pygame")
    encoder = tmp_path / "encoder"
    encoder.write_text("#!/bin/sh\ncat > /dev/null\necho 'No space left' >&2\nexit 1\n")
    encoder.chmod(0o755)
    monkeypatch.setattr(ffmpeg, "get_ffmpeg_exe", lambda: str(encoder))
    video = evaluated / "videos" / "episode.mp4"
    video.parent.mkdir(exist_ok=True)
    video.write_text("an earlier one")
    assert main(["eval", str(evaluated), "--episodes", "1", "--video"]) == 1
    assert f"murmurate: {video} cannot be written: No space left. " in capsys.readouterr().err
    assert video.read_text() == "an earlier one"
