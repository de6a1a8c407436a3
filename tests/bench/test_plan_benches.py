"""The benches of ``murmurate plan``: the figures of given measurements, and where a run's output goes."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

from murmurate.bench import _resumable, memr, plan, plan_target
from murmurate.errors import Refusal
from murmurate.mapping.candidates import Candidate
from murmurate.mapping.cost import Prediction
from murmurate.mapping.learning import Training
from murmurate.mapping.lines import Line
from murmurate.mapping.primitives import PRIMITIVES
from murmurate.mapping.profile import DeviceProfile, RecipeCosts, key
from murmurate.recipes import recipe
from murmurate.training.run import Run

INF = math.inf


def test_errors_of_drawn_and_of_all_configurations_are_told_apart() -> None:
    cases = [
        {"recipe": name, "error": error, "choice": choice, "drawn": drawn}
        for name, error, choice, drawn in (
            ("a", 9.0, True, False), ("a", 0.1, False, True), ("a", 0.2, False, False),
            ("a", 0.3, False, False), ("b", 0.5, False, True),
        )
    ]  # fmt: skip
    assert plan.errors(cases, ["a"]) == {
        "median_error": pytest.approx(0.3), "worst_error": 0.5,
        "median_error_exhaustive": 0.2, "worst_error_exhaustive": 0.3,
    }  # fmt: skip
    assert plan.errors(cases, [])["median_error_exhaustive"] is None
    assert set(plan.errors(cases[:1], ["a"]).values()) == {None}, "a choice without others has no errors"


def test_an_exhaustive_recipe_that_is_not_planned_is_refused() -> None:
    with pytest.raises(Refusal, match="--exhaustive names cartpole-gala, and --recipes does not"):
        plan.measure(dataclasses.replace(plan.QUICK, exhaustive=("cartpole-gala",)), print)


def test_an_interrupted_bench_measures_nothing_twice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    settings = plan.PlanPlan(("cartpole-a2c",), placements=1, rounds=2, where=str(tmp_path))
    asked: list[str] = []

    def add_variants(profile: DeviceProfile, run: Run, log: Any, *, keep: Any) -> None:
        if profile.watts is None:
            asked.append("costs")
            profile.watts = 7.0
            keep()

    def found(run: Run, profile: DeviceProfile) -> list[Candidate]:
        assert profile.watts == 7.0
        prediction = Prediction(10.0, 1.0, {"act": 0.1}, "learner", 1.0, 1.0)
        return [Candidate(name, run, 10.0, "", "", prediction) for name in ("first", "second")]

    def measured(run: Run, seconds: float) -> float:
        asked.append("a rate")
        if len(asked) == 4:
            raise KeyboardInterrupt
        return float(len(asked))

    monkeypatch.setattr(plan.costs, "add_variants", add_variants)
    monkeypatch.setattr(plan, "runs_with_exchange", lambda *_: [])
    monkeypatch.setattr(plan, "search", found)
    monkeypatch.setattr(plan, "measured", measured)
    with pytest.raises(KeyboardInterrupt):
        plan.measure(settings, print)
    assert asked == ["costs", "a rate", "a rate", "a rate"]
    result = plan.measure(settings, print)
    assert asked == ["costs"] + 9 * ["a rate"], "the third one again, the fourth, and both twice again"
    assert result["raw"] == [
        {"seconds": {"act": 0.1}, "rates": [2.0, 5.0], "again": [7.0, 9.0]},
        {"seconds": {"act": 0.1}, "rates": [3.0, 6.0], "again": [8.0, 10.0]},
    ]  # fmt: skip
    assert [case["ratio"] for case in result["cases"]] == [10 / 5, 10 / 6]
    assert result["choice_over_best"] == pytest.approx(10 / 9 - 1)
    assert plan.measure(settings, print) == result
    assert len(asked) == 10


def test_a_miss_is_slower_than_any_run_that_reaches_the_target() -> None:
    assert plan_target.median_ratio([4.0, 6.0, INF], [2.0, 2.0, 1.0]) == 3.0
    assert plan_target.median_ratio([4.0, INF], [INF, INF]) == 0.0
    assert plan_target.median_ratio([INF, INF], [2.0, INF]) is None
    assert plan_target.median_ratio([INF], [INF]) is None


def test_failing_fast_wins_no_comparison(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The candidate with 2 replicas fails in a second, and the recipe reaches the target in ten."""
    run = recipe("cartpole-a2c")
    prediction = Prediction(1.0, 1.0, {}, "learner", 1.0, 1.0)
    found = [
        Candidate(name, dataclasses.replace(run, replicas=replicas), 1.0, "", "", prediction)
        for name, replicas in (("fails", 2), (plan_target.UNCHANGED, 1))
    ]

    def trained(tried: Any, target: float, seed: int) -> Training:
        return Training(1.0, 1.0, False) if tried.replicas == 2 else Training(1.0, 10.0, True)

    monkeypatch.setattr(plan_target, "_planned", lambda *_: (found, 1))
    monkeypatch.setattr(plan_target.learning, "to_target", trained)
    settings = plan_target.PlanTargetPlan(trials=2, finalists=2, seeds=2, where=str(tmp_path))
    row = plan_target._row("cartpole-a2c", 300.0, settings, print)
    assert row["best"] == plan_target.UNCHANGED
    assert (row["missed"]["fails"], row["unfinished"]) == (2, 1)
    assert row["planning_seconds"] >= 0
    assert (row["default_over_choice"], row["choice_over_best"]) == (0.0, None)
    result = plan_target.measure(settings, print)
    assert (result["least_default_over_choice"], result["greatest_choice_over_best"]) == (0.0, None)


