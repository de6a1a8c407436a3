"""Environments that break, for ``gym:faults.broken_environments:Broken-v0``; MURMURATE_BROKEN says how.

One that hangs does so in the first process that creates the file MURMURATE_BROKEN_ONCE, or in all without it.
"""

from __future__ import annotations

import os
import time

import gymnasium
import numpy as np


class Broken(gymnasium.Env):  # type: ignore[type-arg]
    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (3,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, how: str | None = None) -> None:
        self.how = how or os.environ.get("MURMURATE_BROKEN", "")
        self.steps = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if self.how == "fails in reset":
            raise OSError("no licence")
        return np.zeros(3, np.float32), {}

    def step(self, action):
        self.steps += 1
        observation, reward = np.full(3, 0.5, np.float32), 1.0
        if self.steps > 20:
            if self.how == "exits":
                raise SystemExit(0)
            if self.how == "hangs" and self._is_first():
                time.sleep(3600)
            observation = {
                "nan": np.full(3, np.nan),
                "infinity": np.array([0, np.inf, 0]),
                "short": np.zeros(1),
                "long": np.zeros(4),
            }.get(self.how, observation)
            reward = {"none": None, "nan reward": float("nan"), "huge reward": 1e300}.get(self.how, reward)
        return observation, reward, self.steps % 10 == 0, False, {}

    def close(self):
        if self.steps > 200 and self.how == "fails in close":
            raise OSError("the licence server is gone")
        if self.steps > 200 and self.how == "dies in close":
            os.abort()

    def _is_first(self) -> bool:
        once = os.environ.get("MURMURATE_BROKEN_ONCE")
        if once is None:
            return True
        try:
            os.close(os.open(once, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True


gymnasium.register("Broken-v0", Broken)
