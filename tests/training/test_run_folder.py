"""The run folder: what is written comes back the same, and never half."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from murmurate.cli.options import change
from murmurate.errors import Refusal, RunFailed
from murmurate.recipes import recipe
from murmurate.record.stored import read_object, replacing, seal, write_json
from murmurate.spec import Placement
from murmurate.strategies import strategies
from murmurate.training.run_folder import (
    claim,
    locked,
    read_run,
    restored_if_refused,
    set_aside,
    unclaim,
    write_roles,
    write_run,
)

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


def test_a_run_that_could_not_be_read_again_is_refused(tmp_path: Path) -> None:
    run = change(recipe("corpus-lda"), ["--world.path", os.fsdecode(b"/data/caf\xe9.txt")], "")
    with pytest.raises(Refusal, match=r"is not UTF-8, so run\.json could not be read again"):
        write_run(tmp_path, run)
    assert not any(tmp_path.iterdir())


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
            "replica": "node",
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


@pytest.mark.parametrize(
    ("place", "old", "new", "words"),
    [
        ("agent", "learning_rate", "learnin_rate", "no field is called 'learnin_rate'"),
        ("", "simulators", "simulator", "no field is called 'simulator'"),
        ("agent", "learning_rate", None, "learning_rate is missing"),
        ("", "eval_episodes", None, "eval_episodes is missing"),
        ("strategy", "topology", 3, "topology is 3"),
        ("agent", "name", "dqn", "name is 'dqn' and not 'a2c'"),
        ("agent", "optimizer", "sgd", "optimizer is 'sgd'"),
        ("placement", "devices", [1], r"devices is \[1\]"),
        ("", "seed", 10**4000, "seed is 1000"),
        ("world", None, [], r"\[\] for the fields"),
    ],
)
def test_a_field_that_is_unknown_missing_or_of_another_type_is_refused_by_name(
    place: str, old: str | None, new: Any, words: str, tmp_path: Path
) -> None:
    write_run(tmp_path, recipe("cartpole-gala"))
    stored = json.loads((tmp_path / "run.json").read_text())
    part = stored[place] if place else stored
    if old is None:
        stored[place] = new
    elif isinstance(new, str) and new.startswith(old[:5]):
        part[new] = part.pop(old)
    elif new is None:
        del part[old]
    else:
        part[old] = new
    (tmp_path / "run.json").write_text(json.dumps(seal(stored, "run.json")))
    with pytest.raises(Refusal, match=words):
        read_run(tmp_path, recipe)


@pytest.mark.parametrize(
    "damage",
    [("learning_rate", "learnin_rate"), ('"seed": 0', '"seed": 1'), ('"checksum"', '"checksun"')],
)
def test_a_run_file_that_is_not_as_it_was_written_is_refused(damage: tuple[str, str], tmp_path: Path) -> None:
    write_run(tmp_path, recipe("cartpole-gala"))
    path = tmp_path / "run.json"
    text = path.read_text()
    assert damage[0] in text
    path.write_text(text.replace(*damage, 1))
    with pytest.raises(Refusal, match=r"changed since murmurate wrote it|corrupt"):
        read_run(tmp_path, recipe)


@pytest.mark.parametrize("file_format", [2, 5])
def test_a_checksum_is_required_since_format_2(file_format: int, tmp_path: Path) -> None:
    write_run(tmp_path, recipe("cartpole-gala"))
    stored = json.loads((tmp_path / "run.json").read_text()) | {"format": file_format}
    del stored["checksum"]
    (tmp_path / "run.json").write_text(json.dumps(stored))
    with pytest.raises(Refusal, match=r"run\.json is corrupt"):
        read_run(tmp_path, recipe)


def test_a_run_file_of_before_checksums_is_read_with_the_present_defaults_and_a_warning(
    tmp_path: Path,
) -> None:
    run = dataclasses.replace(recipe("cartpole-gala"), seed=9)
    write_run(tmp_path, run)
    stored = json.loads((tmp_path / "run.json").read_text())
    for name in ("format", "checksum", "eval_episodes", "restarts"):
        del stored[name]
    (tmp_path / "run.json").write_text(json.dumps(stored))
    with pytest.warns(UserWarning, match="has no restarts, eval_episodes|has no eval_episodes, restarts"):
        assert read_run(tmp_path, recipe) == run
    stored["agent"]["gae_lambd"] = stored["agent"].pop("gae_lambda")
    (tmp_path / "run.json").write_text(json.dumps(stored))
    with pytest.raises(Refusal, match="no field is called 'gae_lambd'"):
        read_run(tmp_path, recipe)


def test_a_folder_with_links_out_of_it_or_pipes_in_it_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    write_run(folder, recipe("cartpole-gala"))
    (folder / "inside").symlink_to("run.json")
    (folder / "wandb").mkdir()
    (folder / "wandb" / "debug-core.log").symlink_to(tmp_path / "cache" / "core.log")  # as wandb makes it
    read_run(folder, recipe)
    (folder / "metrics.jsonl").symlink_to(tmp_path / "theirs")
    with pytest.raises(Refusal, match="link out of the run folder"):
        read_run(folder, recipe)
    (folder / "metrics.jsonl").unlink()
    os.mkfifo(folder / "metrics.jsonl")
    with pytest.raises(Refusal, match="neither a file nor a folder"):
        read_run(folder, recipe)


def test_json_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "summary.json"
    write_json(path, {"a": 1})

    def crash(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", crash)
    with pytest.raises(KeyboardInterrupt):
        write_json(path, {"a": 2})
    assert read_object(path) == {"a": 1}


def test_a_full_disk_is_reported_with_the_file_that_did_not_fit(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No space") as raised, replacing(tmp_path / "plan.html"):
        raise OSError(errno.ENOSPC, "No space left on device")  # as write(2) does
    assert raised.value.filename == str(tmp_path / "plan.html")


def test_a_full_disk_is_a_refusal_and_what_was_changed_before_is_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("old")

    def write() -> None:
        with restored_if_refused(tmp_path, "run.json"):
            (tmp_path / "run.json").write_text("new")
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(Refusal, match=r"cannot be written: No space left on device\. Make room"):
        write()
    assert (tmp_path / "run.json").read_text() == "old"


def test_a_claimed_folder_is_claimed_once(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "run"
    claim(folder)
    assert (folder / "checkpoints").is_dir()
    with pytest.raises(Refusal, match="not empty"):
        claim(folder)
    write_run(folder, recipe("cartpole-gala"))
    with locked(folder), pytest.raises(Refusal, match="another process is training"):
        claim(folder)
    with pytest.raises(Refusal, match=r"saved no checkpoint to go on from\. Delete the folder"):
        claim(folder)
    (folder / "checkpoints" / "last").mkdir()
    (folder / "checkpoints" / "last" / "state.json").write_text("{}")
    with pytest.raises(Refusal, match="murmurate resume"):
        claim(folder)


@pytest.mark.parametrize("before", ["nothing", "a folder", "a link"])
def test_an_unclaimed_folder_is_as_before(before: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    if before == "a folder":
        folder.mkdir()
    if before == "a link":
        (tmp_path / "elsewhere").mkdir()
        folder.symlink_to(tmp_path / "elsewhere")
    claim(folder)
    write_run(folder, recipe("cartpole-gala"))
    unclaim(folder, existed=before != "nothing")
    assert folder.exists() == (before != "nothing")
    assert folder.is_symlink() == (before == "a link")
    assert before == "nothing" or list(folder.iterdir()) == []


def test_roles_are_named_with_process_and_host(tmp_path: Path) -> None:
    write_roles(tmp_path, {0: 11, 1: None, 2: 12}, replicas=2)
    lines = [json.loads(line) for line in (tmp_path / "roles.jsonl").read_text().splitlines()]
    here = {"role": "replica", "host": socket.gethostname()}
    assert lines == [
        {**here, "index": 0, "pid": 11},
        {**here, "index": 1, "pid": os.getpid()},
        {**here, "role": "center", "index": 0, "pid": 12},
    ]


def test_what_was_raised_is_said_where_the_new_file_cannot_be_removed(tmp_path: Path) -> None:
    (tmp_path / "file.new").mkdir()  # an unlink of it fails, as on a read-only disk
    with pytest.raises(RunFailed, match="the cause"), replacing(tmp_path / "file"):
        raise RunFailed("the cause")


def test_what_a_cut_off_trial_left_is_no_trial_of_the_study(tmp_path: Path) -> None:
    """``murmurate report study/trial-*/``, as the pages have it, takes the trials alone."""
    (tmp_path / "trial-0003").mkdir()
    (tmp_path / "trial-0003" / "run.json").touch()
    place = set_aside(tmp_path / "trial-0003")
    assert [path.name for path in place.iterdir()] == ["run.json"]
    assert list(tmp_path.iterdir()) == [place]
    assert not list(tmp_path.glob("trial-*"))