def test_no_plan_is_judged_by_the_seeds_it_was_made_from_also_after_an_interruption(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = recipe("cartpole-a2c")
    line = Line(1e-3, 0.0, (1e-3, 1e-3), (0.0, 0.0), (1, 64), 0.0)
    measured, trained = list[str](), list[int]()
    interrupt_at = [1, 10]  # numbers of finished trainings: within those of the plan, and after them

    def add_variants(profile: DeviceProfile, run: Run, log: Any, keep: Any) -> None:
        if not profile.recipes:
            measured.append(run.recipe)
            lines = dict.fromkeys(PRIMITIVES, line)
            profile.recipes[key(run)] = RecipeCosts(lines, dict.fromkeys(PRIMITIVES, 1.0), 0.0, 99)
            keep()

    def to_target(tried: Run, target: float, seed: int) -> Training:
        if interrupt_at and len(trained) == interrupt_at[0]:
            del interrupt_at[0]
            raise KeyboardInterrupt
        trained.append(seed)
        return Training(1.0, 1.0, True)

    choice = Candidate(plan_target.UNCHANGED, run, 1.0, "", "", Prediction(1.0, 1.0, {}, "learner", 1.0, 1.0))
    monkeypatch.setattr(plan_target.costs, "add_variants", add_variants)
    monkeypatch.setattr(plan_target, "runs_with_exchange", lambda *_: [])
    monkeypatch.setattr(plan_target.learning, "factor_pairs", lambda *_: [])
    monkeypatch.setattr(plan_target.learning, "to_target", to_target)
    monkeypatch.setattr(plan_target, "search", lambda *_: [choice])
    monkeypatch.setattr("murmurate.mapping.choice.search", lambda *_, **__: [choice])
    settings = plan_target.PlanTargetPlan(trials=1, finalists=1, seeds=3, where=str(tmp_path))
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            plan_target._row("cartpole-a2c", 300.0, settings, lambda line: None)
    plan_target._row("cartpole-a2c", 300.0, settings, lambda line: None)
    assert len(measured) == 1
    assert trained[:8] == [*range(8)]  # the plan's
    assert len(set(trained)) == len(trained) == 8 + 1 + 3


def test_names_with_dots_have_logs_of_their_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    logs: list[str] = []

    def trained(words: list[str], output: Path) -> int:
        logs.append(output.name)
        folder = Path(words[words.index("--out") + 1])
        folder.mkdir()
        (folder / "summary.json").write_text('{"exit": "finished", "env_steps": 3000}')
        return 0

    monkeypatch.setattr(_resumable, "murmurate", trained)
    settings = dataclasses.replace(memr.QUICK, where=str(tmp_path))
    for seed in (0, 1):
        run = memr.planned(settings, "inverted-pendulum", "memr-alpha-0.2", seed)
        _resumable._train_to(run, 3000)
        assert logs[-1] == f"{run.folder.name}.log"
    assert len(set(logs)) == 2
