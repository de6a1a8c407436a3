"""The benches of model-based agents: their runs, and the figures of given measurements."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from murmurate.bench import _resumable, memr, model_ensemble
from murmurate.bench._ensemble_racer import KINDS
from murmurate.bench._racer import RaceWindow
from murmurate.cli.options import change
from murmurate.errors import Refusal
from murmurate.recipes import recipe


def windows(*rates: float) -> list[RaceWindow]:
    return [RaceWindow(int(rate * 10), 10.0, 10.0) for rate in rates]


def test_ratios_are_medians_over_rounds() -> None:
    found = model_ensemble.figures(
        {
            "ours float32": windows(100, 120, 90),
            "ours bfloat16": windows(200, 240, 150),
            "autograd float32": windows(50, 50, 50),
            "limit float32": windows(200, 150, 100),
            "limit bfloat16": windows(400, 300, 300),
            "mbrl": windows(50, 60, 30),
        }
    )
    assert found["float32_ratio_limit"] == pytest.approx(0.8)
    assert found["float32_ratio_mbrl"] == pytest.approx(2.0)
    assert found["bfloat16_ratio_mbrl"] == pytest.approx(4.0)
    assert found["float32_ratio_autograd"] == pytest.approx(2.0)
    assert found["ratio_mbrl"] == found[f"{found['precision']}_ratio_mbrl"]


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_racer_makes_steps(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("murmurate.bench._ensemble_racer.ROWS", 512)
    assert KINDS[kind]("float32")() == (1 if kind == "limit" else 2)


@pytest.mark.parametrize("task", sorted(memr.BUDGETS))
@pytest.mark.parametrize("agent", sorted(memr.AGENTS))
def test_every_planned_run_stands(task: str, agent: str) -> None:
    pytest.importorskip("mujoco")
    planned = memr.planned(memr.FULL, task, agent, seed=1)
    run = change(recipe(planned.recipe), [*planned.settings, "--env-steps", str(planned.ends[-1])], "")
    run.validate()
    assert run.env_steps == memr.BUDGETS[task][0]
    assert run.seed == 1


def test_unknown_tasks_and_agents_are_refused() -> None:
    with pytest.raises(Refusal, match="hopper"):
        memr.planned(memr.FULL, "hoppper", "memr", 0)
    with pytest.raises(Refusal, match="memr"):
        memr.planned(memr.FULL, "hopper", "mmer", 0)


def test_runs_of_another_length_have_another_page(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pages: list[str] = []
    monkeypatch.setattr(_resumable, "report", lambda folders, page: pages.append(page.name))
    for env_steps in (0, 3_000):
        plan = dataclasses.replace(memr.FULL, env_steps=env_steps, where=str(tmp_path))
        runs = {("hopper", "sac", seed): memr.planned(plan, "hopper", "sac", seed) for seed in (0, 1)}
        _resumable.reports(runs, plan.where)
    assert pages == ["hopper-to-70000.html", "hopper-to-3000.html"]


def test_claims_compare_memr_with_mbpo() -> None:
    def row(agent: str, mean: float, deviation: float, updates: float, imagined: float) -> dict[str, object]:
        return {
            "task": "hopper", "agent": agent, "mean": mean, "deviation": deviation, "diverged": 0,
            "policy_updates": updates, "imagined_transitions": imagined,
        }  # fmt: skip

    mbpo = row("mbpo", 3000.0, 200.0, 1_300_000, 60e6)
    (claim,) = memr.claims([mbpo, row("memr", 2850.0, 10.0, 325_000, 6e6)])
    assert claim["reached"]
    assert claim["share_of_updates"] == pytest.approx(0.25)
    assert claim["share_of_imagined_transitions"] == pytest.approx(0.1)
    (claim,) = memr.claims([mbpo, row("memr", 2700.0, 500.0, 325_000, 6e6)])
    assert not claim["reached"], "it is MBPO's deviation that counts"
    assert memr.claims([mbpo]) == []
    (claim,) = memr.claims([mbpo | {"policy_updates": 0}, row("memr", 2700.0, 500.0, 325_000, 6e6)])
    assert claim["share_of_updates"] is None
    (claim,) = memr.claims([mbpo, row("memr", 2850.0, 10.0, 325_000, 6e6) | {"diverged": 1}])
    assert not claim["reached"], "survivors alone are not judged"
    (claim,) = memr.claims(
        [mbpo | {"mean": 42.0, "deviation": None}, row("memr", 2850.0, 10.0, 325_000, 6e6)]
    )
    assert claim["reached"] is None, "one seed of MBPO is no comparison"


def test_the_curve_has_the_evaluations_that_all_runs_have() -> None:
    class Recorded:
        run: ClassVar[dict[str, Any]] = {"evaluate_every_env_steps": 30}

        def __init__(self, env_steps: list[float], mean: list[float]) -> None:
            self.evaluations = SimpleNamespace(env_steps=env_steps, mean=mean) if mean else None

    runs = [Recorded([30, 60, 90], [1, 2, 3]), Recorded([32, 66], [5, 10])]
    assert memr._curve(runs) == [  # type: ignore[arg-type]
        {"env_steps": 31.0, "return": 3.0},
        {"env_steps": 63.0, "return": 6.0},
    ]
    without_the_second = Recorded([30, 91], [1, 2])  # the first evaluation took so long
    assert memr._curve([without_the_second, runs[0]]) == [  # type: ignore[list-item]
        {"env_steps": 30.0, "return": 1.0},
        {"env_steps": 90.5, "return": 2.5},
    ]
    assert memr._curve([*runs, Recorded([], [])]) == memr._curve([]) == []  # type: ignore[list-item]


def test_a_diverged_seed_counts_in_no_mean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plan = dataclasses.replace(memr.QUICK, where=str(tmp_path))
    runs = {seed: memr.planned(plan, "inverted-pendulum", "sac", seed) for seed in (0, 1)}
    opened: list[str] = []
    monkeypatch.setattr(memr, "open_run", lambda folder: opened.append(folder.name))
    monkeypatch.setattr(memr, "_last", lambda run, key: 6.0)
    monkeypatch.setattr(memr, "_curve", lambda runs: [])
    exits = ("finished", "failed: the loss of replica 0 is nan")
    summaries = {
        ("inverted-pendulum", "sac", seed): {
            "eval_return_mean": 9.0, "exit": exits[seed], "updates": 100 - 99 * seed, "wall_seconds": 1.0
        }
        for seed in runs
    }  # fmt: skip
    row = memr._row("inverted-pendulum", "sac", runs, summaries)
    assert (row["diverged"], row["policy_updates"], row["imagined_transitions"]) == (1, 100, 6.0)
    assert opened == [runs[0].folder.name]
