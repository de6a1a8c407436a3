"""Boxes that hold images, and the conversion of their observations to channels first.

Imports no torch, so that the game server (``_game_server.py``) can use it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium import spaces

from murmurate.worlds._numbers import checked_numbers

# of an image [H, W, C] with more than 4 channels: least height and width in pixels, and in multiples of C
_LEAST_SIDE, _LEAST_RATIO = 20, 3


def is_image(space: Any) -> bool:
    return isinstance(space, spaces.Box) and space.dtype == np.uint8 and len(space.shape) in (3, 4)


def box_converter(space: Any) -> Callable[[Any], Any]:
    """A function that converts an observation of a Box to ``converted_shape``: channels first, the channels
    of stacked images one after the other. It raises ``ValueError`` for a shape other than the Box's, which
    numpy might broadcast."""
    shape, channels_last = tuple(space.shape), _channels_last(space)
    channels_first_shape = converted_shape(space)

    def convert(observation: Any) -> Any:
        if np.shape(observation) != shape:
            raise ValueError(
                f"its observation has the shape {list(np.shape(observation))}, not {list(shape)}"
            )
        array = checked_numbers(observation, space.dtype, "its observation")
        return np.moveaxis(array, -1, -3).reshape(channels_first_shape) if channels_last else array

    return convert


def converted_shape(space: Any) -> tuple[int, ...]:
    if not _channels_last(space):
        return tuple(space.shape)
    *stack, height, width, channels = space.shape
    return (math.prod(stack) * channels, height, width)


def _channels_last(space: Any) -> bool:
    """Whether observations are images [..., H, W, C], as is usual in gymnasium."""
    if space.dtype != np.uint8 or len(space.shape) not in (3, 4):
        return False
    height, width, channels = map(int, space.shape[-3:])
    # 2 or 4 are grey images stacked or RGBA, unless the image is so small that they may be its width; more
    # are stacked images or several cameras, unless an image [C, H, W] may be so narrow
    return (
        (channels in (1, 3) and height > 3)
        or (channels in (2, 4) and min(height, width) > 4)
        or min(height, width) >= max(_LEAST_SIDE, _LEAST_RATIO * channels)
    )
