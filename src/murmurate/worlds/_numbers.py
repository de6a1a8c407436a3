"""Checks the numbers that environments give, rewards and the values of observations, and those of actions.

Imports no torch, so that the game server (``_game_server.py``) can use it.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

LARGEST_REWARD = float(np.finfo(np.float32).max)  # agents learn from rewards in float32
_NUMBERS = (float, int, np.number, np.bool_)


def number(reward: Any) -> float:
    """``reward``, also from an array of one number. Raises ``ValueError`` for anything else."""
    if isinstance(reward, _NUMBERS):
        return float(reward)
    shape = np.shape(reward)
    if shape:
        if math.prod(shape) != 1:
            raise ValueError(f"its reward is an array of shape {shape}: step must return a number")
        reward = np.reshape(reward, ())
    try:
        if not isinstance(reward, str | bytes):
            return float(reward)
    except (TypeError, ValueError):
        pass
    raise ValueError(f"its reward is {reward!r}: step must return a number")


def checked_numbers(values: Any, dtype: Any, place: str) -> npt.NDArray[Any]:
    """``values`` as an array. dtype: that of their space. place: what they are, for messages.

    Raises ``ValueError`` for strings and objects, which numpy would convert to numbers, and, if the space is
    of uint8, for numbers that this conversion would change, such as an image's that was scaled to [0, 1].
    """
    array = np.asarray(values)
    if array.dtype.kind not in "biuf":
        raise ValueError(f"{place} holds {array.dtype}, and no numbers")
    if dtype == np.uint8 and array.dtype != np.uint8 and not _are_bytes(array):
        raise ValueError(
            f"{place} holds {array.dtype} with values other than whole numbers from 0 to 255, and its space "
            "is of uint8: return these, or change the space"
        )
    return array


def first_not_finite(values: npt.NDArray[Any], name: str) -> str:
    """The first number of ``values`` (float32) that is not finite, for messages: "nan as its reward". name:
    what they are."""
    first = np.ravel(values)[~np.isfinite(np.ravel(values))][0]
    note = "" if np.isnan(first) else " (infinite, or beyond float32's 3.4e+38)"
    return f"{first} as its {name}{note}"


def check_actions(action: npt.NDArray[Any], count: int, name: str) -> None:
    """Raise ``ValueError`` for a number that is no action of the world ``name``, which has ``count``."""
    if action.min() < 0 or action.max() >= count:
        raise ValueError(f"{name} has actions 0 to {count - 1}, got {action.tolist()}")


def _are_bytes(array: npt.NDArray[Any]) -> bool:
    return bool(((array >= 0) & (array <= 255) & (array == np.floor(array))).all())
