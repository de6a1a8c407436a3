"""The death of an actor, as its learner's source tells of it."""

from __future__ import annotations

import os
import signal
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
