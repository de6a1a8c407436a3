"""Damaged checkpoints, and disks that are full: what is said, and what is gone on from."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from marked_checkpoints import about, mark_of, staged

from murmurate.errors import Refusal, RunFailed
from murmurate.record.stored import FORMAT, seal
from murmurate.training import checkpoint, part_file

# -- damage ---------------------------------------------------------------------------------------------


def _flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))


def _rewrite(path: Path, **fields: Any) -> None:
    """With another checksum, as an attacker writes."""
    state = json.loads(path.read_text())
    path.write_text(
        json.dumps(seal({k: v for k, v in {**state, **fields}.items() if v is not None}, "state.json"))
    )


def _change(path: Path, old: str, new: str) -> None:
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


_DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a flipped bit": (lambda last: _flip_a_bit(last / "replica-1.safetensors"), "corrupt or missing"),
    "a missing part": (lambda last: (last / "replica-0.safetensors").unlink(), "corrupt or missing"),
    "half a part": (lambda last: os.truncate(last / "replica-0.safetensors", 100), "corrupt or missing"),
    "half a manifest": (lambda last: os.truncate(last / "state.json", 30), "corrupt"),
    "no manifest": (lambda last: (last / "state.json").unlink(), "holds no checkpoint"),
    "another's": (lambda last: _rewrite(last / "state.json", package="theirs"), "not written by murmurate"),
    "of tomorrow": (
        lambda last: _rewrite(last / "state.json", format=FORMAT + 1),
        f"has format {FORMAT + 1}",
    ),
    "no list": (lambda last: (last / "state.json").write_text("[]"), "holds no JSON object"),
    "another count": (
        lambda last: _change(last / "state.json", '"replicas": 2', '"replicas": 3'),
        "checksum",
    ),
    "no checksum": (lambda last: _change(last / "state.json", '"checksum"', '"checksun"'), "has no checksum"),
    "a count in words": (lambda last: _rewrite(last / "state.json", replicas="two"), "corrupt (replicas)"),
    "no time": (lambda last: _rewrite(last / "state.json", seconds=float("nan")), "corrupt (seconds)"),
    "counts of one": (lambda last: _rewrite(last / "state.json", replica_env_steps=[1]), "replica_env_steps"),
    "a part outside": (
        lambda last: _rewrite(last / "state.json", parts={"../previous/replica-0.safetensors": "0"}),
        "corrupt (parts)",
    ),
    "nested": (lambda last: (last / "state.json").write_text("[" * 10**5 + "]" * 10**5), "nested too deeply"),
    "a link": (
        lambda last: (
            (last / "replica-0.safetensors").rename(last / "x"),
            (last / "replica-0.safetensors").symlink_to("x"),
        ),
        "corrupt or missing",
    ),
    "no parts": (lambda last: _rewrite(last / "state.json", parts={}), "corrupt"),
    "no parts at all": (lambda last: _rewrite(last / "state.json", parts=None), "corrupt"),
    "no count": (lambda last: _rewrite(last / "state.json", replicas=None), "corrupt"),
    "a file for a folder": (lambda last: (shutil.rmtree(last), last.write_text("")), "cannot be read"),
}


@pytest.mark.parametrize("name", _DAMAGES)
def test_a_damaged_checkpoint_is_reported_and_the_one_before_is_taken(name: str, tmp_path: Path) -> None:
    harm, words = _DAMAGES[name]
    for mark in (1, 2):
        checkpoint.commit(tmp_path, staged(tmp_path, mark), about(mark))
    assert checkpoint.damage(tmp_path / "last") is None
    harm(tmp_path / "last")
    assert words in (checkpoint.damage(tmp_path / "last") or "")
    with pytest.warns(UserWarning, match="Going on from .*previous instead"):
        assert mark_of(checkpoint.newest(tmp_path)) == 1
    shutil.rmtree(tmp_path / "previous")
    with pytest.raises(Refusal, match="start again with murmurate train and another --out"):
        checkpoint.newest(tmp_path)
    checkpoint.commit(tmp_path, staged(tmp_path, 3), about(3))
    (tmp_path / "last").rename(tmp_path / "best")
    checkpoint.commit(tmp_path, staged(tmp_path, 4), about(4))
    shutil.rmtree(tmp_path / "previous", ignore_errors=True)
    harm(tmp_path / "last")
    with pytest.raises(Refusal, match="The best checkpoint is sound"):
        checkpoint.newest(tmp_path)


def test_an_unreadable_part_is_refused_by_name(tmp_path: Path) -> None:
    checkpoint.commit(tmp_path, staged(tmp_path, 1), about(1))
    for content in (b"", b"\xff" * 8, b"\x02\0\0\0\0\0\0\0{}", b"\x02\0\0\0\0\0\0\0[]"):
        (tmp_path / "last" / "replica-0.safetensors").write_bytes(content)
        with pytest.raises(Refusal, match=r"replica-0\.safetensors"):
            checkpoint.read_part(tmp_path / "last", 0)


def test_ctrl_c_while_a_part_is_read_is_not_taken_for_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for mark in (1, 2):
        checkpoint.commit(tmp_path, staged(tmp_path, mark), about(mark))

    def load_file(path: Path) -> dict[str, torch.Tensor]:
        """As safetensors does: torch asks Python for a length, and reports any error of it as its own."""
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise ValueError("could not determine the shape of object type") from None
        return {"x": torch.full((3,), 2)}

    monkeypatch.setattr(part_file, "load_file", load_file)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.newest(tmp_path, lambda path: checkpoint.read_part(path, 0))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


# -- a disk that fills up --------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_is_named_with_its_remedy(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint.commit(tmp_path, staged(tmp_path, 1), about(1))

    def full(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    staging = staged(tmp_path, 2)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        for act in (
            lambda: checkpoint.write_part(tmp_path / ".staging-3", 0, {"x": torch.ones(1)}),
            lambda: checkpoint.commit(tmp_path, staging, about(2)),
            lambda: checkpoint.keep_as_best(tmp_path),
        ):
            with pytest.raises(RunFailed, match=r"is full: free some space"):
                act()
    assert mark_of(checkpoint.newest(tmp_path)) == 1


def test_the_full_disk_that_safetensors_meets_is_named_too(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(RunFailed, match="is full: free some space"):
            checkpoint.write_part(tmp_path / "s", 0, {"x": torch.zeros(100_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert checkpoint.parts(tmp_path / "s") == []


def test_another_error_of_the_disk_is_reported_as_it_is(tmp_path: Path) -> None:
    failure = checkpoint.disk_failure(tmp_path, OSError(errno.EROFS, os.strerror(errno.EROFS)))
    assert "Read-only file system" in str(failure)
    assert "full" not in str(failure)


def test_a_file_in_the_place_of_a_folder_is_to_be_moved_away(tmp_path: Path) -> None:
    folder, staging = tmp_path / "checkpoints", tmp_path / "checkpoints" / ".staging"
    folder.mkdir()
    staging.touch()
    with pytest.raises(RunFailed, match=r"/\.staging'\. A file has the name of a folder: move it away\."):
        checkpoint.write_part(staging, 0, {"x": torch.zeros(1)})
    staging.unlink()
    for mark in (1, 2):
        checkpoint.commit(folder, staged(folder, mark), about(mark))
    shutil.rmtree(folder / "previous")
    (folder / "previous").touch()
    checkpoint.commit(folder, staged(folder, 3), about(3))  # moves the file to .old
    with pytest.raises(RunFailed, match=r"/\.old'\. A file has the name of a folder: move it away\."):
        checkpoint.commit(folder, staged(folder, 4), about(4))
    assert mark_of(folder / "last") == 3


def test_a_limit_of_open_files_that_is_too_low_is_to_be_raised(tmp_path: Path) -> None:
    failure = checkpoint.disk_failure(tmp_path, OSError(errno.EMFILE, "Too many open files"))
    assert str(failure).endswith("Too many open files; raise their limit: ulimit -n 4096.")


def test_a_disk_that_fills_up_while_a_part_is_lent_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = tmp_path / ".staging-final", tmp_path / ".staging-2"
    checkpoint.write_part(source, 0, {"env_steps": 0})
    target.mkdir()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "link", full)
    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(RunFailed, match=r"staging-2 is full: free some space"):
        checkpoint.link_part(source, target, 0)
