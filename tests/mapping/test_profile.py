"""A device profile is stored whole, and what is no profile is refused."""

from __future__ import annotations

import dataclasses
import errno
import json
import math
from pathlib import Path
from typing import Any

import pytest

from murmurate.errors import Refusal
from murmurate.mapping.learning import Learning
from murmurate.mapping.lines import Line
from murmurate.mapping.primitives import PRIMITIVES
from murmurate.mapping.profile import DeviceProfile, Link, RecipeCosts, key, load, save
from murmurate.recipes import recipe


def a_profile() -> DeviceProfile:
    profile = DeviceProfile.here(2, "cpu")
    some = Line(1e-3, 2e-6, (9e-4, 1e-6), (1.1e-3, 3e-6), (2, 16))
    learning = Learning(400.0, 1e5, {"replicas": 0.7}, 4, 1)
    profile.recipes["one"] = RecipeCosts(
        dict.fromkeys(PRIMITIVES, some), dict.fromkeys(PRIMITIVES, 1.2), 0.1, 99, [(8, 64)], learning
    )
    profile.recipes["one"].vectors = [(90, 1.0), (9, 0.5)]
    profile.recipes["one"].shared_handover_seconds = 2e-4
    profile.recipes["one"].step_deviation = 0.3
    profile.exchange["gala x2"] = some
    profile.links["network"] = Link(1e-4, 1e9, "assumed")
    return profile


def test_costs_depend_on_placement_and_on_how_a_replay_stores_and_draws() -> None:
    run = recipe("pong-dqn")
    source: Any = run.source
    changed = [
        run,
        dataclasses.replace(run, placement=dataclasses.replace(run.placement, threads=4)),
        *(
            dataclasses.replace(run, source=dataclasses.replace(source, replay=replay))
            for replay in (
                dataclasses.replace(source.replay, alpha=0.0),
                dataclasses.replace(source.replay, images="device"),
                dataclasses.replace(source.replay, folder="replays"),
                dataclasses.replace(source.replay, ahead=50),
            )
        ),
    ]
    assert len({key(each) for each in changed}) == len(changed)
    sized = dataclasses.replace(source, simulators=2 * source.simulators)
    assert key(dataclasses.replace(run, source=sized)) == key(run)


def test_a_profile_is_loaded_as_it_was_saved(tmp_path: Path) -> None:
    profile = a_profile()
    save(profile, tmp_path / "p.json")
    assert load(tmp_path / "p.json") == profile


def test_an_older_profile_knows_no_handovers_on_shared_cores_nor_steps(tmp_path: Path) -> None:
    save(a_profile(), tmp_path / "p.json")
    stored = json.loads((tmp_path / "p.json").read_text())
    del stored["recipes"]["one"]["shared_handover_seconds"], stored["recipes"]["one"]["step_deviation"]
    (tmp_path / "p.json").write_text(json.dumps(stored))
    older = load(tmp_path / "p.json").recipes["one"]
    assert (older.shared_handover_seconds, older.step_deviation) == (None, None)


def test_a_profile_that_cannot_be_written_stays_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, write, profile = tmp_path / "p.json", Path.write_text, a_profile()
    save(profile, path)

    def disk_full(self: Path, text: str) -> int:
        write(self, text[:100])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", disk_full)
    with pytest.raises(OSError, match="No space"):
        save(profile, path)
    assert load(path) == profile
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("damage", ["", "[]", "{}", '{"format": 99}', "not json"])
def test_another_file_is_refused(tmp_path: Path, damage: str) -> None:
    (tmp_path / "p.json").write_text(damage)
    with pytest.raises(Refusal, match=r"no device profile .*Remove it, and measure again: murmurate plan"):
        load(tmp_path / "p.json")


@pytest.mark.parametrize("part", ["recipes", "exchange", "cores", "hardware"])
def test_a_profile_of_another_shape_is_refused(tmp_path: Path, part: str) -> None:
    save(a_profile(), tmp_path / "p.json")
    stored = json.loads((tmp_path / "p.json").read_text())
    stored["recipes"]["one"]["lines"].update(dance={}) if part == "recipes" else stored.pop(part)
    (tmp_path / "p.json").write_text(json.dumps(stored))
    if part == "hardware":  # it may be left out by hand
        assert load(tmp_path / "p.json").hardware == {}
        return
    with pytest.raises(Refusal, match="murmurate plan"):
        load(tmp_path / "p.json")


@pytest.mark.parametrize(
    "changed",
    [
        {"cores": 2.0},
        {"hardware": None},
        {"hardware": {"memory_bytes": None}},
        {"watts": "6"},
        {"watts": -6.0},
        {"links": {"network": {"latency_seconds": "fast", "bytes_per_second": 1e9}}},
        {"links": {"network": {"latency_seconds": 1e-4, "bytes_per_second": 0}}},
        {"links": {"network": {"latency_seconds": -1e-4, "bytes_per_second": 1e9}}},
        {
            "exchange": {
                "gala x2 {}": dict.fromkeys(("low", "high", "sizes"), (0, 1)) | {"a": math.nan, "b": 0.0}
            }
        },
    ],
)
def test_a_profile_that_was_edited_wrongly_is_refused(tmp_path: Path, changed: dict[str, Any]) -> None:
    save(a_profile(), tmp_path / "p.json")
    stored = json.loads((tmp_path / "p.json").read_text())
    (tmp_path / "p.json").write_text(json.dumps(stored | changed))
    with pytest.raises(Refusal, match="no device profile"):
        load(tmp_path / "p.json")


@pytest.mark.parametrize(("part", "value"), [("busy", {}), ("low", [1e-3]), ("width", "narrow")])
def test_costs_that_were_edited_wrongly_are_refused(tmp_path: Path, part: str, value: Any) -> None:
    save(a_profile(), tmp_path / "p.json")
    stored = json.loads((tmp_path / "p.json").read_text())
    costs = stored["recipes"]["one"]
    (costs if part == "busy" else costs["lines"]["act"])[part] = value
    (tmp_path / "p.json").write_text(json.dumps(stored))
    with pytest.raises(Refusal, match="no device profile"):
        load(tmp_path / "p.json")


def test_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match="murmurate plan"):
        load(tmp_path / "p.json")


def test_costs_depend_on_the_net_and_not_on_the_batch() -> None:
    run = recipe("cartpole-dqn")
    learner: Any = run.learner
    assert key(dataclasses.replace(run, learner=dataclasses.replace(learner, batch=128))) == key(run)
    assert key(dataclasses.replace(run, learner=dataclasses.replace(learner, hidden=99))) != key(run)
    assert key(recipe("pong-dqn")) != key(run)


def test_an_older_profile_is_loaded_and_knows_not_what_was_learned_with(tmp_path: Path) -> None:
    save(a_profile(), tmp_path / "p.json")
    stored = json.loads((tmp_path / "p.json").read_text())
    costs = stored["recipes"]["one"]
    for name in ("missed", "of"):
        del costs["learning"][name]
    del costs["vectors"]
    for line in (*costs["lines"].values(), *stored["exchange"].values()):
        del line["width"]
    (tmp_path / "p.json").write_text(json.dumps(stored))
    loaded = load(tmp_path / "p.json").recipes["one"]
    assert loaded.learning is not None
    assert (loaded.learning.of, loaded.lines["act"].width, loaded.vectors) == ("", None, [])
