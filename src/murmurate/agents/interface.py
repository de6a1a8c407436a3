"""The protocol of agents, which are learners that also act."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from murmurate.replica.vector import Replica
from murmurate.replicator.learner import Learner


class Action(NamedTuple):
    """An agent's actions in B simulators.

    action: [B] or [B, D]. memory: [B, M], the recurrent state afterwards (None if there is none).
    action_value, greedy_value: [B], the values of these actions and of the greedy actions, if they were
    computed; they give the initial priorities in a replay.
    behaviour: tensors [B, ...] by name that are recorded with the action (see ``Rollouts.behaviour``).
    outputs: outputs of the nets [B, ...] by name, such as logits, that are exported with the action.
    """

    action: Tensor
    memory: Tensor | None
    action_value: Tensor | None = None
    greedy_value: Tensor | None = None
    behaviour: Mapping[str, Tensor] = MappingProxyType({})
    outputs: Mapping[str, Tensor] = MappingProxyType({})


class Policy(Protocol):
    """The acting part of an agent, which an evaluation needs."""

    def initial_memory(self, batch: int) -> Tensor | None:
        """The recurrent state [batch, M] before an episode; None if there is none."""
        ...

    def act(
        self,
        observation: Tensor,
        memory: Tensor | None,
        first: Tensor,
        generator: torch.Generator,
        greedy: bool = False,
    ) -> Action:
        """Choose actions for ``observation`` [B, ...], without a gradient.

        memory: [B, M], or None. first: [B] bool, where an episode begins and ``memory`` is reset. greedy:
        without exploration, as in an evaluation.
        """
        ...


class Agent(Learner, Policy, Protocol):
    """Acts for a batch of simulators, and learns from batches."""

    @property
    def acting(self) -> tuple[str, ...]:
        """Names of the replicas that ``act`` needs: the only ones that actor processes receive."""
        ...

    def assign_simulators(self, first: int, total: int) -> None:
        """Announce that the next ``act`` is for the simulators ``first``, ``first`` + 1, ... of ``total``,
        for agents whose exploration differs between simulators."""
        ...


class Imagined(NamedTuple):
    """B transitions that a model predicts from states of the world.

    observation, next_observation: [B, ...]. action: [B, D]. reward: [B]. terminated: [B] bool.
    priority: [B], the present priorities of the states; None for an agent without priorities.
    """

    observation: Tensor
    action: Tensor
    reward: Tensor
    next_observation: Tensor
    terminated: Tensor
    priority: Tensor | None = None


class ModelAgent(Agent, Protocol):
    """An agent with a model of the world (``spec.Model``). The source decides when to call these methods."""

    def fit(self, transitions: Mapping[str, Tensor], interrupted: Callable[[], bool]) -> bool:
        """Fit the model to ``observation`` [N, ...], ``action``, ``reward`` and ``next_observation``.

        interrupted: called often. If it returns True, ``fit`` restores the agent and returns False; replicas
        that make common rounds go on.
        """
        ...

    def imagine(self, observation: Tensor, learn: bool = True) -> Imagined:
        """The model's predictions of one step by the present policy from each ``observation`` [B, ...].

        learn: whether the agent may learn from them; False if not all replicas make this round, as
        strategies' steps may wait for the others.
        """
        ...


class PrioritizingAgent(ModelAgent, Protocol):
    """A ``ModelAgent`` that decides from which states it predicts."""

    def priority(self, observation: Tensor, action: Tensor) -> Tensor:
        """Priorities [B], at least 0, of real transitions from ``observation`` by ``action``."""
        ...


class ActsByPolicy:
    """Methods of an ``Agent`` that acts by its replica ``policy``, without memory, and with the same
    exploration in all simulators."""

    acting: tuple[str, ...] = ("policy",)

    def assign_simulators(self, first: int, total: int) -> None:
        """Exploration does not differ between simulators."""

    def initial_memory(self, batch: int) -> Tensor | None:
        return None


class OneReplica:
    """Methods for agents that have a single replica, no other state, and the same exploration in all
    simulators."""

    replica: Replica

    @property
    def clock(self) -> int:
        return self.replica.clock

    @property
    def replicas(self) -> dict[str, Replica]:
        return {self.replica.name: self.replica}

    @property
    def acting(self) -> tuple[str, ...]:
        return (self.replica.name,)

    def assign_simulators(self, first: int, total: int) -> None:
        """Exploration does not differ between simulators."""

    def initial_memory(self, batch: int) -> Tensor | None:
        return None

    def state(self) -> dict[str, Any]:
        """Empty: the replica saves its own state."""
        return {}

    def load(self, state: dict[str, Any]) -> None:
        """Nothing is saved beside the replica."""
