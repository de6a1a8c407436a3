"""Studies of runs that only write their files: pruning, failures, sharing; and a real one, killed."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import sqlite3
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from murmurate.cli.main import main
from murmurate.cli.options import change
from murmurate.errors import Refusal, RunFailed
from murmurate.recipes import recipe
from murmurate.record.stored import read_object, write_json
from murmurate.training.run import Run
from murmurate.tuning import run_process
from murmurate.tuning import study as study_module
from murmurate.tuning.objective import Objective, TrialProgress, check_objective, read_objective
from murmurate.tuning.page import _importances
from murmurate.tuning.space import Dimension
from murmurate.tuning.study import Study
from murmurate.tuning.trials import SAMPLERS, Trials
from short_runs import refused
from waiting import until

pytest.importorskip("optuna")

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


@pytest.fixture(autouse=True)
def _without_waiting_for_commits(monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``conftest.py`` does for files: each of a trial's many commits would wait for the disk."""
    connect = sqlite3.connect

    def unsynchronised(*arguments: Any, **options: Any) -> sqlite3.Connection:
        connection = connect(*arguments, **options)
        connection.execute("PRAGMA synchronous = OFF")
        return connection

    monkeypatch.setattr(sqlite3, "connect", unsynchronised)


@pytest.fixture
def made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[Study, list[str], list[FakeRun]]]:
    """A function that makes a study. page: whether it writes its page, whose figures take longer than it."""
    monkeypatch.setattr(run_process, "_POLL_SECONDS", 0.0)

    def make(
        script: Callable, *, page: bool = False, **changes: Any
    ) -> tuple[Study, list[str], list[FakeRun]]:
        if not page:
            monkeypatch.setattr(study_module, "write_page", lambda folder, *_: folder / "report.html")
        said: list[str] = []
        runs: list[FakeRun] = []

        def start(words: Sequence[str], output: Path, threads: int | None) -> FakeRun:
            runs.append(FakeRun(words, output, threads, script))
            return runs[-1]

        monkeypatch.setattr(study_module, "RunProcess", start)
        run = dataclasses.replace(recipe("cartpole-a2c"), env_steps=1000)
        settings = {"trials": 8, "say": said.append, "sampler": "random"} | changes
        objective, folder = Objective("eval_return_mean"), tmp_path / "study"
        space = settings.pop("space", SPACE)
        made = Study(run, WORDS, [], space, objective, folder, _with_options, **settings)
        return made, said, runs

    return make


def _with_options(run: Run, words: Sequence[str]) -> Run:
    return change(run, words, "murmurate tune")


def _rising(rate: float) -> tuple[list[float], int]:
    return [1e4 * rate * share / 10 for share in range(1, 11)], 0


def test_the_best_is_printed_as_a_command_and_the_page_has_every_trial(made) -> None:
    study, said, runs = made(_rising, page=True, pruner="none")
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
    study, _, runs = made(_rising, pruner="none", trials=1, space=space)
    assert study.tune() == 0
    (trial,) = study._trials.all()
    # the run writes a return every 100 env steps, so that each is a fifth of the budget
    assert trial.intermediate_values[10] == runs[0].returns[4]


def test_a_pruner_ends_what_is_worse_than_the_median(made) -> None:
    study, _, runs = made(_rising, page=True, trials=12)
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
    study, _, runs = made(lambda rate: (_rising(rate)[0], code), trials=2, pruner="none")
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
        return _rising(rate)

    study, _, _ = made(spoilt)
    with pytest.raises(RunFailed, match=r"study\.db cannot be used: no such table.* the same command"):
        study.tune()


def test_three_failures_at_the_start_end_the_study(made) -> None:
    study, _, runs = made(lambda rate: ([], 1))
    with pytest.raises(RunFailed, match="loss of replica 0 is nan"):
        study.tune()
    assert len(runs) == 3


def test_an_objective_that_runs_do_not_have_names_those_they_have(made) -> None:
    study, *_ = made(_rising)
    study.objective = Objective("acuracy")
    with pytest.raises(RunFailed, match="eval_return_mean"):
        study.tune()

    # the same folder takes another objective, and the trial that was trained counts
    again, _, more = made(_rising, trials=2)
    again.objective = Objective("eval_return_mean", minimize=True)
    assert again.tune() == 0
    assert [run.folder.name for run in more] == ["trial-0001"]
    least = min(again._trials.values())
    assert again._trials.best().value == least
    assert json.loads((again.folder / "study.json").read_text())["objective"][1] == "minimize"

    # until a trial has finished
    third, *_ = made(_rising)
    with pytest.raises(Refusal, match=r"another objective.* --objective eval_return_mean:min; or"):
        third.tune()


