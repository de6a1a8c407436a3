"""Processes in sessions of their own, of which none outlives a test that fails."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from typing import Any


def end(process: subprocess.Popen[Any]) -> None:
    """Kill the leader of a session with all that is left of its group, and wait for it."""
    with contextlib.suppress(OSError):  # there is no such group any more
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@contextlib.contextmanager
def session(command: Sequence[object], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A command that leads a session while the context is open."""
    words = [str(word) for word in command]
    with subprocess.Popen(words, text=True, start_new_session=True, **options) as process:
        try:
            yield process
        finally:
            end(process)
