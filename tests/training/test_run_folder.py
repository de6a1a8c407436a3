"""The run folder: what is written comes back the same, and never half."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from murmurate.cli.options import change
from murmurate.errors import Refusal
from murmurate.recipes import recipe
from murmurate.spec import Placement
from murmurate.strategies import strategies
from murmurate.training.run_folder import claim, read_run, unclaim, write_json, write_roles, write_run

_CHANGES = {
    "cartpole-gala": "--replicas 7 --env-steps none --updates 9 --minutes 1.5 --seed 123456789012345",
    "cartpole-a2c": "--agent.learning-rate 1e-05 --agent.optimizer adam --agent.normalize-advantages true",
    "pong-gala": "--agent.precision bfloat16 --world.sticky 0.25 --world.noop-max 0 --stop-at-return 18",
    "space-invaders-a2c": "--double-buffer --simulators 3 --placement.devices cpu,cuda:0",
    "hopper-a2c": "--world.max-episode-steps 10 --agent.recurrent 8 --probe-every-updates 0",
}


@pytest.mark.parametrize("strategy", sorted(strategies()))
@pytest.mark.parametrize("name", _CHANGES)
def test_a_run_comes_back_as_it_was_written(name: str, strategy: str, tmp_path: Path) -> None:
    run = dataclasses.replace(recipe(name), strategy=_unusual(strategies()[strategy]()))
    changed = change(run, _CHANGES[name].split(), "")
    assert changed != run
    write_run(tmp_path, changed)
    back = read_run(tmp_path, recipe)
    assert back == changed
    assert type(back.strategy) is type(changed.strategy)
    assert isinstance(back.placement, Placement)
    assert isinstance(back.placement.devices, tuple)


def _unusual(strategy: Any) -> Any:
    """Every field another value than its default."""
    other: dict[str, Any] = {}
    for field in dataclasses.fields(strategy):
        if field.init:
            other[field.name] = _another(getattr(strategy, field.name))
    return dataclasses.replace(strategy, **other)


def _another(value: Any) -> Any:
    if isinstance(value, str):
        return {
            "ring": "complete",
            "complete": "ring",
            "exponential": "ring",
            "pull": "push",
            "present": "pulled",
        }[value]
    if isinstance(value, bool):
        return not value
    if isinstance(value, float):
        return value / 2 + 0.1  # a weight stays one
    return 0.5 if value is None else value + 3


def test_run_json_names_versions_hardware_and_command(tmp_path: Path) -> None:
    write_run(tmp_path, recipe("cartpole-gala"))
    stored = json.loads((tmp_path / "run.json").read_text())
    assert {"murmurate", "python", "torch"} <= stored["versions"].keys()
    assert stored["hardware"]["cores"] == os.cpu_count()
    assert stored["strategy"]["name"] == "gala"
    assert stored["agent"]["name"] == "a2c"
    assert stored["command"]


def test_fields_that_a_later_version_added_are_ignored_and_absent_ones_keep_their_default(
    tmp_path: Path,
) -> None:
    run = dataclasses.replace(recipe("cartpole-gala"), seed=9)
    write_run(tmp_path, run)
    stored = json.loads((tmp_path / "run.json").read_text())
    stored["tomorrow"] = 1
    stored["agent"]["tomorrow"] = 1
    del stored["eval_episodes"]
    (tmp_path / "run.json").write_text(json.dumps(stored))
    assert read_run(tmp_path, recipe) == run


def test_json_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "summary.json"
    write_json(path, {"a": 1})

    def crash(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", crash)
    with pytest.raises(KeyboardInterrupt):
        write_json(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 1}


def test_a_claimed_folder_is_claimed_once(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "run"
    claim(folder)
    assert (folder / "checkpoints").is_dir()
    with pytest.raises(Refusal, match="not empty"):
        claim(folder)
    write_run(folder, recipe("cartpole-gala"))
    with pytest.raises(Refusal, match="murmurate resume"):
        claim(folder)


@pytest.mark.parametrize("existed", [True, False])
def test_an_unclaimed_folder_is_as_before(existed: bool, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    if existed:
        folder.mkdir()
    claim(folder)
    write_run(folder, recipe("cartpole-gala"))
    unclaim(folder, existed)
    assert folder.exists() == existed
    assert not existed or list(folder.iterdir()) == []


def test_roles_are_named_with_process_and_host(tmp_path: Path) -> None:
    write_roles(tmp_path, {0: 11, 1: None, 2: 12}, replicas=2)
    lines = [json.loads(line) for line in (tmp_path / "roles.jsonl").read_text().splitlines()]
    here = {"role": "replica", "host": socket.gethostname()}
    assert lines == [
        {**here, "index": 0, "pid": 11},
        {**here, "index": 1, "pid": os.getpid()},
        {**here, "role": "center", "index": 0, "pid": 12},
    ]
