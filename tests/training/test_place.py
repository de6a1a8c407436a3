"""A run folder that is moved is found again, on Linux and as macOS says where it is."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from murmurate.training.place import FolderGone, FollowedFolder


@pytest.mark.parametrize("system", ["Linux", "macOS"])
def test_a_moved_folder_is_found_and_a_removed_one_is_not(
    system: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if system == "macOS":

        def path_of(descriptor: int, command: int, room: bytes) -> bytes:
            assert (command, len(room)) == (50, 1024)
            return os.fsencode(os.readlink(f"/proc/self/fd/{descriptor}")).ljust(1024, b"\0")

        monkeypatch.setattr(fcntl, "F_GETPATH", 50, raising=False)
        monkeypatch.setattr(fcntl, "fcntl", path_of)
    before, after = tmp_path / "before", tmp_path / "after"
    (before / "checkpoints").mkdir(parents=True)
    followed = FollowedFolder(before)
    assert followed.current_path() == before
    before.rename(after)
    assert followed.current_path() == after
    (after / "checkpoints").rmdir()
    with pytest.raises(FolderGone):
        followed.current_path()
    followed.close()
