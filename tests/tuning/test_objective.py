"""What a study maximizes: objectives, and progress towards them while a trial runs."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from murmurate.cli.main import main
from murmurate.errors import Refusal, RunFailed
from murmurate.recipes import recipe
from murmurate.tuning.objective import Objective, TrialProgress, check_objective, read_objective
from murmurate.tuning.study import Study
from short_runs import refused

pytest.importorskip("optuna")


def test_a_missing_objective_is_not_answered_with_what_is_no_number() -> None:
    summary = {"resume_exact": True, "eval_return_mean": 1.0, "recipe": "cartpole-a2c", "seed": 0}
    with pytest.raises(RunFailed, match=r"one of: eval_return_mean\.$"):
        Objective("acuracy").of(summary)
    assert Objective("resume_exact").of(summary) is None


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
        ("corpus-lda", "perplexity_bound", Objective("perplexity_bound", minimize=True)),
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


@pytest.mark.parametrize(
    ("options", "searched", "env_steps"),
    [((), ("--updates", "9"), None), (("--env-steps", "500"), ("--updates", "9"), 500)],
)
def test_the_budget_of_a_trial_is_that_of_its_command(
    options: tuple[str, ...],
    searched: tuple[str, ...],
    env_steps: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where updates are searched, a recipe's own number of examples does not end a trial: it is no budget."""
    studies: list[Study] = []
    monkeypatch.setattr(Study, "tune", lambda study: studies.append(study) or 0)
    np.save(tmp_path / "rows.npy", np.random.default_rng(0).normal(size=(100, 2)))
    words = ["tune", "table-gmm", "--world.path", str(tmp_path / "rows.npy"), *options]
    assert main([*words, "--search", "updates=9,11", "--out", str(tmp_path / "study")]) == 0
    run = studies[0].with_options(searched)
    assert (run.env_steps, run.updates) == (env_steps, 9)


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
