"""``murmurate plan`` as a user calls it: it measures once, predicts, explains, and refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from murmurate.cli.main import main
from murmurate.mapping import exchange, measure
from murmurate.mapping.profile import load, save
from pictures import write_folder

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the profile that a first plan left."""
    place = tmp_path_factory.mktemp("plan")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.setattr(measure, "SECONDS", 0.3)
        patch.setattr(exchange, "SIZES", (10_000, 100_000))
        assert main(["plan", "cartpole-a2c", "--page", "plan.html"]) == 0
    return place


@pytest.fixture(autouse=True)
def in_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


def planned(capsys: Capture, *words: str) -> list[dict[str, Any]]:
    assert main(["plan", "cartpole-a2c", "--json", *words]) == 0
    rows: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return rows


def test_candidates_are_listed_best_first(capsys: Capture) -> None:
    rows = planned(capsys)
    assert len(rows) > 10
    assert all({"name", "predicted", "unit", "why"} <= set(row) for row in rows)
    values = [row["predicted"] for row in rows]
    assert values == sorted(values, reverse=True)
    assert rows[0]["why"].startswith("best")
    assert any(row["name"] == "as the recipe is" for row in rows)
    assert "--strategy" in " ".join(word for row in rows for word in row["changes"])


def test_own_options_are_part_of_the_command_and_a_new_profile_may_be_anywhere(
    folder: Path, capsys: Capture
) -> None:
    own = ["--simulators", "4", "--strategy", "gala"]
    words = ["plan", "cartpole-a2c", *own, "--profile", "--on", "elsewhere.json"]
    assert main([*words, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert (folder / "elsewhere.json").is_file()
    assert all(row["changes"][:4] == ["--strategy", "gala", "--simulators", "4"] for row in rows)
    assert main(words[:-3]) == 0
    assert "murmurate train cartpole-a2c --strategy gala --simulators 4" in capsys.readouterr().out
    assert main(["plan", "cartpole-a2c", "--on", "nowhere.json"]) == 2
    assert "--profile --on FILE" in capsys.readouterr().err


def test_a_second_plan_measures_nothing(folder: Path, capsys: Capture) -> None:
    before = (folder / "runs" / "profile.json").read_bytes()
    assert main(["plan", "cartpole-a2c", "--json"]) == 0
    assert "measuring" not in capsys.readouterr().err
    assert (folder / "runs" / "profile.json").read_bytes() == before


def test_the_page_stands_alone(folder: Path) -> None:
    html = (folder / "plan.html").read_text()
    text, images = re.subn(r"data:image/png;base64,[A-Za-z0-9+/=]+", "", html)
    assert images == 3
    assert "http" not in text.replace("http-equiv", "")
    assert "simulate: one step of all simulators" in html


def test_energy_needs_the_power_of_a_core(capsys: Capture) -> None:
    assert main(["plan", "cartpole-a2c", "--objective", "energy"]) == 2
    assert "--watts" in capsys.readouterr().err
    rows = planned(capsys, "--objective", "energy", "--watts", "6")
    assert rows[0]["unit"] == "J per 1,000 env steps"
    assert rows[0]["predicted"] == pytest.approx(
        6000 * rows[0]["busy_cores"] / rows[0]["env_steps_per_second"]
    )


def test_the_time_to_a_target_needs_a_target(capsys: Capture) -> None:
    assert main(["plan", "cartpole-a2c", "--objective", "time"]) == 2
    assert "--target" in capsys.readouterr().err


def test_a_profile_of_other_settings_is_refused(folder: Path, capsys: Capture) -> None:
    profile = load(folder / "runs" / "profile.json")
    profile.hardware["cpu"] = "another processor"
    save(profile, folder / "other.json")
    assert main(["plan", "cartpole-dqn", "--on", "other.json"]) == 2
    assert "murmurate plan cartpole-dqn --profile" in capsys.readouterr().err
    assert (
        main(["plan", "cartpole-a2c", "--on", "other.json", "--json"]) == 0
    )  # another machine can be planned for
    capsys.readouterr()
    assert main(["plan", "cartpole-a2c", "--on", "other.json", "--profile"]) == 2
    assert "another machine" in capsys.readouterr().err


def test_a_recipe_whose_batches_are_not_modelled_is_refused(capsys: Capture) -> None:
    assert main(["plan", "hopper-mbpo"]) == 2
    assert "hopper-mbpo learns from model, whose costs are not modelled" in capsys.readouterr().err


def test_more_hosts_go_through_a_simulated_network(capsys: Capture) -> None:
    rows = planned(capsys, "--hosts", "2", "--simulators", "4")
    assert all("--replicas" in row["name"] for row in rows)
    assert rows[0]["predicted"] > 0


def test_images_are_planned_with_their_decoding_processes(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cv2")
    monkeypatch.setattr(measure, "SECONDS", 0.2)
    monkeypatch.setattr(exchange, "SIZES", (10_000, 100_000))
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
    assert "reading and augmenting examples" in (tmp_path / "plan.html").read_text()
    assert main([*words, "--target", "300"]) == 2
    assert "learns from images, which have no returns to reach" in capsys.readouterr().err
