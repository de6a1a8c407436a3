"""An environment whose steps a test tells."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces

from murmurate.worlds.gym_simulators import GymSimulators


class Told(gymnasium.Env[Any, Any]):
    """Its steps return what ``tell`` does: (observation, reward)."""

    action_space = spaces.Discrete(2)

    def __init__(self, tell: Callable[[], Any], space: Any = None) -> None:
        self._tell = tell
        self.observation_space = spaces.Box(-1, 1, (2,), np.float32) if space is None else space

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> Any:
        return *self._tell(), False, False, {}


def make_rich() -> Told:
    return Told(lambda: (np.zeros(2, np.float32), 1e39))


def stepped(tell: Callable[[], Any], space: Any = None, steps: int = 1) -> Any:
    simulators = GymSimulators("told", lambda b: (Told(tell, space), 10**6), 1, 0)
    simulators.reset(0)
    for _ in range(steps):
        simulators.send(torch.zeros(1, dtype=torch.int64))
        step = simulators.receive()
    return step


def wind() -> Any:
    return {}["gust"]
