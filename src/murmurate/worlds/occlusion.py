"""Hides a rectangle of the screen from an agent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from murmurate.errors import Refusal

Images = npt.NDArray[np.uint8]
_GREY_SHARES = (0.299, 0.587, 0.114)  # of red, green and blue


def check_rectangle(rectangle: Sequence[int], colour: Sequence[int], width: int, height: int) -> None:
    """Raise Refusal unless ``rectangle`` is (left, right, top, bottom) within a screen, or empty, and
    ``colour`` is (red, green, blue)."""
    if len(colour) != 3:
        raise Refusal(f"a colour has 3 numbers, not {len(colour)}. Use --world.occlude-colour 0 0 0.")
    if not rectangle:
        return
    left, right, top, bottom = rectangle if len(rectangle) == 4 else (0, 0, 0, 0)
    if not (0 <= left < right <= width and 0 <= top < bottom <= height):
        raise Refusal(
            f"{list(rectangle)} is no left, right, top and bottom within a screen of {width} x {height}: "
            f"use --world.occlude 0 {width // 2} 0 {height // 2}."
        )


class OccludedStacks:
    """Stacks of small grey images in which a rectangle of the screen is hidden. Apart from that they equal
    ale-py's stacks: screens are reduced by averaging over areas; at the beginning of a game the earlier
    images of a stack are 0.

    size: number of games. stack: number of images. side: width and height of an image, in pixels. rectangle:
    left, right, top, bottom, in pixels of the screen. colour: red, green, blue.
    """

    def __init__(
        self, size: int, stack: int, side: int, rectangle: Sequence[int], colour: Sequence[int]
    ) -> None:
        import cv2

        self._cv2: Any = cv2
        self._side = side
        self._left, self._right, self._top, self._bottom = rectangle
        self._grey = round(sum(share * value for share, value in zip(_GREY_SHARES, colour, strict=True)))
        self._stacks: Images = np.zeros((size, stack, side, side), np.uint8)

    def first(self, screens: Images) -> Images:
        """The stacks [B, stack, side, side] of games that begin with ``screens`` [B, 210, 160]."""
        return self.next(screens, np.ones(len(screens), np.bool_))

    def next(self, screens: Images, over: npt.NDArray[np.bool_]) -> Images:
        """The stacks [B, stack, side, side] after the next ``screens`` [B, 210, 160]. over: [B], which games
        begin with this screen."""
        stacks = self.shifted(screens)
        if over.any():
            stacks[over, :-1] = 0
        self._stacks = stacks
        return stacks

    def shifted(self, screens: Images) -> Images:
        """The stacks with ``screens`` as their newest images; ``next`` still continues from the stacks
        before."""
        stacks = np.empty_like(self._stacks)
        stacks[:, :-1] = self._stacks[:, 1:]
        size, area = (self._side, self._side), self._cv2.INTER_AREA
        for screen, image in zip(screens, stacks[:, -1], strict=True):
            occluded = screen.copy()
            occluded[self._top : self._bottom, self._left : self._right] = self._grey
            image[...] = self._cv2.resize(occluded, size, interpolation=area)
        return stacks
