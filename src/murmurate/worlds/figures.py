"""Figures of an episode that an environment gives in its ``info``: energy, collisions, a tracking error.

Imports no torch, so that the game server (``_game_server.py``) can use it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from murmurate.worlds._numbers import number

MOST_FIGURES = 8  # of an episode: actors pass them on in memory of a fixed size
LONGEST_NAME = 31
_NAME = re.compile(rf"[A-Za-z0-9_.-]{{1,{LONGEST_NAME}}}")


def figures_of(info: Mapping[str, Any]) -> dict[str, float]:
    """The figures of the episode that ends with this info; none where the environment gives none. A number
    that is not finite counts as missing: one of them would make the mean of all episodes NaN.

    Raises ``ValueError`` for anything but a few named numbers.
    """
    given = info.get("figures")
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise ValueError(f"figures in its info is {given!r}: it must be a dict of numbers")
    if len(given) > MOST_FIGURES:
        raise ValueError(f"its info has {len(given)} figures: there can be at most {MOST_FIGURES}")
    numbers = {_checked(name): _number(name, value) for name, value in given.items()}
    return {name: value for name, value in numbers.items() if math.isfinite(value)}


def _checked(name: Any) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(
            f"a figure in its info is called {name!r}: a name has 1 to {LONGEST_NAME} letters, digits, "
            "dots, underscores or hyphens"
        )
    return name


def _number(name: Any, value: Any) -> float:
    try:
        return number(value)
    except ValueError:
        raise ValueError(f"the figure {name} in its info is {value!r}: it must be a number") from None