def test_a_missing_objective_is_not_answered_with_what_is_no_number() -> None:
    summary = {"resume_exact": True, "eval_return_mean": 1.0, "recipe": "cartpole-a2c", "seed": 0}
    with pytest.raises(RunFailed, match=r"one of: eval_return_mean\.$"):
        Objective("acuracy").of(summary)
    assert Objective("resume_exact").of(summary) is None


def test_the_page_says_that_importances_need_two_fields(made) -> None:
    study, *_ = made(_rising, page=True, trials=1, pruner="none", space=SPACE[:1])
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
    first, _, _ = made(_rising, trials=2, pruner="none")
    assert first.tune() == 0
    second, _, runs = made(_rising, trials=5, pruner="none")
    assert second.tune() == 0
    assert len(runs) == 3
    other, _, _ = made(_rising)
    other.space = SPACE[:1]
    with pytest.raises(Refusal, match="another space"):
        other.tune()


def test_a_study_from_before_a_field_existed_goes_on(made, tmp_path: Path) -> None:
    first, _, _ = made(_rising, trials=2, pruner="none")
    assert first.tune() == 0
    path = tmp_path / "study" / "study.json"
    stored = read_object(path)
    del stored["run"]["initial_except"], stored["run"]["agent"]["scale_rewards"]
    write_json(path, stored)
    second, _, _ = made(_rising, trials=3, pruner="none")
    assert second.tune() == 0
    stored["run"]["seed"] = 5
    write_json(path, stored)
    with pytest.raises(Refusal, match="another seed"):
        made(_rising, trials=4, pruner="none")[0].tune()


def test_each_sampler_draws_a_second_trial(tmp_path: Path) -> None:
    for sampler in SAMPLERS:
        (tmp_path / sampler).mkdir()
        space = SPACE[1:] if sampler == "grid" else SPACE
        trials = Trials(tmp_path / sampler, space, "maximize", sampler, "none", seed=0)
        for value in (1.0, 2.0):
            held = trials.next(3)
            assert held is not None
            trials.completed(held, value)
            held.release()


def test_a_grid_tries_every_combination_once_and_goes_on(made) -> None:
    space = [
        Dimension("seed", 0, 1, whole=True),
        Dimension("agent.learning-rate", choices=("1e-3", "5e-3")),
        Dimension("agent.steps", choices=("4", "8")),
    ]
    expected = [(seed, rate, n) for seed in ("0", "1") for rate in ("1e-3", "5e-3") for n in ("4", "8")]
    changes = {"space": space, "sampler": "grid", "pruner": "none"}
    fails = iter([False, True])
    first, _, runs = made(lambda rate: ([1.0], int(next(fails, False))), trials=3, **changes)
    assert first.tune() == 0
    second, _, more = made(_rising, trials=30, **changes)
    assert second.tune() == 0
    names = [f"--{dimension.name}" for dimension in space]
    tried = [tuple(run.words[run.words.index(name) + 1] for name in names) for run in [*runs, *more]]
    assert tried == expected
    assert len(runs) == 3
    third, _, none = made(_rising, trials=30, **changes)
    assert third.tune() == 0
    assert none == []


def test_a_combination_of_a_grid_that_a_killed_process_had_chosen_is_tried(tmp_path: Path) -> None:
    ours, theirs = (Trials(tmp_path, SPACE[1:], "maximize", "grid", "none", seed=0) for _ in range(2))
    ours.study.enqueue_trial({"agent.steps": "4"})
    first, second = theirs.next(9), ours.next(9)
    assert first is not None
    assert second is not None
    assert [held.trial.params for held in (first, second)] == [{"agent.steps": "4"}, {"agent.steps": "8"}]
    assert ours.next(9) is None


