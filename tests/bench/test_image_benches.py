"""The image benches, without their trainings: what they plan and how they sum up."""

import dataclasses
import subprocess
from pathlib import Path
from typing import Any, cast

import pytest

from murmurate.bench import image_strategies, resnet_parity, resnet_throughput
from murmurate.bench._image_loaders import AUGMENT
from murmurate.bench._racer import RaceWindow
from murmurate.cli.options import change
from murmurate.errors import Refusal
from murmurate.recipes import recipe
from murmurate.sources.images import ImageSourceConfig
from pictures import write_fashion


def test_a_row_has_the_spread_over_seeds():
    runs = [
        {"exit": "finished", "accuracy": a, "test_loss": 1.0, "disagreement_final": 0.0, "staleness_max": 0,
         "wall_seconds": 1.0}
        for a in (0.9, 0.8)
    ]  # fmt: skip
    row = image_strategies.row(
        "gala", [*runs, {"exit": "failed: the loss of replica 0 is nan", "wall_seconds": 1.0}]
    )
    assert row["accuracy"] == pytest.approx(0.85)
    assert row["deviation"] == pytest.approx(0.0707, abs=1e-3)
    assert row["diverged"] == 1


def test_runs_of_strategies_differ_in_their_strategy_alone():
    plan = image_strategies.FULL
    one, other = (image_strategies.planned(plan, name, 0) for name in ("gala", "elastic"))
    assert [w for w in one.settings if w not in other.settings] == ["gala"]
    assert one.folder != other.folder
    with pytest.raises(Refusal, match="elastic"):
        image_strategies.planned(plan, "elastik", 0)


def test_ratios_are_to_the_faster_plain_loop():
    windows = {
        "ours": [RaceWindow(120, 10.0, 6.0)] * 3,
        "ddp same": [RaceWindow(100, 10.0, 6.0)] * 3,
        "ddp pillow": [RaceWindow(80, 10.0, 4.0)] * 3,
    }
    figures = resnet_throughput.figures(windows)
    assert figures["ratio_ddp"] == pytest.approx(1.2)
    assert figures["images_per_cpu_second"] == pytest.approx(12)
    assert figures["ratios_wall"]["ddp pillow"] == pytest.approx(1.0)
    assert figures["ratio_accelerate"] is None


def test_our_racer_changes_images_as_the_plain_loops_do(tmp_path: Path) -> None:
    pytest.importorskip("cv2")
    plan = dataclasses.replace(resnet_throughput.QUICK, images=1, height=16, width=16)
    words = resnet_throughput.racers(plan, tmp_path)["ours"].command
    options = words[words.index("--world.path") : words.index("--out")]
    run: Any = change(recipe("folder-resnet18"), options, "")
    assert cast(ImageSourceConfig, run.source).augment == AUGMENT


def test_accelerates_environment_finds_this_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cv2")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setenv("MURMURATE_PEERS", str(tmp_path))
    python = tmp_path / "accelerate" / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\ntest -f "$PYTHONPATH/murmurate/bench/_plain_images.py"\n')
    python.chmod(0o755)
    plan = dataclasses.replace(resnet_throughput.QUICK, images=1, height=16, width=16)
    subprocess.run(resnet_throughput.racers(plan, tmp_path)["accelerate"].command, check=True)


def test_loading_alone_cuts_crops_of_the_trainings_size(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[Any] = []
    windows = {label: [RaceWindow(100, 10.0, 6.0)] for label in ("ours", "ddp same", "ddp pillow")}
    monkeypatch.setattr(resnet_throughput, "race", lambda *_: windows)
    monkeypatch.setattr(
        resnet_throughput.image_loading,
        "measure",
        lambda plan, _: loaded.append(plan) or {"ratio_pillow": 2.0},
    )
    plan = dataclasses.replace(resnet_throughput.QUICK, size=96)
    assert resnet_throughput.measure(plan, print)["ratio_loader"] == 2.0
    assert loaded[0].size == 96


def test_a_loss_that_is_nan_equals_no_other():
    differences = resnet_parity.difference([1.0, float("nan"), 1.0, 1.0, 1.0], [0.5, 1.0, 1.0, 1.0, 1.0])
    assert resnet_parity.largest_differences(differences) == {"1": 0.5, "5": float("inf")}
    assert resnet_parity.equal_steps(differences[1:]) == 0
    assert resnet_parity.equal_steps([0.0, 1e-5]) == 2


def test_images_that_make_no_batch_of_a_plain_loop_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resnet_throughput.image_loading, "measure", lambda *_: pytest.fail("it began"))
    plan = dataclasses.replace(resnet_throughput.QUICK, images=100, batch=64)
    with pytest.raises(Refusal, match=r"--images is 100, and a step takes 128 of them. Use --images 128"):
        resnet_throughput.measure(plan, print)


@pytest.mark.slow  # 12 s of CPU
def test_the_classifier_is_the_plain_loop(tmp_path):
    """In float64 the losses of the first steps are the same, with augmentation and schedule."""
    plan = resnet_parity.ParityPlan(path=write_fashion(tmp_path, train=60), steps=3)
    run = resnet_parity.planned(plan, 4, 0, 12, "float32")
    with resnet_parity.float64():
        ours, plain = resnet_parity.first_losses(run, 3), resnet_parity.PlainLoop(run).first_losses(run, 3)
    assert ours == pytest.approx(plain, rel=1e-9)
    assert ours[0] != pytest.approx(ours[2], rel=1e-3)


@pytest.mark.slow  # two trainings and tests
def test_accuracies_are_of_ours_and_of_the_plain_loop_and_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = resnet_parity.ParityPlan(path=write_fashion(tmp_path, train=60), batch=4, images=12, seeds=1)
    first = resnet_parity.accuracies(plan, tmp_path, print)
    assert all(0 <= each <= 1 for each in (*first["accuracies"], *first["plain_accuracies"]))
    monkeypatch.setattr(resnet_parity, "accuracy", lambda *_, **__: pytest.fail("it trains again"))
    assert resnet_parity.accuracies(plan, tmp_path, print) == first
