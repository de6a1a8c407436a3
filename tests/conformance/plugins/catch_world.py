"""A world with images: catch (Mnih et al. 2014). A ball falls, and a paddle catches it or not."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from murmurate.spec import EnvSpec, Episode, TimeStep, derive_seed
from murmurate.worlds.interface import SimulatorWorld

ROWS, COLUMNS = 8, 5


@dataclass(frozen=True)
class CatchWorld(SimulatorWorld):
    """An observation is the board [1, 8, 5] uint8; actions are left, stay and right; +1 for a caught ball, -1
    for a lost one."""

    name: ClassVar[str] = "catch"
    images: ClassVar[bool] = True

    def spec(self, fingerprint: object = None) -> EnvSpec:
        return EnvSpec("catch", (1, ROWS, COLUMNS), torch.uint8, actions=3)

    def open(
        self, simulators: int, *, training: bool, threads: int = 1, first: int = 0, picture: bool = False
    ) -> CatchSimulators:
        return CatchSimulators(self.spec(), simulators, first)


class CatchSimulators:
    def __init__(self, spec: EnvSpec, size: int, first: int) -> None:
        self.spec, self.size, self._first = spec, size, first
        self._ball = np.zeros((size, 2), np.int64)  # row, column
        self._paddle = np.zeros(size, np.int64)
        self._random: list[np.random.Generator] = []

    def reset(self, seed: int) -> TimeStep:
        seeds = [derive_seed(seed, "catch", self._first + b) for b in range(self.size)]
        self._random = [np.random.default_rng(s) for s in seeds]
        for b in range(self.size):
            self._drop(b)
        return self._shown(np.zeros(self.size), np.zeros(self.size, bool), [])

    def _drop(self, b: int) -> None:
        self._ball[b] = 0, self._random[b].integers(COLUMNS)
        self._paddle[b] = COLUMNS // 2

    def _shown(self, reward: Any, ended: Any, episodes: list[Episode]) -> TimeStep:
        flags = torch.from_numpy(ended)
        return TimeStep(
            self._boards(), torch.from_numpy(reward).float(), flags, torch.zeros_like(flags), None, episodes
        )

    def _boards(self) -> Tensor:
        boards = torch.zeros(self.size, 1, ROWS, COLUMNS, dtype=torch.uint8)
        which = torch.arange(self.size)
        boards[which, 0, torch.from_numpy(self._ball[:, 0]), torch.from_numpy(self._ball[:, 1])] = 255
        boards[which, 0, ROWS - 1, torch.from_numpy(self._paddle)] = 255
        return boards

    def send(self, action: Tensor) -> None:
        moved = action.numpy()
        if ((moved < 0) | (moved > 2)).any():
            raise ValueError(f"catch has actions 0 to 2, got {moved.tolist()}")
        self._paddle = np.clip(self._paddle + moved - 1, 0, COLUMNS - 1)
        self._ball[:, 0] += 1

    def receive(self) -> TimeStep:
        ended = self._ball[:, 0] == ROWS - 1
        caught = np.where(self._ball[:, 1] == self._paddle, 1.0, -1.0)
        reward = np.where(ended, caught, 0.0)
        episodes = [Episode(int(b), float(reward[b]), ROWS - 1) for b in np.flatnonzero(ended)]
        for b in np.flatnonzero(ended):
            self._drop(int(b))
        return self._shown(reward, ended, episodes)

    def state(self) -> dict[str, Any]:
        return {
            "ball": torch.from_numpy(self._ball.copy()),
            "paddle": torch.from_numpy(self._paddle.copy()),
            "random": [json.dumps(r.bit_generator.state) for r in self._random],
        }

    def load(self, state: dict[str, Any]) -> TimeStep:
        self._ball[:] = state["ball"].numpy()
        self._paddle[:] = state["paddle"].numpy()
        self._random = []
        for text in state["random"]:
            generator = np.random.default_rng()
            generator.bit_generator.state = json.loads(text)
            self._random.append(generator)
        return self._shown(np.zeros(self.size), np.zeros(self.size, bool), [])

    def picture(self) -> Any:
        board = self._boards()[0, 0].numpy()
        return np.repeat(np.kron(board, np.ones((8, 8), np.uint8))[..., None], 3, -1)

    def close(self) -> None:
        pass


def names() -> list[str]:
    return ["catch"]


def world(name: str) -> CatchWorld | None:
    return CatchWorld() if name == "catch" else None