def test_a_grid_of_another_objective_still_tries_every_combination(tmp_path: Path) -> None:
    space = [Dimension("agent.steps", choices=tuple(map(str, range(6))))]
    killed = Trials(tmp_path, space, "maximize", "grid", "none", seed=0)
    killed.study.enqueue_trial({"agent.steps": "0"})
    assert killed.renew("minimize")
    renewed, tried = Trials(tmp_path, space, "minimize", "grid", "none", seed=0), []
    while (held := renewed.next(9)) is not None:
        tried.append(held.trial.params["agent.steps"])
    assert tried == list(space[0].choices)


def test_the_command_of_a_grid_tries_all_of_it_and_prunes_none(tmp_path: Path, monkeypatch, capsys) -> None:
    studies: list[Study] = []
    monkeypatch.setattr(Study, "tune", lambda study: studies.append(study) or 0)
    command = ["tune", "cartpole-gala", "--replicas", "2", "--search", "strategy.topology=ring,exponential"]
    words = [*command, "--search", "seed=0..19", "--sampler", "grid", "--out", str(tmp_path / "study")]
    assert main(words) == 0
    (study,) = studies
    assert (study.trials, study.pruner) == (40, "none")
    assert "--trials 40" in study.command
    assert "--pruner none" in study.command
    assert main([*words, "--trials", "3", "--pruner", "halving"]) == 0
    assert (studies[-1].trials, studies[-1].pruner) == (3, "halving")
    assert main([*words, "--pruner", "median"]) == 0
    assert "--pruner median" in studies[-1].command, "without it the command that goes on would prune none"
    capsys.readouterr()
    said = refused(capsys, *words, "--search", "agent.learning-rate=1e-4..1e-2:log")
    assert "Name its values: --search agent.learning-rate=A,B,C" in said
    assert "40,000,000 combinations" in refused(capsys, *words, "--search", "agent.steps=1..1000000")


def test_a_seed_may_be_longer_than_those_of_samplers(tmp_path: Path) -> None:
    trials = Trials(tmp_path, SPACE, "maximize", "random", "none", seed=2**63 - 1)
    held = trials.next(1)
    assert held is not None
    held.release()


def test_processes_share_a_study_and_take_over_what_was_cut_off(tmp_path: Path) -> None:
    ours, theirs = (Trials(tmp_path, SPACE, "maximize", "random", "none", seed=0) for _ in range(2))
    first, second = ours.next(3), theirs.next(3)
    assert first is not None
    assert second is not None
    assert (first.number, second.number) == (0, 1)
    drawn = dict(first.trial.params)
    ours.completed(first, 1.0)
    first.release()
    second.release()  # as the kernel does when its process is killed
    adopted = ours.next(3)
    assert adopted is not None
    assert adopted.number == 1
    assert adopted.trial.params == second.trial.params != drawn
    third = theirs.next(3)
    assert third is not None
    assert third.number == 2
    assert ours.next(3) is None


