"""Where an environment's code raised, for messages and logs.

Imports no torch, so that the game server (``_game_server.py``) can use it.
"""

from __future__ import annotations

import os
import traceback
from pathlib import Path

import gymnasium

import murmurate
from murmurate.plugins import is_in_library

_MOST_PRINTED = 5  # tracebacks that a process prints
_printed: set[str] = set()
_OWN = tuple(f"{Path(str(module.__file__)).parent}{os.sep}" for module in (murmurate, gymnasium))


def noted(problem: BaseException) -> str:
    """Where an environment raised ``problem``: " (crane.py:5 in wind)", the innermost line of its own code
    rather than of a library; empty if this package or gymnasium raised it.

    Prints the traceback to stderr, unless one of the same line was printed before, or several others.
    """
    frames = [f for f in traceback.extract_tb(problem.__traceback__) if not f.filename.startswith(_OWN)]
    users = [frame for frame in frames if not is_in_library(frame.filename)]
    frame = (users or frames)[-1] if frames else None
    place = "" if frame is None else f" ({os.path.basename(frame.filename)}:{frame.lineno} in {frame.name})"
    kind = f"{type(problem).__name__}{place}"
    if place and kind not in _printed and len(_printed) < _MOST_PRINTED:
        _printed.add(kind)
        traceback.print_exception(problem)
    return place
