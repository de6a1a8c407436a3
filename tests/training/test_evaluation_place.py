"""On which device, and with how many threads, a run's checkpoint is evaluated, and what becomes of a figure
that is not finite."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from murmurate.cli.main import main
from murmurate.evaluation.games import Games
from murmurate.evaluation.held_out import HeldOutRows
from murmurate.evaluation.interface import EvalContext
from murmurate.recipes import recipe
from murmurate.spec import Placement
from murmurate.training import evaluate, threads
from murmurate.training.evaluate import evaluate_folder, figures
from murmurate.training.run_folder import locked
from murmurate.training.threads import all_threads, keeping_threads
from short_runs import altered, train


@dataclass(frozen=True)
class _Where(HeldOutRows):
    def evaluate(self, learner: Any, context: EvalContext) -> dict[str, Any]:
        return {"threads": torch.get_num_threads(), "device": learner.replica.device.type}


def test_a_data_set_s_evaluation_has_all_cores_where_no_process_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.save(tmp_path / "rows.npy", np.random.default_rng(0).normal(size=(100, 2)))
    run = recipe("table-gmm")
    world = dataclasses.replace(run.world, path=str(tmp_path / "rows.npy"))  # type: ignore[type-var]
    run = altered(run, world=world, launcher="inline", env_steps=None, updates=1)
    monkeypatch.setattr(evaluate, "all_threads", lambda: 3)
    folder = tmp_path / "run"
    with keeping_threads():
        train(run, folder)
        run, last = altered(run, evaluation=_Where()), folder / "checkpoints" / "last"
        assert figures(run, last) == {"threads": 3, "device": "cpu"}
        assert evaluate_folder(run, folder)["threads"] == 3
        with locked(folder):  # as by a process that goes on with the run
            assert figures(run, last)["threads"] == 1
            assert figures(run, last, alone=True)["threads"] == 3


@dataclass(frozen=True)
class _NotFinite(Games):
    mean = 1.0

    def evaluate(self, learner: Any, context: EvalContext) -> dict[str, Any]:
        error, games = np.float32(np.nan), torch.tensor(1)
        found = {"eval_return_mean": self.mean, "episodes": games, "eval_figure_error": error}
        return found | {"returns": [1.0]}


@dataclass(frozen=True)
class _NoMean(_NotFinite):
    mean = math.nan


def test_a_figure_that_is_not_finite_is_null_where_json_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = altered(recipe("cartpole-a2c"), launcher="inline", updates=1, simulators=2)
    train(dataclasses.replace(run, evaluation=_NotFinite()), folder := tmp_path / "run")
    summary = json.loads((folder / "summary.json").read_text(), parse_constant=pytest.fail)
    assert (summary["eval_return_mean"], summary["eval_figure_error"], summary["episodes"]) == (1.0, None, 1)
    evaluated = dataclasses.replace(run, evaluation=_NoMean())
    monkeypatch.setattr("murmurate.recipes.stored", lambda *_: evaluated)
    capsys.readouterr()
    assert main(["eval", str(folder)]) == 0
    assert "nan" in capsys.readouterr().out, "what was evaluated is said, although it is not finite"
    assert main(["eval", str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert (found["eval_return_mean"], found["episodes"]) == (None, 1)


def test_a_run_whose_main_figure_is_not_finite_says_so(tmp_path: Path) -> None:
    run = altered(recipe("cartpole-a2c"), launcher="inline", updates=1, simulators=2)
    finish = train(dataclasses.replace(run, evaluation=_NoMean()), tmp_path / "run")
    expected = "Its evaluation gave no finite figure, or there was nothing to evaluate on."
    assert finish.sentence == expected


def test_it_has_the_first_gpu_if_that_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    def device(recipe_name: str, *devices: str, alone: bool = True) -> torch.device:
        run = dataclasses.replace(recipe(recipe_name), placement=Placement(devices=devices))
        return evaluate._place(run, alone)[0]

    cpu, images = torch.device("cpu"), "fashion-resnet20"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device(images, "cuda:0") == cpu
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**33, 2**34))
    assert device(images, "cuda:1", "cpu") == torch.device("cuda:1")
    assert device(images, "cpu", "cuda:1") == cpu
    assert device(images, "cuda:2") == cpu
    assert device(images, "cuda:0", alone=False) == cpu
    assert device("cartpole-a2c", "cuda:0") == cpu
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**29, 2**34))  # others have the rest
    assert device(images, "cuda:0") == cpu


def test_the_environment_bounds_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    every = all_threads()
    assert every >= 1
    for text, allowed in (("1", 1), ("1,2", 1), ("4096", every), ("", every), ("many", every)):
        monkeypatch.setenv("OMP_NUM_THREADS", text)
        assert all_threads() == allowed


def test_all_threads_where_physical_cores_are_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(threads, "usable_cores", lambda: 6)
    for physical, found in ((None, 6), (3, 3), (8, 6)):
        monkeypatch.setattr(threads.psutil, "cpu_count", lambda logical, found=physical: found)
        assert all_threads() == found
