"""Replays in checkpoints: chunks that stay are linked, and damage to one costs the replay alone."""

from __future__ import annotations

import errno
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from marked_checkpoints import about

from murmurate.errors import Refusal
from murmurate.replay.interface import Chunk
from murmurate.training import checkpoint
from murmurate.tuning.run_process import can_resume


def _with_chunks(folder: Path, values: dict[str, float]) -> dict[str, Path]:
    """A checkpoint whose replay has such chunks; the files by chunk."""
    staging = folder / ".staging"
    chunks = [Chunk(name, torch.full((3, 2), value)) for name, value in values.items()]
    checkpoint.write_part(staging, 0, {"env_steps": 1}, {"replay": {"images": [chunks], "x": torch.ones(2)}})
    checkpoint.commit(folder, staging, about(1))
    return {name: folder / "last" / f"replay-0-{name}.safetensors" for name in values}


def test_chunks_that_stay_are_linked_and_read_with_the_rest(tmp_path: Path) -> None:
    first = _with_chunks(tmp_path, {"a-1": 1.0, "b-1": 2.0})
    numbers = {name: path.stat().st_ino for name, path in first.items()}
    second = _with_chunks(tmp_path, {"a-1": 1.0, "b-2": 3.0, "c-1": 4.0})
    assert second["a-1"].stat().st_ino == numbers["a-1"]
    assert second["b-2"].stat().st_ino not in numbers.values()
    for name, values in (("last", [1.0, 3.0, 4.0]), ("previous", [1.0, 2.0])):
        assert checkpoint.damage(tmp_path / name) is None
        held = checkpoint.read_replays(tmp_path / name, 0)["replay"]
        assert held is not None
        assert [float(chunk.values[0, 0]) for chunk in held["images"][0]] == values
    checkpoint.keep_as_best(tmp_path)
    assert checkpoint.damage(tmp_path / "best") is None
    assert not list((tmp_path / "best").glob("replay*"))


def test_a_chunk_that_is_gone_or_bad_is_damage(tmp_path: Path) -> None:
    for spoil in (lambda path: path.unlink(), lambda path: path.write_bytes(b"x" * path.stat().st_size)):
        files = _with_chunks(tmp_path, {"a": 1.0})
        spoil(files["a"])
        assert "corrupt or missing" in str(checkpoint.damage(tmp_path / "last"))
        with pytest.raises(Refusal):
            checkpoint.read_replays(tmp_path / "last", 0)["replay"]
        shutil.rmtree(tmp_path / "last")


def test_a_chunk_that_both_checkpoints_share_costs_the_replay_and_no_more(tmp_path: Path) -> None:
    for _ in range(2):
        files = _with_chunks(tmp_path, {"a": 1.0})
    data = bytearray(files["a"].read_bytes())
    data[-1] ^= 1
    files["a"].write_bytes(data)
    assert checkpoint.damage(tmp_path / "previous") is not None
    with pytest.warns(UserWarning, match="with empty replays"):
        found = checkpoint.newest(tmp_path)
    assert found == tmp_path / "last"
    assert checkpoint.read_part(found, 0)["env_steps"] == 1
    assert checkpoint.read_replays(found, 0) == {}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert checkpoint.newest(tmp_path) == found


def test_a_disk_that_is_full_while_replays_are_set_aside_leaves_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        files = _with_chunks(tmp_path, {"a": 1.0})
    files["a"].write_bytes(b"bad")

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("murmurate.record.stored.seal", full)
        with pytest.raises(OSError, match="No space"):
            checkpoint.newest(tmp_path)
    with pytest.warns(UserWarning, match="with empty replays"):
        assert checkpoint.newest(tmp_path) == tmp_path / "last"


def test_a_run_whose_replays_are_damaged_is_resumed_by_a_sweep(tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    checkpoints.mkdir()
    for _ in range(2):
        files = _with_chunks(checkpoints, {"a": 1.0})
    files["a"].write_bytes(b"bad")
    assert can_resume(tmp_path)
    for name in ("last", "previous"):
        (checkpoints / name / "replica-0.safetensors").write_bytes(b"bad")
    assert not can_resume(tmp_path)


def test_who_needs_no_replays_takes_the_newest_and_changes_nothing(tmp_path: Path) -> None:
    for _ in range(2):
        files = _with_chunks(tmp_path, {"a": 1.0})
    files["a"].write_bytes(b"bad")
    before = {path.name: path.read_bytes() for path in (tmp_path / "last").iterdir()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert checkpoint.newest(tmp_path, replays=False) == tmp_path / "last"
    assert {path.name: path.read_bytes() for path in (tmp_path / "last").iterdir()} == before


def test_nothing_is_linked_from_a_checkpoint_whose_list_is_lost(tmp_path: Path) -> None:
    files = _with_chunks(tmp_path, {"a": 1.0})
    files["a"].write_bytes(b"bad")
    (tmp_path / "last" / "state.json").write_text("{")
    _with_chunks(tmp_path, {"a": 1.0})
    assert checkpoint.damage(tmp_path / "last") is None
    assert checkpoint.read_replays(tmp_path / "last", 0)


def test_of_a_damaged_checkpoint_nothing_is_taken_over_once_another_is_gone_on_from(tmp_path: Path) -> None:
    for _ in range(2):
        _with_chunks(tmp_path, {"a": 1.0})
    shutil.copytree(tmp_path / "last", tmp_path / "copy")  # as one copies a run: files of its own
    shutil.rmtree(tmp_path / "last")
    (tmp_path / "copy").rename(tmp_path / "last")
    [spoilt] = (tmp_path / "last").glob("replay-0-a*")
    spoilt.write_bytes(b"x" * spoilt.stat().st_size)
    with pytest.warns(UserWarning, match="previous instead"):
        assert checkpoint.newest(tmp_path).name == "previous"
    checkpoint.set_aside(tmp_path / "last")
    _with_chunks(tmp_path, {"a": 1.0})
    assert checkpoint.damage(tmp_path / "last") is None


def test_without_links_chunks_are_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no links here")

    monkeypatch.setattr(os, "link", refuse)
    first = _with_chunks(tmp_path, {"a": 1.0})["a"].stat().st_ino
    assert _with_chunks(tmp_path, {"a": 1.0})["a"].stat().st_ino != first
    assert checkpoint.damage(tmp_path / "last") is None


@pytest.mark.parametrize("links", [True, False])
def test_a_part_is_lent_with_all_its_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    source, target = tmp_path / ".staging-final", tmp_path / ".staging-2"
    for rank in (1, 11):
        chunks = {"images": [Chunk(f"a-{rank}", torch.full((2,), float(rank)))]}
        checkpoint.write_part(source, rank, {"env_steps": rank}, {"replay": chunks})
    checkpoint.write_part(target, 0, {"env_steps": 0})
    if not links:
        monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(OSError("no links here")))
    checkpoint.link_part(source, target, 1)
    checkpoint.link_part(source, target, 7)
    assert checkpoint.parts(target) == [0, 1]
    checkpoint.commit(tmp_path, target, about(1))
    held = checkpoint.read_replays(tmp_path / "last", 1)["replay"]
    assert held is not None
    assert float(held["images"][0].values[0]) == 1.0
    assert checkpoint.read_replays(tmp_path / "last", 11) == {}
