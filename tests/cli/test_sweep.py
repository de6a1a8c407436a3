"""``murmurate train --seeds``: one folder, interrupted and continued by the same command, one report."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path

import pytest

from murmurate.cli.main import main
from murmurate.errors import Refusal, RunFailed
from murmurate.native import cores
from murmurate.recipes import recipe
from murmurate.tuning.sweep import Sweep, read_seeds, scores_line, seed_text
from waiting import until

RUN = ["cartpole-a2c", "--launcher", "inline", "--eval-episodes", "1"]


@pytest.mark.parametrize(
    ("text", "seeds"),
    [("0-4", [0, 1, 2, 3, 4]), ("0,3,7", [0, 3, 7]), ("5", [5]), ("7, 2-3,3", [2, 3, 7])],
)
def test_seeds_are_read_and_written(text: str, seeds: list[int]) -> None:
    assert read_seeds(text) == seeds
    assert read_seeds(seed_text(seeds)) == seeds


@pytest.mark.parametrize(
    "text", ["", "a", "3-1", "-1", "0-", "0..4", "1.5", "0-99999", "0-5999,7000-12999", f"{2**63}", "١"]
)
def test_what_are_no_seeds_is_refused(text: str) -> None:
    with pytest.raises(Refusal):
        read_seeds(text)


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        (["--seeds", "0-1", "--seed", "1"], "--seed and --seeds"),
        (["--seeds", "0-1", "--jobs", "0"], "--jobs is 0"),
        (["--jobs", "2"], "--jobs is for several runs"),
        (["--seeds", "0-1", "--dry-run"], "--dry-run is for one run"),
        (["--seeds", "0-1", "--replicas", "0"], "replicas is 0"),
    ],
)
def test_refusals_change_nothing(words: list[str], cause: str, tmp_path: Path, capfd) -> None:
    assert main(["train", *RUN, *words, "--out", str(tmp_path / "x")]) == 2
    assert cause in capfd.readouterr().err
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("command", [["train", "--seeds", "0-1"], ["tune"]])
def test_a_file_is_no_folder_for_runs(command: list[str], tmp_path: Path, capfd) -> None:
    mine = tmp_path / "mine"
    mine.write_text("precious")
    verb, *options = command
    assert main([verb, *RUN, *options, "--out", str(mine)]) == 2
    assert f"{mine} is a file. Choose another with --out." in capfd.readouterr().err
    assert mine.read_text() == "precious"


@pytest.mark.parametrize("command", [["train", "--seeds", "0-1"], ["tune"]])
def test_runs_at_once_do_not_share_the_files_of_a_replay(command: list[str], tmp_path: Path, capfd) -> None:
    verb, *options = command
    words = [verb, "cartpole-dqn", "--replay.folder", str(tmp_path / "there"), "--jobs", "2", *options]
    assert main([*words, "--out", str(tmp_path / "x")]) == 2
    assert "2 runs at once cannot keep their replays in the same files" in capfd.readouterr().err
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("command", [["train", "--seeds", "0-3"], ["tune"]])
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--jobs", "3"], "3 runs at once are 6 processes on 5 cores"),
        (["--jobs", "2", "--strategy", "elastic"], "2 runs at once are 6 processes on 5 cores"),  # its centre
        (["--jobs", "2"], ""),
        (["--jobs", "3", "--launcher", "inline"], ""),
    ],
)
def test_more_processes_than_cores_are_warned_of(
    command: list[str],
    options: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(cores, "usable_cores", lambda: 5)
    mine = tmp_path / "mine"
    mine.write_text("so that nothing is trained")
    verb, *rest = command
    given = [verb, "cartpole-a2c", "--replicas", "2", "--env-steps", "1000", *rest, *options]
    assert main([*given, "--out", str(mine)]) == 2
    said = capfd.readouterr().out
    assert (words in said and "use --jobs" in said) if words else "warning" not in said


def test_the_same_command_continues_an_interrupted_sweep(tmp_path: Path, capfd) -> None:
    folder = tmp_path / "sweep"
    words = [*RUN, "--env-steps", "40000", "--record-every-seconds", "0.2"]  # about two seconds each
    command = ["train", *words, "--seeds", "0,3", "--out", str(folder)]

    def interrupt() -> None:
        until(lambda: (folder / "seed-0" / "metrics.jsonl").exists(), "the first record of seed 0")
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    assert main(command) == 130
    out = capfd.readouterr().out
    assert "Go on with: murmurate train cartpole-a2c" in out
    assert _summary(folder / "seed-0")["exit"] == "interrupted"
    assert not (folder / "seed-3").exists()

    assert main(command) == 0
    out = capfd.readouterr().out
    assert f"seed 0: murmurate resume {folder}/seed-0" in out
    scores = [_summary(folder / name)["eval_return_mean"] for name in ("seed-0", "seed-3")]
    assert [_summary(folder / name)["exit"] for name in ("seed-0", "seed-3")] == ["finished"] * 2
    assert [_summary(folder / name)["seed"] for name in ("seed-0", "seed-3")] == [0, 3]
    assert "eval_return_mean of 2 runs: mean " in out
    page = (folder / "report.html").read_text()
    data = json.loads(page.split('id="data">')[1].split("</script>")[0])
    assert [run["eval_return_mean"] for run in data["runs"]] == scores

    # finished seeds are kept as they are, and other settings are refused
    before = (folder / "seed-0" / "metrics.jsonl").stat().st_mtime_ns
    assert main(command) == 0
    assert "finished before: seeds 0,3" in capfd.readouterr().out
    assert (folder / "seed-0" / "metrics.jsonl").stat().st_mtime_ns == before
    # fewer seeds: the report is of all that the folder has
    assert main([*command[:-4], "--seeds", "0", *command[-2:]]) == 0
    assert "eval_return_mean of 2 runs: mean " in capfd.readouterr().out
    page = (folder / "report.html").read_text()
    data = json.loads(page.split('id="data">')[1].split("</script>")[0])
    assert [run["eval_return_mean"] for run in data["runs"]] == scores
    assert main(["train", *RUN, "--seeds", "0,3", "--out", str(folder)]) == 2
    assert "another env_steps" in capfd.readouterr().err


def _summary(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text())


def test_a_report_that_cannot_be_made_is_no_refusal_of_the_finished_sweep(tmp_path: Path) -> None:
    sweep = Sweep(recipe("cartpole-a2c"), ["train", *RUN], [0], tmp_path)
    sweep._claim()
    (tmp_path / "seed-0").mkdir()
    (tmp_path / "seed-0" / "summary.json").write_text('{"exit": "finished"}')
    with pytest.raises(RunFailed, match=rf"Try again: murmurate report {tmp_path}\. The cause: .* no run"):
        sweep.train()


def test_intervals_are_printed_from_five_runs_on() -> None:
    """Of two runs such an interval is from the least to the greatest."""
    summaries = [{"eval_return_mean": float(score)} for score in (1, 2, 3, 4, 5)]
    run = recipe("cartpole-a2c")
    assert scores_line(summaries[:4], run) == "eval_return_mean of 4 runs: mean 2.5, interquartile mean 2.5"
    assert "mean 3 (95% bootstrap interval 1" in scores_line(summaries, run)


def test_seeds_of_data_sets_are_compared_by_their_figure_of_the_test() -> None:
    summaries = [{"accuracy": 0.5, "validation_accuracy": 0.75}]
    assert scores_line(summaries, recipe("fashion-resnet20")).startswith("accuracy of 1 run: mean 0.5")


def test_a_sweep_whose_runs_failed_at_once_is_not_said_to_have_none(tmp_path: Path, capfd) -> None:
    sweep = Sweep(recipe("cartpole-a2c"), ["train", *RUN], [0], tmp_path)
    sweep._claim()
    (tmp_path / "seed-0").mkdir()
    (tmp_path / "seed-0" / "metrics.jsonl").touch()
    assert main(["report", str(tmp_path)]) == 2
    assert f"The sweep in {tmp_path} has no run with records." in capfd.readouterr().err
