"""The comparison of actor-learners: what is trained, and values at equal env steps and seconds."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from murmurate.bench import _resumable, actor_learners
from murmurate.bench.actor_learners import METHODS, ActorLearnersPlan
from murmurate.cli.options import change
from murmurate.recipes import recipe
from murmurate.record.runs import open_run
from murmurate.record.stored import write_json
from short_runs import train

PLAN = ActorLearnersPlan(world="cartpole", env_steps=1_000, seeds=2, simulators=8, eval_episodes=1)


@pytest.mark.parametrize("method", METHODS)
def test_all_methods_have_as_many_simulators_in_all(method: str) -> None:
    run = actor_learners.planned(PLAN, method, 1)
    made: Any = change(recipe(run.recipe), run.settings, "")
    made.validate()
    assert made.replicas * made.source.simulators == 8
    assert made.seed == 1
    base = recipe(run.recipe).learner.learning_rate
    assert made.learner.learning_rate == pytest.approx(base * (1 if method == "IMPALA" else math.sqrt(0.5)))
    assert getattr(made.source, "actors", 0) == (2 if method == "IMPALA" else 0)
    assert made.replicas == (2 if method in ("GALA", "all-reduce") else 1)


def test_returns_are_compared_at_equal_seconds_and_env_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real short run, whose records are rewritten: return = env steps / 10, at a speed of its own."""
    made: Any = change(
        recipe("cartpole-a2c"), ["--env-steps", "640", "--launcher", "inline", "--eval-episodes", "1"], ""
    )
    train(made, tmp_path / "made")
    speeds = {"a2c": 100.0, "all-reduce": 200.0, "gala": 50.0, "impala": 400.0}

    def trained(run: _resumable.ResumableRun, log: Any) -> dict[int, dict[str, Any]]:
        speed = next(v for name, v in speeds.items() if f"cartpole-{name}-" in run.folder.name)
        run.folder.parent.mkdir(exist_ok=True)
        run.folder.mkdir()
        for file in ("run.json", "roles.jsonl"):
            (run.folder / file).write_bytes((tmp_path / "made" / file).read_bytes())
        summary = json.loads((tmp_path / "made" / "summary.json").read_text())
        summary |= {"wall_seconds": 1_000 / speed, "env_steps": 1_000}
        summary |= {"env_steps_per_second": 0.0}  # resumed at its end, which made no more of them
        summary |= {"eval_return_mean": speed + run.seed}
        write_json(run.folder / "summary.json", summary)
        lines = [
            {"time_seconds": n / speed, "env_steps": n, "updates": n, "replica": 0, "return_mean": n / 10}
            for n in range(0, 1_001, 10)
        ]
        (run.folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return dict.fromkeys(run.ends, summary)

    monkeypatch.setattr(_resumable, "train", trained)
    monkeypatch.setattr(_resumable, "measured_speed", lambda run: 100.0)
    plan = ActorLearnersPlan(
        world="cartpole", env_steps=1_000, seeds=2, simulators=8, where=str(tmp_path / "x")
    )
    result = actor_learners.measure(plan, lambda line: None)
    assert result["expected"]["hours"] == pytest.approx(8 * 1_000 / 100 / 3600)
    assert result["equal_seconds"] == pytest.approx(1_000 / 400)
    rows = {row["method"]: row for row in result["rows"]}
    for method, speed in zip(("A2C", "all-reduce", "GALA", "IMPALA"), speeds.values(), strict=True):
        row = rows[method]
        assert row["seeds"] == 2
        assert row["eval_return_mean"]["values"] == [speed, speed + 1]
        assert row["env_steps_per_second"]["median"] == pytest.approx(speed)
        assert row["return_at_equal_env_steps"]["median"] == pytest.approx(100)
        assert row["return_at_equal_seconds"]["median"] == pytest.approx(speed / 400 * 100, abs=1)
    assert Path(result["report"]).exists()
    assert open_run(next((tmp_path / "x").glob("cartpole-gala*"))).fact("env_steps") == 1_000


def test_without_a_run_that_has_not_diverged_the_table_is_empty() -> None:
    assert actor_learners.compared({})["rows"] == []


def test_a_run_without_an_episode_by_then_counts_in_no_median() -> None:
    """NaN is no JSON, and among numbers it made the median any of them."""
    facts = {"wall_seconds": 10.0, "env_steps": 100, "eval_return_mean": 1.0}

    def run(*records: tuple[float, float]) -> Any:
        curve = np.array(records).T if records else None
        return SimpleNamespace(fact=facts.get, mean=lambda field, axis: curve)

    runs = {("A2C", 0): run(), ("A2C", 1): run((5.0, 7.0)), ("A2C", 2): run((9.0, 3.0), (11.0, 4.0)),
            ("GALA", 0): run((500.0, 1.0))}  # fmt: skip
    a2c, gala = actor_learners.compared(runs)["rows"]
    assert a2c["return_at_equal_seconds"]["values"] == [7.0, 3.0]
    assert a2c["return_at_equal_seconds"]["median"] == 5.0
    assert gala["return_at_equal_seconds"] is None
    json.dumps([a2c, gala], allow_nan=False)


def test_diverged_runs_are_counted_and_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def trained(run: _resumable.ResumableRun, log: Any) -> dict[int, dict[str, Any]]:
        failed = "gala" in run.folder.name and run.seed == 1
        return {1_000: {"exit": "failed: the loss of replica 0 is nan" if failed else "finished"}}

    monkeypatch.setattr(_resumable, "expected", lambda *_: {})
    monkeypatch.setattr(_resumable, "train", trained)
    monkeypatch.setattr(actor_learners, "open_run", lambda folder: folder)
    monkeypatch.setattr(actor_learners, "compared", lambda runs: {"compared": len(runs)})
    monkeypatch.setattr(actor_learners, "report", lambda *_: None)
    result = actor_learners.measure(PLAN, lambda line: None)
    assert result["compared"] == 2 * 4 - 1
    assert result["diverged"] == {"A2C": 0, "all-reduce": 0, "GALA": 1, "IMPALA": 0}
