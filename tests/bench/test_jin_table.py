"""Jin's comparison: what is trained, interquartile means, and what hiding costs."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from murmurate.bench import _resumable, jin_table
from murmurate.bench.jin_table import AGENTS, TASKS, JinPlan
from murmurate.cli.main import main
from murmurate.cli.options import change
from murmurate.errors import Refusal
from murmurate.recipes import recipe
from murmurate.record.score_statistics import interquartile_mean
from murmurate.worlds.registry import world_names

PLAN = JinPlan(
    env_steps=100, seeds=2, tasks=("pong", "pong-occluded", "pong-one-frame"), agents=("arm", "dqn")
)
pytestmark = pytest.mark.usefixtures("_ale")


@pytest.fixture
def _ale() -> None:
    pytest.importorskip("ale_py")
    pytest.importorskip("scipy")


@pytest.mark.parametrize("agent", AGENTS)
@pytest.mark.parametrize("task", TASKS)
def test_every_run_is_one_that_its_recipe_accepts(task: str, agent: str) -> None:
    if TASKS[task][0] not in world_names():
        pytest.skip(f"{TASKS[task][0]} cannot be opened here")
    run = jin_table.planned(JinPlan(), task, agent, seed=3)
    change(recipe(run.recipe), (*run.settings, *run.speed_settings), "").validate()
    made: Any = change(recipe(run.recipe), run.settings, "")
    made.validate()
    assert made.seed == 3
    assert bool(made.world.occlude if hasattr(made.world, "occlude") else ()) == task.endswith("-occluded")
    if task == "pong-one-frame":
        assert made.world.stack == 1
    if agent == "dqn":  # dueling, double, uniform
        assert made.learner.dueling
        assert made.learner.selector == "online"
        assert made.source.replay.alpha == 0
        replay, is_maze = made.source.replay, task == "maze-curriculum"
        assert replay.learning_starts == (12_500 if is_maze else 50_000)
        steps_an_update = made.learner.batch / replay.samples_per_insert
        assert made.learner.target_every * steps_an_update == (12_500 if is_maze else 30_000)
        assert replay.capacity == {"pong": 1_000_000, "doom": 240_000, "maze": 62_500}[task[:4]]
        assert made.learner.clip == (10 if task.startswith("pong") else math.inf)
    if agent == "trpo":
        steps = {"pong": 100_000, "doom": 12_500, "maze": 6_250}[task[:4]]
        assert 0 <= made.learner.steps * made.source.simulators - steps < made.source.simulators
    if task == "maze-curriculum":
        assert made.world.advance_every == (93_750 if agent == "trpo" else 62_500)
    assert made.learner.discount == 0.99, "agents that see equally far are compared"
    if not task.startswith("pong"):
        assert made.learner.torso == "jin2018"


def test_interquartile_means() -> None:
    assert interquartile_mean([8, 1, 7, 2, 6, 3, 5, 4])["iqm"] == 4.5
    assert interquartile_mean([3.0]) == {"iqm": 3.0, "interval": None}
    assert interquartile_mean([1, 2, 3, 4])["interval"] is None, (
        "it would reach from the least to the greatest"
    )
    assert interquartile_mean([]) == {"iqm": None, "interval": None}
    low, high = interquartile_mean([8, 1, 7, 2, 6, 3, 5, 4])["interval"]
    assert 1 < low < 4.5 < high < 8


def test_it_trains_all_and_shows_what_hiding_costs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    returns = {"pong-arm": 18.0, "pong-dqn": 20.0, "occluded-arm": 15.0, "occluded-dqn": 5.0}
    returns |= {"frame-arm": 17.0, "frame-dqn": 10.0}
    trained = []

    def train(run: _resumable.ResumableRun, log: Any) -> dict[int, dict[str, Any]]:
        trained.append(run.folder.name)
        value = next(v for name, v in returns.items() if name in run.folder.name) + run.seed
        facts = {
            "exit": "finished",
            "eval_return_mean": value,
            "train_return_mean": value,
            "wall_seconds": 60,
        }
        return dict.fromkeys(run.ends, facts)

    monkeypatch.setattr(_resumable, "train", train)
    monkeypatch.setattr(_resumable, "measured_speed", lambda run: 10.0)
    monkeypatch.setattr(_resumable, "report", lambda folders, page: page.write_text(str(len(folders))))
    result = jin_table.measure(dataclasses.replace(PLAN, where=str(tmp_path)), lambda line: None)
    assert len(set(trained)) == 3 * 2 * 2
    assert result["expected"]["hours"] == pytest.approx(12 * 100 / 10 / 3600)
    assert {(row["task"], row["agent"]): row["iqm"] for row in result["rows"]}["pong", "arm"] == 18.5
    assert [(r["task"], r["agent"], r["lost"]) for r in result["lost"]] == [
        ("pong-occluded", "arm", 3.0),
        ("pong-occluded", "dqn", 15.0),
        ("pong-one-frame", "arm", 1.0),
        ("pong-one-frame", "dqn", 10.0),
    ]
    assert [Path(page).read_text() for page in result["reports"]] == ["4", "4", "4"]


def test_nothing_is_compared_with_what_remains_of_a_task_whose_seeds_diverged() -> None:
    plain, hidden = (
        {"task": task, "agent": "dqn", "iqm": iqm, "diverged": 0}
        for task, iqm in (("pong", 20.0), ("pong-occluded", 5.0))
    )
    assert [row["lost"] for row in jin_table.lost([plain, hidden])] == [15.0]
    assert jin_table.lost([plain, {**hidden, "diverged": 1}]) == []
    assert jin_table.lost([{**plain, "iqm": None}, hidden]) == []


def test_options_of_the_plan_are_in_the_command_of_the_result(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(plan: JinPlan, log: Callable[[str], None]) -> dict[str, int]:
        log("halfway")
        return {"seeds": plan.seeds}

    monkeypatch.setattr(jin_table, "measure", measure)
    assert main(["bench", "jin-table", "--json", "--seeds", "7"]) == 0
    printed = capsys.readouterr()
    assert "halfway" in printed.err
    result = json.loads(printed.out)
    assert result["seeds"] == result["plan"]["seeds"] == 7
    assert result["command"] == "murmurate bench jin-table --json --seeds 7"


def test_unknown_names_are_refused_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Refusal, match="pong-occluded"):
        jin_table.planned(PLAN, "pong-ocluded", "arm", 0)
    assert main(["bench", "jin-table", "--env-step", "100"]) == 2
    assert "Did you mean --env-steps?" in capsys.readouterr().err
