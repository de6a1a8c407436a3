"""Where runs on data sets end: after passes, or where their user says, and not where a recipe ends."""

from __future__ import annotations

import dataclasses
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import murmurate
from murmurate.cli.main import main
from murmurate.errors import Refusal
from murmurate.recipes import recipe
from murmurate.training.ends import after_passes, warn_of_late_policy, warn_of_many_passes, without_recipe_end
from murmurate.training.run import Run
from short_runs import refused

SHORT = ("--launcher", "inline", "--agent.batch", "10", "--agent.validate-every", "0")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A table of 100 rows, of which 93 are learned from."""
    np.save(tmp_path / "rows.npy", np.random.default_rng(0).normal(size=(100, 2)))
    return tmp_path / "rows.npy"


def of_rows(path: Path, **changes: Any) -> Run:
    run = recipe("table-gmm")
    world = dataclasses.replace(run.world, path=str(path))  # type: ignore[type-var]
    return dataclasses.replace(run, world=world, **changes)


def test_a_number_of_passes_ends_a_run(path: Path, tmp_path: Path) -> None:
    command = ["train", "table-gmm", "--world.path", str(path), *SHORT]
    assert main([*command, "--passes", "2", "--out", str(tmp_path / "a")]) == 0
    assert json.loads((tmp_path / "a" / "run.json").read_text())["env_steps"] == 186
    fields = {"batch": 10, "validate_every": 0}
    result = murmurate.train(
        "table-gmm", world={"path": str(path)}, agent=fields, passes=0.5, launcher="inline",
        out=tmp_path / "b", quiet=True,
    )  # fmt: skip
    assert 46 <= result.summary["env_steps"] < 56
    result = murmurate.simulate(
        "table-gmm", world={"path": str(path)}, agent=fields, passes=1, out=tmp_path / "c", quiet=True
    )
    assert 93 <= result.summary["env_steps"] < 103


def test_another_end_takes_the_place_of_a_recipe_s_examples(path: Path, tmp_path: Path) -> None:
    """Else the learning rate would follow an end that is never reached."""
    command = ["train", "table-gmm", "--world.path", str(path), *SHORT, "--dry-run"]
    assert main([*command, "--minutes", "1"]) == 0
    given = ["--minutes", "0.001", "--out", str(tmp_path / "a")]
    assert main([*command[:-1], *given]) == 0
    assert json.loads((tmp_path / "a" / "run.json").read_text())["env_steps"] is None
    result = murmurate.train(
        "table-gmm", world={"path": str(path)}, updates=3, launcher="inline", out=tmp_path / "b", quiet=True
    )
    assert json.loads((result.folder / "run.json").read_text())["env_steps"] is None

    classifier = recipe("folder-resnet18")
    assert without_recipe_end(classifier, {"minutes"}).planned_updates() is None
    assert without_recipe_end(classifier, set()) == classifier
    simulators = recipe("cartpole-a2c")
    assert without_recipe_end(simulators, {"minutes"}) == simulators


def test_passes_that_cannot_be_counted_are_refused(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["train", "table-gmm", "--world.path", path, "--out", tmp_path / "run", "--passes", "2"]
    assert "both say how many rows are read" in refused(capsys, *command, "--env-steps", "80")
    assert "'cartpole' is none" in refused(capsys, "train", "cartpole-a2c", "--passes", "2")
    for passes in ("2", 0, float("nan"), 1e308):
        with pytest.raises(Refusal, match="it must be a number above 0"):
            after_passes(of_rows(path), passes, ())  # type: ignore[arg-type]


def test_a_recipe_s_end_that_is_thousands_of_passes_away_is_told(path: Path) -> None:
    with pytest.warns(UserWarning, match=r"which are 10,753 passes through the 93 .* --passes 100"):
        warn_of_many_passes(of_rows(path))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_many_passes(after_passes(of_rows(path), 1000, ()))
        warn_of_many_passes(of_rows(path, minutes=5.0))
        warn_of_many_passes(recipe("cartpole-a2c"))


def test_random_actions_that_outlast_the_start_of_learning_are_told() -> None:
    run = recipe("pendulum-sac")
    source: Any = run.source
    early = dataclasses.replace(source, replay=dataclasses.replace(source.replay, learning_starts=100))
    with pytest.warns(UserWarning, match=r"after 100 env steps, .* first 1,000 .* --random-env-steps 100 "):
        warn_of_late_policy(dataclasses.replace(run, source=early))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_late_policy(run)
        warn_of_late_policy(recipe("cartpole-a2c"))
