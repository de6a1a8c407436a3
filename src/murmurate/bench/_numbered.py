"""A world whose observations name the step that they belong to, and an agent that learns nothing: for
counting what a replay stores."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from murmurate.agents.interface import Action, OneReplica
from murmurate.replicator.learner import Context, LearnerConfig
from murmurate.spec import Batch, EnvSpec, Outcome, TimeStep, Transitions
from murmurate.worlds.interface import Picture, SimulatorWorld, first_step

OBSERVATION_SIZE, ACTION_SIZE = 17, 6
SPEC = EnvSpec("numbered", (OBSERVATION_SIZE,), torch.float32, actions=0, action_shape=(ACTION_SIZE,))


@dataclass(frozen=True)
class NumberedWorld(SimulatorWorld):
    """An observation begins with the simulator's index, the process id and the number of the step. Episodes
    are cut off after ``length`` steps."""

    length: int = 1_000

    name: ClassVar[str] = "numbered"
    images: ClassVar[bool] = False

    def open(
        self, simulators: int, *, training: bool, threads: int = 1, first: int = 0, picture: bool = False
    ) -> Any:
        return _Numbered(simulators, first, self.length)


class _Numbered:
    def __init__(self, size: int, first: int, length: int) -> None:
        self.spec, self.size, self._length = SPEC, size, length
        self._observation = torch.zeros(size, OBSERVATION_SIZE)
        self._observation[:, 0] = torch.arange(first, first + size)
        self._observation[:, 1] = os.getpid()
        self._step = 0

    def reset(self, seed: int) -> TimeStep:
        return first_step(self._observation.clone())

    def send(self, action: Tensor) -> None:
        pass

    def receive(self) -> TimeStep:
        self._step += 1
        self._observation[:, 2] = self._step
        observation = self._observation.clone()
        ends = torch.full((self.size,), self._step % self._length == 0)
        reward = torch.ones(self.size)
        final = observation if ends.any() else None
        return TimeStep(observation, reward, torch.zeros_like(ends), ends, final)

    def state(self) -> None:
        return None

    def load(self, state: dict[str, Any]) -> TimeStep:
        raise ValueError("these simulators are not saved")

    def picture(self) -> Picture:
        raise ValueError("no picture: the world has none")

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class NumberedLearner(LearnerConfig):
    """Acts with zeros; its priorities are random."""

    batch: int = 256

    name: ClassVar[str] = "numbered"
    summary: ClassVar[str] = "learns nothing"

    @property
    def requires(self) -> Transitions:
        return Transitions(self.batch, 1, 0.99)

    def build(self, context: Context) -> _NumberedAgent:
        return _NumberedAgent(context, self.batch)


class _NumberedAgent(OneReplica):
    def __init__(self, context: Context, batch: int) -> None:
        self.replica = context.replicate(
            "net", nn.Linear(1, 1), lambda params: torch.optim.SGD(params, lr=0.1)
        )
        self._priorities = torch.rand(64, batch, generator=torch.Generator().manual_seed(context.rank))
        self._turn, self.batch = 0, batch

    def act(
        self,
        observation: Tensor,
        memory: Tensor | None,
        first: Tensor,
        generator: torch.Generator,
        greedy: bool = False,
    ) -> Action:
        return Action(torch.zeros(len(observation), ACTION_SIZE), None)

    def learn(self, batch: Batch) -> Outcome:
        self._turn = (self._turn + 1) % len(self._priorities)
        return Outcome(priorities=self._priorities[self._turn])
