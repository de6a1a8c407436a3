"""Runs what a page of the documentation runs, as a user does: in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def python(folder: Path, *words: str, **variables: str) -> str:
    """What ``python WORDS`` prints in this folder, with these environment variables too; it must succeed."""
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def command(folder: Path, *words: str) -> str:
    """What ``murmurate WORDS`` prints in this folder."""
    return python(folder, "-m", "murmurate", *words)
