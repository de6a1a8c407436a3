"""A game for the server of games whose frames are foreseen, and which fails as it is told to."""

from __future__ import annotations

import os
import time
from pathlib import Path

import gymnasium
import numpy as np

from murmurate.worlds._game_server import Frame, Unusable

SHAPE = (3, 2, 2)
SCREEN = (4, 6, 3)
FOLDER = str(Path(__file__).parent)  # where a server finds this module


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


class Drifting(gymnasium.Env):  # type: ignore[type-arg]
    """A place that actions move; episodes of four steps, each a success.

    how: it fails so, where an action is negative, unless the file ``once`` exists; then it is made.
    """

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float64)
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)

    def __init__(self, how: str, once: str) -> None:
        self._how, self._once = how, Path(once)
        self._place, self._steps = np.zeros(2), 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._place, self._steps = self.np_random.integers(8, size=2) / 4, 0
        return self._place, {}

    def step(self, action):
        self._steps += 1
        self._place = self._place + action
        seen, reward = self._place, 1.0
        if action[0] < 0 and not self._once.exists():
            self._once.touch()
            if self._how == "raises":
                raise OSError("no licence")
            if self._how == "hangs":
                time.sleep(3600)
            seen = {"nan": np.full(2, np.nan), "short": np.zeros(1)}.get(self._how, seen)
            reward = float("nan") if self._how == "nan reward" else reward
        return seen, reward, False, self._steps == 4, {"success": True}

    def render(self):
        raise AttributeError("no screen")
