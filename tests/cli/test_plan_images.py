"""Plans of recipes that learn from images."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from plans import Capture, without_measuring_threads

from murmurate.cli.main import main
from murmurate.errors import Refusal
from murmurate.mapping import exchange, rounds
from murmurate.mapping.lines import Line
from murmurate.mapping.pilot import Pilot
from murmurate.training.run import Run
from pictures import write_folder


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    without_measuring_threads(monkeypatch)


def test_images_are_planned_with_their_decoding_processes(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cv2")
    pilots: dict[str, Pilot] = {}
    measured = rounds.measure

    def measured_once(run: Run, seconds: float, busy: int = 1) -> Pilot:
        """Each size once, and alone: the profile of ``folder`` was measured with all cores busy, too."""
        if repr(run) not in pilots:
            pilots[repr(run)] = measured(run, seconds)
        return pilots[repr(run)]

    monkeypatch.setattr(rounds, "measure", measured_once)
    monkeypatch.setattr(rounds, "_SECONDS", 0.2)
    monkeypatch.setattr(rounds, "_MOST_ROUNDS", 1)
    line = Line(1e-4, 1e-9, (1e-4, 1e-9), (1e-4, 1e-9), (10_000, 100_000))
    monkeypatch.setattr(exchange, "measure", lambda *_: line)
    monkeypatch.chdir(tmp_path)
    images = write_folder(tmp_path / "images")
    words = [
        "plan",
        "folder-resnet18",
        "--world.path",
        images,
        "--world.size",
        "32",
        "--world.shortest",
        "36",
    ]
    assert main([*words, "--agent.width", "8", "--agent.batch", "4", "--json", "--page", "plan.html"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["unit"] for row in rows} == {"images/s"}
    options = " ".join(word for row in rows for word in row["changes"])
    assert all(option in options for option in ("--workers 0", "--agent.batch 16", "--replicas 2"))
    assert all(row["predicted"] > 0 for row in rows)
    html = (tmp_path / "plan.html").read_text()
    assert "reading and augmenting examples" in html
    assert "measured images/s" in html
    assert "env steps" not in html
    assert main([*words, "--target", "300"]) == 2
    assert "learns from images, which have no returns to reach" in capsys.readouterr().err


def test_an_end_that_is_given_takes_the_place_of_a_number_of_examples_as_in_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cv2")
    planned: list[Run] = []

    def seen(run: Run, *_: Any) -> None:
        planned.append(run)
        raise Refusal("nothing is to be measured")

    monkeypatch.setattr("murmurate.cli.plan._profile", seen)
    images = ["--world.path", write_folder(tmp_path / "images")]
    assert main(["plan", "folder-resnet18", *images]) == 2
    assert main(["plan", "folder-resnet18", *images, "--minutes", "2"]) == 2
    assert [(run.env_steps is None, run.minutes) for run in planned] == [(False, None), (True, 2.0)]
