"""Finds the folder of a run that is going on, although it may be moved or removed at any time."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from murmurate.errors import RunFailed


class FolderGone(RunFailed):
    """The run folder was removed while the run was going on: nothing can be written to it."""


class FollowedFolder:
    """A run folder that is followed when it is moved within its file system.

    It holds the folder's ``checkpoints`` open, so another folder that has its path later is not mistaken for
    it.
    """

    def __init__(self, folder: Path) -> None:
        self.original_path = folder
        self._descriptor = os.open(folder / "checkpoints", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def close(self) -> None:
        """To be called after the last write."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            self.close()

    def current_path(self) -> Path:
        """The folder's current path. Raises FolderGone."""
        if self._is_at(self.original_path):
            return self.original_path
        try:
            path = _path_of(self._descriptor).parent
        except OSError:  # a system that does not say
            path = self.original_path
        if not self._is_at(path):
            raise FolderGone(
                f"The run folder {self.original_path} was removed, or moved to another disk, while the run "
                "was going on. What was learned is lost, unless it is there."
            )
        return path

    def _is_at(self, folder: Path) -> bool:
        try:
            return os.path.samestat(os.fstat(self._descriptor), os.stat(folder / "checkpoints"))
        except OSError:
            return False


def _path_of(descriptor: int) -> Path:
    """The current path of an open file or folder. Raises OSError."""
    if hasattr(fcntl, "F_GETPATH"):  # macOS
        return Path(os.fsdecode(fcntl.fcntl(descriptor, fcntl.F_GETPATH, bytes(1024)).rstrip(b"\0")))
    return Path(os.readlink(f"/proc/self/fd/{descriptor}"))
