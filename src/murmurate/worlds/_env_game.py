"""A gymnasium environment as a ``Game`` of the game server. Imports no torch."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from murmurate.worlds._game_server import Frame
from murmurate.worlds._gym_env import close, reset, success_of
from murmurate.worlds._numbers import number
from murmurate.worlds._spaces import JOINT_ACTIONS, action_format, observation_format
from murmurate.worlds.env_state import Unsavable, load, load_generators, save_generators, saver
from murmurate.worlds.figures import figures_of


class EnvGame:
    """One gymnasium environment.

    make: "module:function" that makes the environment with ``options``; its import must not import torch.
    observe, joint_actions: see ``_spaces.observation_format`` and ``action_format``.

    Nothing can end a call that hangs, so the whole server ends, and all of its environments are replaced.
    """

    def __init__(
        self,
        make: str,
        options: Mapping[str, Any],
        observe: Sequence[str] = (),
        joint_actions: int = JOINT_ACTIONS,
    ) -> None:
        module, _, function = make.partition(":")
        self._env = getattr(importlib.import_module(module), function)(**options)
        self._saver = saver(self._env)
        self._observations = observation_format(self._env.observation_space, make, observe)
        self._actions = action_format(self._env.action_space, make, joint_actions)
        self.success: bool | None = None
        self.figures: Mapping[str, float] = {}

    def begin(self, seed: int | None, steps: int) -> Frame:
        return self._frame(reset(self._env, seed))

    def step(self, action: Any) -> tuple[Frame, float, bool, bool]:
        (converted,) = self._actions.convert(np.asarray(action)[None])
        observation, reward, terminated, truncated, info = self._env.step(converted)
        self.success, self.figures = success_of(info), figures_of(info)
        return self._frame(observation), number(reward), bool(terminated), bool(truncated)

    def picture(self) -> Frame:
        return np.asarray(self._env.render(), np.uint8)

    def kill(self) -> bool:
        return False

    def state(self) -> dict[str, Any] | None:
        if self._saver is None:
            return None
        try:
            physics = self._saver.save()
            return {"physics": physics, "generator": save_generators([self._env.unwrapped.np_random])[0]}
        except Unsavable:
            return None

    def load(self, state: dict[str, Any]) -> None:
        if self._saver is None:
            raise ValueError("it cannot be saved, so there is no state to load")
        load(self._env, self._saver, state["physics"], load_generators([state["generator"]], 1)[0])

    def close(self) -> None:
        close(self._env)

    def _frame(self, observation: Any) -> Frame:
        return np.ascontiguousarray(self._observations.convert(observation), self._observations.dtype)
