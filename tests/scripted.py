"""A world whose every reward and ending is written down beforehand, and an actor that is easy to foresee."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from murmurate.agents.interface import Action
from murmurate.spec import EnvSpec, Episode, TimeStep

# A line is one step of one simulator: (reward, how it ends). What follows an ending is a new episode.
Line = tuple[float, str]


@dataclass
class ScriptedSimulators:
    """Simulator b shows 1000 * (first + b) + n, n counting all its observations, final ones included."""

    script: list[list[Line]]
    first: int = 0
    savable: bool = True
    seeds: list[int] = field(default_factory=list)
    sent: list[list[int]] = field(default_factory=list)
    closed: bool = False

    def __post_init__(self) -> None:
        self.spec = EnvSpec("scripted", (1,), torch.float32, actions=100)
        self.size = len(self.script)
        self._step = 0
        self._shown = [0] * self.size
        self._return = [0.0] * self.size
        self._length = [0] * self.size

    def reset(self, seed: int) -> TimeStep:
        self.seeds.append(seed)
        self._shown = [0] * self.size
        self._return = [0.0] * self.size
        self._length = [0] * self.size
        return self._still()

    def _still(self) -> TimeStep:
        nothing = torch.zeros(self.size, dtype=torch.bool)
        return TimeStep(self._observe(), torch.zeros(self.size), nothing, nothing)

    def send(self, action: Tensor) -> None:
        self.sent.append(action.tolist())

    def receive(self) -> TimeStep:
        lines = [self.script[b][self._step % len(self.script[b])] for b in range(self.size)]
        self._step += 1
        for b, (reward, _) in enumerate(lines):
            self._shown[b] += 1
            self._return[b] += reward
            self._length[b] += 1
        final = self._observe()
        episodes = []
        for b, (_, end) in enumerate(lines):
            if end:
                episodes.append(Episode(b, self._return[b], self._length[b]))
                self._shown[b] += 1
                self._return[b], self._length[b] = 0.0, 0
        truncated = torch.tensor([end == "truncated" for _, end in lines])
        return TimeStep(
            self._observe(),
            torch.tensor([reward for reward, _ in lines]),
            torch.tensor([end == "terminated" for _, end in lines]),
            truncated,
            final if truncated.any() else None,
            episodes,
        )

    def state(self) -> dict[str, Any] | None:
        if not self.savable:
            return None
        return {
            "step": self._step,
            "shown": [*self._shown],
            "return": [*self._return],
            "length": [*self._length],
        }

    def load(self, state: dict[str, Any]) -> TimeStep:
        self._step = state["step"]
        self._shown, self._return, self._length = (
            [*state["shown"]],
            [*state["return"]],
            [*state["length"]],
        )
        return self._still()

    def picture(self) -> Any:
        return np.full((2, 2, 3), self._shown[0], np.uint8)

    def close(self) -> None:
        self.closed = True

    def _observe(self) -> Tensor:
        return torch.tensor([[1000.0 * (self.first + b) + n] for b, n in enumerate(self._shown)])


class Counter:
    """Acts by (observation + memory) mod 100; its memory [B, 1] counts steps since the episode began."""

    def initial_memory(self, batch: int) -> Tensor | None:
        return torch.zeros(batch, 1)

    def act(
        self,
        observation: Tensor,
        memory: Tensor | None,
        first: Tensor,
        generator: torch.Generator,
        greedy: bool = False,
    ) -> Action:
        assert memory is not None
        kept = torch.where(first[:, None], 0.0, memory)
        return Action(((observation + kept)[:, 0] % 100).long(), kept + 1)


class Roulette:
    """Acts at random with the generator, or by the sum of the observation if ``greedy``; no memory."""

    def __init__(self, actions: int, shape: tuple[int, ...] = ()) -> None:
        self.actions, self.shape = actions, shape

    def initial_memory(self, batch: int) -> Tensor | None:
        return None

    def act(
        self,
        observation: Tensor,
        memory: Tensor | None,
        first: Tensor,
        generator: torch.Generator,
        greedy: bool = False,
    ) -> Action:
        n = len(observation)
        if greedy:
            total = observation.reshape(n, -1).double().sum(1)
            return Action((total * 1000).long() % self.actions, None)
        if self.actions:
            return Action(torch.randint(self.actions, (n,), generator=generator), None)
        return Action(torch.rand(n, *self.shape, generator=generator) * 2 - 1, None)


class Always:
    """One action for ever."""

    def __init__(self, action: int) -> None:
        self.action = action

    def initial_memory(self, batch: int) -> Tensor | None:
        return None

    def act(
        self,
        observation: Tensor,
        memory: Tensor | None,
        first: Tensor,
        generator: torch.Generator,
        greedy: bool = False,
    ) -> Action:
        return Action(torch.full((len(observation),), self.action), None)


class Watcher(Roulette):
    """Greedy whatever it is asked: a deterministic function of the observation alone."""

    def act(self, observation, memory, first, generator, greedy=False) -> Action:  # type: ignore[no-untyped-def]
        return super().act(observation, memory, first, generator, greedy=True)
