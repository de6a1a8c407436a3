"""CartPole for many simulators at once, equal bit for bit to gymnasium's ``CartPole-v1``.

A step of all simulators costs about as much as a step of one ``CartPole-v1``.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from murmurate.spec import EnvSpec, TimeStep
from murmurate.worlds.env_state import load_generators, save_generators
from murmurate.worlds.episodes import EpisodeCounter, restore
from murmurate.worlds.generators import generators
from murmurate.worlds.interface import Picture, first_step

_GRAVITY = 9.8  # m / s^2
_TOTAL_MASS, _POLE_MASS = 0.1 + 1.0, 0.1  # kg: cart with pole, pole alone
_HALF_LENGTH = 0.5  # m, of the pole
_FORCE = 10.0  # N
_TAU = 0.02  # s, of one step
_LARGEST_ANGLE = 12 * 2 * math.pi / 360  # rad, of the pole from upright, beyond which an episode terminates
_LARGEST_OFFSET = 2.4  # m, of the cart from the centre, beyond which an episode terminates


class CartPoleSimulators:
    """``B`` carts; observations [B, 4] float32 are (x, x', theta, theta'). Exactly resumable.

    Physics: Barto, Sutton and Anderson 1983, appendix, without friction (as in the code Sutton
    published and gymnasium follows), integrated by Euler's rule in float64.

    limit: steps after which an episode is truncated.
    """

    def __init__(self, name: str, size: int, limit: int, first: int) -> None:
        self.size = size
        self._limit = limit
        self._first = first
        self._state: npt.NDArray[np.float64] = np.zeros((4, size))
        self._counter = EpisodeCounter(size)
        self._generators: list[np.random.Generator] = []
        self._action: npt.NDArray[np.int64] = np.zeros(size, np.int64)
        self.spec = EnvSpec(name=name, observation_shape=(4,), observation_dtype=torch.float32, actions=2)

    def reset(self, seed: int) -> TimeStep:
        self._generators = generators(seed, self._first, self.size)
        self._counter.clear()
        self._begin(np.ones(self.size, np.bool_))
        return first_step(self._observe())

    def send(self, action: Tensor) -> None:
        chosen = action.numpy()
        if chosen.min() < 0 or chosen.max() > 1:
            raise ValueError(f"{self.spec.name} has actions 0 and 1, got {action.tolist()}")
        self._action = chosen

    def receive(self) -> TimeStep:
        x, x_dot, theta, theta_dot = self._state
        x_acc, theta_acc = _accelerations(self._action, theta, theta_dot)
        # Euler's rule: positions change by the old velocities
        self._state = np.stack(
            (
                x + _TAU * x_dot,
                x_dot + _TAU * x_acc,
                theta + _TAU * theta_dot,
                theta_dot + _TAU * theta_acc,
            )
        )
        position, angle = self._state[0], self._state[2]
        terminated = (np.abs(position) > _LARGEST_OFFSET) | (np.abs(angle) > _LARGEST_ANGLE)
        reward = np.ones(self.size, np.float32)
        self._counter.tick(reward)
        truncated = (self._counter.length >= self._limit) & ~terminated
        over = terminated | truncated
        step = TimeStep(
            observation=self._observe(),
            reward=torch.from_numpy(reward),
            terminated=torch.from_numpy(terminated),
            truncated=torch.from_numpy(truncated),
        )
        if over.any():
            step.final_observation = step.observation
            step.episodes = self._counter.finish(over)
            self._begin(over)
            step.observation = self._observe()
        return step

    def state(self) -> dict[str, Any] | None:
        return {
            "physics": torch.from_numpy(self._state.copy()),
            "generators": save_generators(self._generators),
            "episodes": self._counter.state(),
        }

    def load(self, state: dict[str, Any]) -> TimeStep:
        restore(self._state, state["physics"], "physics")
        self._generators = load_generators(state["generators"], self.size)
        self._counter.load(state["episodes"])
        return first_step(self._observe())

    def picture(self) -> Picture:
        raise ValueError("no picture: open the world with picture=True")

    def close(self) -> None:
        pass

    def _begin(self, which: npt.NDArray[np.bool_]) -> None:
        for b in np.flatnonzero(which):
            self._state[:, b] = self._generators[b].uniform(-0.05, 0.05, size=4)

    def _observe(self) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(self._state.T, dtype=np.float32))


def _accelerations(
    action: npt.NDArray[np.int64], theta: npt.NDArray[np.float64], theta_dot: npt.NDArray[np.float64]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """(x'', theta'') [B], with gymnasium's order of operations, on which rounding depends."""
    force = np.where(action == 1, _FORCE, -_FORCE)
    cosine, sine = np.cos(theta), np.sin(theta)
    moment = _POLE_MASS * _HALF_LENGTH
    push = (force + moment * np.square(theta_dot) * sine) / _TOTAL_MASS
    theta_acc = (_GRAVITY * sine - cosine * push) / (
        _HALF_LENGTH * (4.0 / 3.0 - _POLE_MASS * np.square(cosine) / _TOTAL_MASS)
    )
    return push - moment * theta_acc * cosine / _TOTAL_MASS, theta_acc
