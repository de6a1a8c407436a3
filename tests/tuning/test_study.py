"""Studies of runs that only write their files: pruning, failures, going on; and a real one, killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from fake_runs import SPACE, rising

from murmurate.cli.main import main
from murmurate.errors import Refusal, RunFailed
from murmurate.record.stored import read_object, write_json
from murmurate.tuning.objective import Objective
from murmurate.tuning.page import _importances
from murmurate.tuning.space import Dimension
from murmurate.tuning.trials import Trials
from waiting import until

pytest.importorskip("optuna")


def test_the_best_is_printed_as_a_command_and_the_page_has_every_trial(made) -> None:
    study, said, runs = made(rising, page=True, pruner="none")
    assert study.tune() == 0
    rates = [float(run.words[run.words.index("--agent.learning-rate") + 1]) for run in runs]
    assert len(set(rates)) == len(rates) == 8
    assert all(1e-4 <= rate <= 1e-2 for rate in rates)
    best = max(rates)
    assert f"murmurate train cartpole-a2c --env-steps 1000 --agent.learning-rate {best!r}" in said[-1]
    page = (study.folder / "report.html").read_text()
    data = json.loads(page.split('id="data">')[1].split("</script>")[0])
    assert [trial["params"]["agent.learning-rate"] for trial in data["trials"]] == rates
    assert 'src="http' not in page
    (study.folder / "report.html").unlink()
    assert main(["report", str(study.folder)]) == 0
    assert (study.folder / "report.html").read_text() == page
    assert "parallel coordinates" in page


def test_the_pruner_counts_tenths_of_a_budget_that_is_searched(made) -> None:
    space = [*SPACE, Dimension("env-steps", choices=("500",))]
    study, _, runs = made(rising, pruner="none", trials=1, space=space)
    assert study.tune() == 0
    (trial,) = study._trials.all()
    # the run writes a return every 100 env steps, so that each is a fifth of the budget
    assert trial.intermediate_values[10] == runs[0].returns[4]


def test_a_pruner_ends_what_is_worse_than_the_median(made) -> None:
    study, _, runs = made(rising, page=True, trials=12)
    assert study.tune() == 0
    finished: list[float] = []
    for run in runs:
        # the pruner waits for five to compare with, and for the third tenth
        is_worse = len(finished) >= 5 and run.returns[-1] < statistics.median(finished)
        assert (run.signalled, run._at) == ((signal.SIGINT, 3) if is_worse else (0, 10))
        if not is_worse:
            finished.append(run.returns[-1])
    assert len(finished) < 12
    states = [trial.state.name for trial in study._trials.all()]
    assert states == ["PRUNED" if run.signalled else "COMPLETE" for run in runs]


def test_failed_trials_are_kept_and_a_study_of_failures_ends(made) -> None:
    study, said, runs = made(lambda rate: ([1.0], 0 if rate < 3e-3 else 1), page=True, pruner="none")
    assert study.tune() == 0
    bad = [run for run in runs if run.exit_code]
    assert bad
    assert sum("failed: the loss of replica 0 is nan" in line for line in said) == len(bad)
    assert len(runs) == 8


@pytest.mark.parametrize("code", [-2, -15, 1])
def test_a_trial_whose_run_finished_counts_whatever_its_exit_code(made, code: int) -> None:
    study, _, runs = made(lambda rate: (rising(rate)[0], code), trials=2, pruner="none")
    assert study.tune() == 0
    assert study._trials.values() == [run.returns[-1] for run in runs]
    assert len(runs) == 2


@pytest.mark.parametrize("code", [-2, -15, 130, 143])
def test_a_trial_that_a_signal_ended_is_tried_again(made, code: int) -> None:
    codes = iter([code])
    study, said, runs = made(lambda rate: ([1.0], next(codes, 0)), trials=1, pruner="none")
    assert study.tune() == 0
    assert [run.folder.name for run in runs] == ["trial-0000"] * 2
    assert [trial.state.name for trial in study._trials.all()] == ["COMPLETE"]
    assert not any("failed" in line for line in said)


def test_a_database_that_fails_ends_the_study_in_a_sentence(made, tmp_path: Path) -> None:
    def spoilt(rate: float) -> tuple[list[float], int]:
        with contextlib.closing(sqlite3.connect(tmp_path / "study" / "study.db")) as database:
            database.execute("DROP TABLE trial_intermediate_values")
        return rising(rate)

    study, _, _ = made(spoilt)
    with pytest.raises(RunFailed, match=r"study\.db cannot be used: no such table.* the same command"):
        study.tune()


def test_three_failures_at_the_start_end_the_study(made) -> None:
    study, _, runs = made(lambda rate: ([], 1))
    with pytest.raises(RunFailed, match="loss of replica 0 is nan"):
        study.tune()
    assert len(runs) == 3


def test_an_objective_that_runs_do_not_have_names_those_they_have(made) -> None:
    study, *_ = made(rising)
    study.objective = Objective("acuracy")
    with pytest.raises(RunFailed, match="eval_return_mean"):
        study.tune()

    # the same folder takes another objective, and the trial that was trained counts
    again, _, more = made(rising, trials=2)
    again.objective = Objective("eval_return_mean", minimize=True)
    assert again.tune() == 0
    assert [run.folder.name for run in more] == ["trial-0001"]
    least = min(again._trials.values())
    assert again._trials.best().value == least
    assert json.loads((again.folder / "study.json").read_text())["objective"][1] == "minimize"

    # until a trial has finished
    third, *_ = made(rising)
    with pytest.raises(Refusal, match=r"another objective.* --objective eval_return_mean:min; or"):
        third.tune()


def test_the_page_says_that_importances_need_two_fields(made) -> None:
    study, *_ = made(rising, page=True, trials=1, pruner="none", space=SPACE[:1])
    assert study.tune() == 0
    assert "Importances need two fields and 10 finished trials" in (study.folder / "report.html").read_text()


def test_the_page_says_that_importances_leave_out_pruned_trials(tmp_path: Path) -> None:
    trials = Trials(tmp_path, SPACE, "maximize", "random", "none", seed=0)
    for value in range(11):
        held = trials.next(11)
        assert held is not None
        if value < 10:
            trials.completed(held, value)
        else:
            trials.pruned(held)
    text = _importances(trials.study, trials.all()[:10], SPACE).text
    assert "among the best 30% of the finished trials and among all finished ones" in text
    assert "Pruned trials are left out" in text


def test_a_study_goes_on_to_more_trials_and_refuses_another_space(made, tmp_path: Path) -> None:
    first, _, _ = made(rising, trials=2, pruner="none")
    assert first.tune() == 0
    second, _, runs = made(rising, trials=5, pruner="none")
    assert second.tune() == 0
    assert len(runs) == 3
    other, _, _ = made(rising)
    other.space = SPACE[:1]
    with pytest.raises(Refusal, match="another space"):
        other.tune()


def test_a_study_from_before_a_field_existed_goes_on(made, tmp_path: Path) -> None:
    first, _, _ = made(rising, trials=2, pruner="none")
    assert first.tune() == 0
    path = tmp_path / "study" / "study.json"
    stored = read_object(path)
    del stored["run"]["initial_except"], stored["run"]["agent"]["scale_rewards"]
    write_json(path, stored)
    second, _, _ = made(rising, trials=3, pruner="none")
    assert second.tune() == 0
    stored["run"]["seed"] = 5
    write_json(path, stored)
    with pytest.raises(Refusal, match="another seed"):
        made(rising, trials=4, pruner="none")[0].tune()


@pytest.mark.slow  # 13 s of CPU; tests of sweeps interrupt and continue runs too
def test_a_killed_study_goes_on_with_the_trial_that_was_cut_off(tmp_path: Path, capfd) -> None:
    folder = tmp_path / "study"
    options = ["--launcher", "inline", "--eval-episodes", "1", "--record-every-seconds", "0.1"]
    options += ["--env-steps", "3000", "--checkpoint-every-env-steps", "500"]
    command = ["tune", "cartpole-a2c", "--trials", "3", *options, "--out", str(folder)]
    process = subprocess.Popen([sys.executable, "-m", "murmurate", *command], stdout=subprocess.DEVNULL)
    until(lambda: (folder / "trial-0001" / "run.json").exists(), "the second trial")
    os.kill(process.pid, signal.SIGKILL)
    process.wait()

    assert main(command) == 0
    out = capfd.readouterr().out
    assert "3 trials finished" in out
    assert "To train with it: murmurate train cartpole-a2c" in out
    summaries = [json.loads((folder / f"trial-000{i}" / "summary.json").read_text()) for i in range(3)]
    assert [summary["exit"] for summary in summaries] == ["finished"] * 3
    assert not (folder / "trial-0003").exists()
    page = (folder / "report.html").read_text()
    data = json.loads(page.split('id="data">')[1].split("</script>")[0])
    assert [t["value"] for t in data["trials"]] == [s["eval_return_mean"] for s in summaries]
