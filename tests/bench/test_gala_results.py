"""GALA's table and sweep: which figures they have, and what counts as success."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.gala_trainer import SILENT, Trainer, plan
from murmurate.bench import _gala, gala_sweep, gala_table

# -- the table -----------------------------------------------------------------------------------------


def test_the_seed_that_trained_best_is_scored_by_games_that_did_not_choose_it(
    tmp_path: Path, trainer: Trainer
) -> None:
    small = plan(tmp_path, seeds=3, simulators=(16,), env_steps=(4_000,))
    trainer.returns = {"gala-2x8-to-4000-seed-1": 70.0, "all-reduce-2x8-to-4000-seed-2": 60.0}
    trainer.diverges = "all-reduce-2x8-to-4000-seed-2"
    result = gala_table.measure(small, SILENT)
    a2c, gala = result["rows"]
    assert (gala["ours_seed"], gala["ours_mean"], gala["ours_stderr"]) == (1, 71.0, 0.5)
    assert (a2c["ours_seed"], a2c["ours_mean"], a2c["diverged"], a2c["seeds"]) == (0, 11.0, 1, 3)
    assert list(a2c["eval_return_by_seed"]) == ["0", "1"]
    assert gala["wall_hours"] == pytest.approx(1.5)
    assert a2c["paper_mean"] is None
    assert "scaled_down" in result
    json.dumps(result)


def test_a_table_that_ends_at_the_papers_first_column_is_no_rehearsal(
    tmp_path: Path, trainer: Trainer
) -> None:
    pytest.importorskip("ale_py")
    shorter = plan(tmp_path, games=("pong",), seeds=1, simulators=(16,), env_steps=(25_000_000,))
    result = gala_table.measure(shorter, SILENT)
    assert "scaled_down" not in result
    assert {row["paper_env_steps"] for row in result["rows"]} == {25_000_000}


def test_a_row_of_which_every_seed_diverged_has_no_score_and_one_without_episodes_has() -> None:
    diverged = {
        "exit": "failed: the parameters of replica 'a2c' are not finite", "seed": 0, "dead_replicas": [],
        "wall_seconds": 1.0, "eval_return_mean": 9.0, "train_return_mean": 9.0, "eval_return_stderr": 0.1,
    }  # fmt: skip
    assert gala_table.ours([diverged])["ours_mean"] is None
    young = {**diverged, "exit": "finished", "seed": 1, "train_return_mean": None, "eval_return_mean": 2.0}
    found = gala_table.ours([diverged, young])
    assert (found["ours_mean"], found["ours_seed"], found["diverged"]) == (2.0, 1, 1)


def test_the_papers_figures_are_table_1s() -> None:
    assert gala_table.paper_figures("GALA-A2C", 40_000_000, "beam-rider") == {
        "paper_mean": 10188, "paper_stderr": 1316, "paper_env_steps": 40_000_000,
    }  # fmt: skip
    assert gala_table.paper_figures("A2C", 25_000_000, "qbert")["paper_mean"] == 16805
    assert gala_table.paper_figures("A2C", 2_000, "space-invaders")["paper_env_steps"] == 25_000_000
    assert {method for method, _ in gala_table.PAPER} == set(_gala.METHODS)
    assert {steps for _, steps in gala_table.PAPER} == set(gala_table.FULL.env_steps)
    assert all(len(row) == len(_gala.SIX_GAMES) for row in gala_table.PAPER.values())


# -- the sweep -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scores", "nominal", "share"),
    [
        ([10.1, 10.0, 30.0, -5.0], 20.0, 0.5),  # better than half, not half
        ([None, 30.0], 20.0, 0.5),  # no score is no success, and still a run
        ([None, None], 20.0, 0.0),
        ([30.0], None, None),
        ([], 20.0, None),
    ],
)
def test_a_run_succeeds_above_half_the_nominal_score(
    scores: list[float | None], nominal: float | None, share: float | None
) -> None:
    assert gala_sweep.success_share(scores, nominal) == share


@pytest.mark.parametrize(
    ("scores", "nominal"),
    [
        ([1.0, 100.0, 20.0], 20.0),
        ([None, 20.0, 40.0], 30.0),
        ([None, None], None),
        ([], None),
        ([-21.0, -20.0], None),  # half of it would be met by what is worse
        ([0.0], None),
    ],
)
def test_the_nominal_score_is_a_median_that_can_be_halved(
    scores: list[float | None], nominal: float | None
) -> None:
    assert gala_sweep.nominal_score(scores) == nominal


def test_shares_are_by_simulators_and_compared_as_the_paper_does(tmp_path: Path, trainer: Trainer) -> None:
    small = plan(tmp_path, env_steps=(4_000,))
    trainer.returns = {"all-reduce-2x16-to-4000-seed-0": 5.0, "all-reduce-2x16-to-4000-seed-1": 5.1}
    trainer.diverges = "gala-2x8-to-4000-seed-0"
    result = gala_sweep.measure(small, SILENT)
    few, many = result["rows"]
    assert (few["ours_nominal_score"], few["ours_share_a2c"], few["ours_share_gala"]) == (10.0, 1.0, 0.5)
    assert few["scores_gala"] == [None, 10.0]
    assert (many["ours_share_a2c"], many["ours_share_gala"]) == (0.5, 1.0)
    assert [row["gala_at_least_a2c"] for row in result["rows"]] == [False, True]
    assert (result["gala_at_least_a2c"], result["compared"]) == (1, 2)
    assert few["paper_gala_at_least_a2c"] is None
    json.dumps(result)
