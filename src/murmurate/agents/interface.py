"""What the loop, the collectors and the evaluator ask of an agent."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from murmurate.spec import Batch, Outcome
from murmurate.vector import Replica


class Action(NamedTuple):
    """Actions [B] or [B, D], and the recurrent state [B, M] after them (None if there is none)."""

    action: Tensor
    memory: Tensor | None


class Agent(Protocol):
    """Acts for a batch of simulators, and learns from batches."""

    @property
    def clock(self) -> int:
        """Own updates so far."""
        ...

    @property
    def replicas(self) -> dict[str, Replica]:
        """One per optimizer, by name."""
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

    def learn(self, batch: Batch) -> Outcome: ...
    def state(self) -> dict[str, Any]: ...
    def load(self, state: dict[str, Any]) -> None: ...
