"""The batch experiment: its runs, the verdict, and that it goes on where it stopped."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from murmurate.bench import _resumable, gan_batch
from murmurate.bench.gan_batch import FULL, QUICK, GanBatchPlan, slopes, verdict
from murmurate.cli.options import change
from murmurate.errors import Refusal
from murmurate.recipes import recipe


def test_every_run_is_one_that_its_recipe_accepts_with_equal_generator_updates() -> None:
    for key in gan_batch.keys(FULL):
        planned = gan_batch.planned(FULL, *key)
        run: Any = change(recipe(planned.recipe), planned.settings, "")
        run = dataclasses.replace(run, env_steps=planned.ends[-1])
        run.validate()
        assert run.source.batches(run) == FULL.updates
        assert run.learner.batch * run.replicas == 64 * key[0]
    assert len(gan_batch.keys(FULL)) == 3 * (1 + 3 * 2)
    folders = [gan_batch.planned(FULL, *key).folder for key in gan_batch.keys(FULL)]
    assert len(set(folders)) == len(folders)


def row(total: int, *distances: float, seeds: Any = None) -> dict[str, Any]:
    return {
        "total_batch": total,
        "seeds": list(range(len(distances)) if seeds is None else seeds),
        "frechet_distance": {"of_seeds": list(distances)},
    }


def test_slopes_are_for_a_doubling_of_the_batch() -> None:
    table = [row(64, 8.0, 1.0), row(128, 6.0, 2.0), row(256, 4.0, 3.0)]
    assert slopes(table) == pytest.approx([-2.0, 1.0])
    assert slopes([row(64, 8.0), row(128, 5.0, seeds=[1]), row(256, 4.0)]) == pytest.approx([-2.0])


def test_the_distance_falls_only_if_it_does_with_every_seed() -> None:
    assert verdict([-1.0, -0.1]) == "the distance falls with the batch: it falls with 2 of 2 seeds"
    assert "does not fall" in verdict([-1.0, 0.1])
    assert verdict([-1.0]).startswith("undecided")
    assert verdict([]).startswith("undecided")


def test_it_trains_all_and_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def train(run: _resumable.ResumableRun, log: Any) -> dict[int, dict[str, Any]]:
        replicas = int(run.settings[run.settings.index("--replicas") + 1])
        local = "local" in run.settings
        found = {"frechet_distance": 10 / replicas + run.seed + 3 * local * replicas, "class_score": 5.0}
        found |= {"class_agreement": 0.5, "frechet_distance_test": 0.1, "wall_seconds": 60}
        exit = "failed: not finite" if (replicas, run.seed, local) == (4, 1, False) else "finished"
        return {run.ends[-1]: {**found, "exit": exit}}

    monkeypatch.setattr(_resumable, "train", train)
    monkeypatch.setattr(_resumable, "measured_speed", lambda run: 10.0)
    plan = GanBatchPlan(replicas=(1, 2, 4), seeds=2, updates=5, where=str(tmp_path))
    lines: list[str] = []
    result = gan_batch.measure(plan, lines.append)
    assert [(r["total_batch"], r["batch_norm"]) for r in result["rows"]] == [
        (64, ["replicas", "local"]),
        (128, ["replicas"]),
        (128, ["local"]),
        (256, ["replicas"]),
        (256, ["local"]),
    ]
    assert result["rows"][0]["frechet_distance"] == {"mean": 10.5, "of_seeds": [10.0, 11.0]}
    assert result["rows"][3]["diverged"] == 1
    assert result["slopes"]["replicas"] == pytest.approx([-3.75, -5.0])
    assert result["verdict"]["replicas"].startswith("the distance falls")
    assert result["verdict"]["local"].startswith("the distance does not")
    assert Path(result["figure"]).stat().st_size > 1000
    assert "fewer updates" in result["scaled_down"]
    assert any("10 images a second" in line for line in lines)


def test_plans_without_a_comparison_are_refused() -> None:
    with pytest.raises(Refusal, match=r"--replicas 1,2"):
        gan_batch.check(dataclasses.replace(QUICK, replicas=(2,)))
    with pytest.raises(Refusal, match="ghost"):
        gan_batch.check(dataclasses.replace(QUICK, batch_norm=("ghost",)))
