"""Fixtures of tests of a user's own environments."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import gymnasium
import pytest
from own_file import FILE


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working folder with a file of environments, which is gone from this process afterwards."""
    folder = tmp_path / "their-work"
    folder.mkdir()
    (folder / "own_envs.py").write_text(FILE)
    (folder / "own_neighbour.py").write_text("LIMIT = 5\n")
    monkeypatch.chdir(folder)
    before = list(sys.path)
    yield folder
    gymnasium.registry.pop("OwnCart-v0", None)
    sys.path[:] = before
    for name in ("own_envs", "own_neighbour", "murmurate_file_own_envs"):
        sys.modules.pop(name, None)
