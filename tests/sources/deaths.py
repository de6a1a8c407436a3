"""Processes of a source that die: when they start, and while the learner learns."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from typing import Any

from waiting import until


def kill_actor_1(source: Any, learner: Any, pid: int) -> None:
    """Kill it, and learn until the source has told of its death and of its next start; nothing else is told.

    The other actor always has something: the dead one is missed all the same.
    """
    os.kill(pid, signal.SIGKILL)
    told: list[tuple[str, str]] = []

    def learned() -> bool:
        learner.learn(next(source))
        told.extend(source.events())
        return len(told) == 2

    until(learned)
    assert [kind for kind, _ in told] == ["actor died", "actor began"]
    assert "actor 1 of replica 0 died (signal 9)" in told[0][1]


def died_at_start() -> subprocess.Popen[bytes]:
    """A process that died before its settings were sent: they stay in the buffer of its stdin."""
    process = subprocess.Popen(["true"], stdin=subprocess.PIPE)
    process.wait()
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(b"settings")
        process.stdin.flush()
    return process
