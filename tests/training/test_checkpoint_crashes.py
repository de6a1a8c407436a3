"""Checkpoints: whole or not at all, at every point where a crash could come between."""

from __future__ import annotations

import contextlib
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from marked_checkpoints import about, mark_of, staged

from murmurate.training import checkpoint, part_file


class Crash(BaseException):
    """As SIGKILL: nothing catches it."""


def _crash_at(monkeypatch: pytest.MonkeyPatch, point: int) -> list[str]:
    """Crash instead of the ``point``-th change to the disk (from 0 up); the list fills with those before."""
    done: list[str] = []

    def wrap(owner: Any, name: str) -> None:
        real: Callable[..., Any] = getattr(owner, name)

        def change(*args: Any, **kwargs: Any) -> Any:
            if len(done) == point:
                raise Crash(name)
            done.append(name)
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, change)

    wrap(Path, "rename")
    wrap(shutil, "rmtree")
    wrap(shutil, "copytree")
    wrap(os, "fsync")
    wrap(os, "replace")
    return done


@pytest.mark.parametrize("point", range(12))
def test_a_crash_at_any_point_of_a_commit_leaves_a_whole_checkpoint(
    point: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for mark in (1, 2):
        checkpoint.commit(tmp_path, staged(tmp_path, mark), about(mark))
    staging = staged(tmp_path, 3)
    crashed = _crashes(lambda: checkpoint.commit(tmp_path, staging, about(3)), point, monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # whether it has to fall back depends on the point
        assert mark_of(checkpoint.newest(tmp_path)) in ((2, 3) if crashed else (3,))
    # and the next commit goes through
    checkpoint.commit(tmp_path, staged(tmp_path, 4), about(4))
    assert mark_of(checkpoint.newest(tmp_path)) == 4
    assert not (tmp_path / ".old").exists()


def _crashes(act: Callable[[], None], point: int, monkeypatch: pytest.MonkeyPatch) -> bool:
    with monkeypatch.context() as patch:
        _crash_at(patch, point)
        try:
            act()
        except Crash:
            return True
    return False


def test_the_crash_points_reach_past_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for mark in (1, 2):
        checkpoint.commit(tmp_path, staged(tmp_path, mark), about(mark))
    staging = staged(tmp_path, 3)
    done = _crash_at(monkeypatch, 10**6)
    checkpoint.commit(tmp_path, staging, about(3))
    assert done.count("rename") == 3
    assert 6 <= len(done) <= 12


@pytest.mark.parametrize("mended", [True, False])
@pytest.mark.parametrize("point", range(14))
def test_a_crash_at_any_point_of_keeping_the_best_leaves_the_old_or_the_new(
    point: int, mended: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint.commit(tmp_path, staged(tmp_path, 1), about(1))
    checkpoint.keep_as_best(tmp_path)
    checkpoint.commit(tmp_path, staged(tmp_path, 2), about(2))
    crashed = _crashes(lambda: checkpoint.keep_as_best(tmp_path), point, monkeypatch)
    if mended:  # as the next start of the run does
        checkpoint.restore_best(tmp_path)
        assert checkpoint.damage(tmp_path / "best") is None
        assert mark_of(tmp_path / "best") in ((1, 2) if crashed else (2,))
    checkpoint.keep_as_best(tmp_path)
    assert mark_of(tmp_path / "best") == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["best", "last", "previous"]


def test_a_part_appears_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def half(tensors: Any, path: Path, metadata: Any) -> None:
        Path(path).write_bytes(b"\x08\0\0\0")
        raise Crash

    checkpoint.write_part(tmp_path / "s", 0, {"x": torch.ones(2)})
    monkeypatch.setattr(part_file, "save_file", half)
    with pytest.raises(Crash):
        checkpoint.write_part(tmp_path / "s", 1, {"x": torch.ones(2)})
    assert checkpoint.parts(tmp_path / "s") == [0]
    checkpoint.commit(tmp_path, tmp_path / "s", about(0))
    assert checkpoint.damage(tmp_path / "last") is None
    assert list(checkpoint.read_manifest(tmp_path / "last")["parts"]) == ["replica-0.safetensors"]


def test_nothing_staged_is_not_a_checkpoint(tmp_path: Path) -> None:
    checkpoint.commit(tmp_path, staged(tmp_path, 1), about(1))
    (tmp_path / ".staging-2").mkdir()
    with pytest.raises(ValueError, match="nothing to commit"):
        checkpoint.commit(tmp_path, tmp_path / ".staging-2", about(2))
    assert mark_of(checkpoint.newest(tmp_path)) == 1


@pytest.mark.parametrize("point", range(12))
def test_a_crash_after_going_on_from_the_previous_leaves_a_whole_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: int
) -> None:
    for mark in (1, 2):
        checkpoint.commit(tmp_path, staged(tmp_path, mark), about(mark))
    checkpoint.set_aside(tmp_path / "last")
    staging = staged(tmp_path, 3)
    with monkeypatch.context() as patched:
        _crash_at(patched, point)
        with contextlib.suppress(Crash):
            checkpoint.commit(tmp_path, staging, about(3))
    whole = [mark_of(tmp_path / n) for n in ("last", "previous") if checkpoint.damage(tmp_path / n) is None]
    assert 1 in whole, "the checkpoint that the run went on from stays until the one after the next"
