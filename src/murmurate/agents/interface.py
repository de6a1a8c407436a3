"""What the loop, the collectors and the evaluator ask of an agent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from murmurate.replica.vector import Replica
from murmurate.spec import Batch, EnvSpec, Examples, Outcome


class OnPolicy(NamedTuple):
    """It learns from rollouts of ``steps`` env steps of each simulator, each once."""

    steps: int


class OffPolicy(NamedTuple):
    """It learns from batches of transitions drawn from a replay, with returns over ``n_step`` steps."""

    batch: int
    n_step: int
    discount: float


class Action(NamedTuple):
    """Actions [B] or [B, D], and the recurrent state [B, M] after them (None if there is none).

    taken, best: [B], the values of these actions and of the best ones, where the agent came by them.
    """

    action: Tensor
    memory: Tensor | None
    taken: Tensor | None = None
    best: Tensor | None = None


class Learner(Protocol):
    """Learns from batches."""

    @property
    def clock(self) -> int:
        """Own updates so far."""
        ...

    @property
    def replicas(self) -> dict[str, Replica]:
        """One per optimizer, by name."""
        ...

    def learn(self, batch: Batch) -> Outcome: ...
    def state(self) -> dict[str, Any]: ...
    def load(self, state: dict[str, Any]) -> None: ...


class Agent(Learner, Protocol):
    """Acts for a batch of simulators, and learns from batches."""

    def seat(self, first: int, total: int) -> None:
        """Say which of ``total`` simulators it acts for: number ``first`` and on. Who explores by the number
        of its simulator asks that (see ``DQN.exploration``)."""
        ...

    def initial_memory(self, batch: int) -> Tensor | None: ...

    def act(
        self,
        observation: Tensor,
        memory: Tensor | None,
        first: Tensor,
        generator: torch.Generator,
        greedy: bool = False,
    ) -> Action:
        """Choose actions for ``observation`` [B, ...]; ``first`` [B] forgets memory; no gradient."""
        ...


class Workload(Protocol):
    """Hyper-parameters of a model that learns from examples: a frozen dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Any]]
    name: ClassVar[str]
    summary: ClassVar[str]

    @property
    def learns_from(self) -> Examples: ...

    def resolved(self, spec: EnvSpec, device: torch.device) -> Workload:
        """This config with nothing left to the machine."""
        ...

    def build(
        self,
        spec: EnvSpec,
        replicate: Callable[..., Replica],
        *,
        seed: int,
        device: torch.device,
        updates: int | None = None,
        corpus: Any = None,
        validation: Any = None,
    ) -> Learner:
        """The learner of one replica.

        corpus: what it learns from, for one that begins with a look at it. validation: what it is to be
        measured by on the way.
        """
        ...


class AgentConfig(Protocol):
    """Hyper-parameters of an agent: a frozen dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Any]]
    name: ClassVar[str]
    summary: ClassVar[str]

    @property
    def learns_from(self) -> OnPolicy | OffPolicy: ...

    def resolved(self, spec: EnvSpec, device: torch.device) -> AgentConfig:
        """This config without an ``auto`` in it."""
        ...

    def build(
        self,
        spec: EnvSpec,
        replicate: Callable[..., Replica],
        *,
        seed: int,
        device: torch.device,
        updates: int | None = None,
    ) -> Agent:
        """The agent for one replica. All replicas of a run start alike, from (seed).

        updates: length of the run for schedules, in own updates; None if only time ends it.
        Raises ValueError for hyper-parameters that make no sense.
        """
        ...
