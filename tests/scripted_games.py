"""A game for the server of games whose frames are foreseen, and which fails as it is told to."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np

from murmurate.worlds._game_server import Frame, Unusable

SHAPE = (3, 2, 2)
SCREEN = (4, 6, 3)


def frame(number: int, seed: int) -> Frame:
    """A frame tells its number in the game, and the seed of the game."""
    return np.full(SHAPE, (7 * seed + number) % 251, np.uint8)


class ScriptedGame:
    """Action 0: go on, with reward 1. 1: terminate. 2: truncate. Others fail as ``_FAILURES`` says.

    once: a file; while it exists, failing actions only go on. broken: fails in begin.
    """

    success: bool | None = None

    def __init__(self, once: str = "", broken: bool = False, unusable: bool = False) -> None:
        if unusable:
            raise Unusable("There is no cartridge. Run: apt-get install cartridge")
        self._once, self._broken = Path(once) if once else None, broken
        self._seed = self._number = 0
        self._killed = False

    def begin(self, seed: int | None, steps: int) -> Frame:
        if self._broken:
            raise OSError("no power")
        if seed is not None:
            self._seed, self._number = seed % 13, -1
        self._number += 1
        return frame(self._number, self._seed)

    def step(self, action: int) -> tuple[Frame, float, bool, bool]:
        self._number += 1
        shown = frame(self._number, self._seed)
        if action > 2 and not (self._once and self._once.exists()):
            if self._once:
                self._once.touch()
            if action == 3:
                raise RuntimeError("out of memory")
            if action == 4:
                return shown, float("nan"), False, False
            if action == 5:
                return shown[:, :1], 1.0, False, False
            if action == 6:
                while not self._killed:
                    time.sleep(0.01)
                raise RuntimeError("killed")
            if action == 7:
                os._exit(9)
            if action == 8:
                while True:
                    time.sleep(1)
        return shown, 1.0, action == 1, action == 2

    def picture(self) -> Frame:
        return np.full(SCREEN, self._number, np.uint8)

    def kill(self) -> bool:
        self._killed = True
        return True

    def close(self) -> None:
        pass