@pytest.mark.parametrize("name", ["lr?", "50%20 é", "{a}"])
def test_the_database_is_in_the_folder_whatever_its_name(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    Trials(tmp_path / name, SPACE, "maximize", "random", "none", seed=0)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert {path.name for path in (tmp_path / name).iterdir()} == {"locks", "study.db"}


def test_another_objective_keeps_the_trials_without_their_values(tmp_path: Path) -> None:
    theirs = Trials(tmp_path, SPACE, "maximize", "random", "none", seed=0)
    failed, cut_off = theirs.next(3), theirs.next(3)
    assert failed is not None
    assert cut_off is not None
    theirs.failed(failed, "nan")
    failed.release()
    cut_off.trial.report(1.0, 1)
    ours = Trials(tmp_path, SPACE, "minimize", "random", "none", seed=0)
    assert not ours.renew("minimize")  # another process trains a trial
    cut_off.release()
    before = ours.all()
    assert ours.renew("minimize")
    ours = Trials(tmp_path, SPACE, "minimize", "random", "none", seed=0)
    assert ours.study.direction.name == "MINIMIZE"
    after = ours.all()
    assert [trial.state.name for trial in after] == ["FAIL", "RUNNING"]
    assert [trial.params for trial in after] == [trial.params for trial in before]
    assert after[0].user_attrs == {"error": "nan"}
    assert [trial.intermediate_values for trial in after] == [{}, {}]
    adopted = ours.next(3)
    assert adopted is not None
    assert adopted.number == 1
    ours.completed(adopted, 2.0)
    assert not ours.renew("maximize")


def test_progress_is_reported_at_tenths_of_the_budget(tmp_path: Path) -> None:
    run = dataclasses.replace(recipe("cartpole-a2c"), env_steps=1000, replicas=2)
    progress = TrialProgress(Objective("eval_return_mean"), run, tmp_path)
    assert progress.poll() == []

    def record(replica: int, steps: int, value: float | None, **more: Any) -> None:
        line = {
            "time_seconds": 1.0,
            "env_steps": steps,
            "updates": 1,
            "return_mean": value,
            "replica": replica,
        }
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(line | more, separators=(",", ":")) + "\n")

    record(0, 60, None)
    assert progress.poll() == []
    record(1, 60, 4.0)
    assert progress.poll() == [(1, 4.0)]
    record(0, 260, 8.0)
    assert progress.poll() == [
        (2, pytest.approx(4.8)),
        (3, pytest.approx(5.8)),
    ]  # from 4 at 0.12 to 6 at 0.32
    record(0, 1260, 8.0, kind="evaluation")
    assert progress.poll() == []


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("cartpole-a2c", None, Objective("eval_return_mean")),
        ("cartpole-a2c", "wall_seconds:min", Objective("wall_seconds", minimize=True)),
        ("cartpole-a2c", "x:max", Objective("x")),
        # of what chooses among settings, no figure is of test data
        ("cifar10-resnet20", None, Objective("validation_accuracy")),
        ("corpus-lda", None, Objective("validation_perplexity", minimize=True)),
        ("table-gmm", None, Objective("validation_log_likelihood")),
        ("cifar10-resnet20", "accuracy", Objective("accuracy")),
        ("cifar10-resnet20", "loss", Objective("loss", minimize=True)),
        ("cifar10-resnet20", "validation_loss", Objective("validation_loss", minimize=True)),
        ("cifar10-sn-gan", None, Objective("frechet_distance", minimize=True)),
    ],
)
def test_objectives(name: str, text: str | None, found: Objective) -> None:
    assert read_objective(text, recipe(name)) == found


def test_what_training_records_on_validation_data_stands_for_the_objective(tmp_path: Path) -> None:
    run = dataclasses.replace(recipe("corpus-lda"), env_steps=1000)
    progress = TrialProgress(read_objective(None, run), run, tmp_path)
    line = {"time_seconds": 1.0, "env_steps": 500, "updates": 1, "perplexity": 40.0, "replica": 0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line, separators=(",", ":")) + "\n")
    assert progress.poll() == [(5, 40.0)]


@pytest.mark.parametrize("name", ["success_rate", "figure_energy"])
def test_what_training_episodes_say_stands_for_what_the_games_of_evaluations_do(
    name: str, tmp_path: Path
) -> None:
    run = dataclasses.replace(recipe("cartpole-a2c"), env_steps=1000)
    progress = TrialProgress(read_objective(f"eval_{name}:min", run), run, tmp_path)
    line = {"time_seconds": 1.0, "env_steps": 500, "updates": 1, name: 0.5, "replica": 0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line, separators=(",", ":")) + "\n")
    assert progress.poll() == [(5, 0.5)]


def test_passes_are_refused_where_env_steps_are_searched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.save(tmp_path / "rows.npy", np.random.default_rng(0).normal(size=(100, 2)))
    options = ("--world.path", tmp_path / "rows.npy", "--passes", "3", "--search", "env-steps=200,300")
    assert "Leave out --passes" in refused(capsys, "tune", "table-gmm", *options)


def test_objectives_of_data_sets_need_validation_examples(tmp_path: Path) -> None:
    np.save(tmp_path / "rows.npy", np.random.default_rng(0).normal(size=(100, 2)))
    run = recipe("table-gmm")
    given = dataclasses.replace(run.world, path=str(tmp_path / "rows.npy"))  # type: ignore[type-var]
    run = dataclasses.replace(run, world=given)
    check_objective(read_objective(None, run), run)
    with pytest.warns(UserWarning, match="log_likelihood is a figure of the test data"):
        check_objective(read_objective("log_likelihood", run), run)
    without = dataclasses.replace(run, world=dataclasses.replace(given, validation=0))  # type: ignore[type-var]
    with pytest.raises(Refusal, match=r"no rows are held out for validation\. Set --world\.validation"):
        check_objective(read_objective(None, without), without)


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
