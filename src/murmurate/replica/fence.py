"""The order in which processes see one another's writes to shared memory."""

from __future__ import annotations

import threading


def fence(lock: threading.Lock) -> None:
    """A full memory barrier: a release followed by an acquire prevents reordering, on ARM too."""
    with lock:
        pass
    with lock:
        pass
