"""Tests wait for what they need, and never for a time."""

import os
import time
from collections.abc import Callable
from typing import Any

# Only a failure waits this long; a machine with other work may take minutes to start a run.
DEADLINE_SECONDS = float(os.environ.get("MURMURATE_TEST_DEADLINE_SECONDS", "200"))


def until(
    condition: Callable[[], Any],
    what: str = "what is waited for",
    seconds: float = DEADLINE_SECONDS,
    every: float = 0.01,
) -> Any:
    """The first true value of ``condition``, asked ``every`` so many seconds; fails at the deadline."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > end:
            raise AssertionError(f"not within {seconds:g} s: {what}")
        time.sleep(every)
    return value
