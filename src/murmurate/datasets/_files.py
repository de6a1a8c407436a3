"""Which files are passed over, and whether files have changed since they were read."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path


def is_clutter(name: str) -> bool:
    """Whether a file or folder is hidden or one that macOS adds to archives, and is passed over."""
    return name.startswith(".") or name == "__MACOSX"


def state_of(*paths: str | Path) -> str:
    """A hash of the names, sizes and times of files, and of the files in folders (not in folders below them):
    another once they are written again. Empty paths are passed over."""
    state = hashlib.blake2b(digest_size=16)
    for path in (Path(path) for path in paths if path):
        for file in sorted(path.iterdir()) if path.is_dir() and os.access(path, os.R_OK) else (path,):
            try:
                status = file.stat()
            except (OSError, ValueError):  # whoever reads the file says what is wrong with it
                continue
            state.update(os.fsencode(file) + f"\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
    return state.hexdigest()
