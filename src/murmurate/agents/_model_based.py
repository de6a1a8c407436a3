"""Shared by agents that learn a model of the world, and a policy from what it predicts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from murmurate.agents._dynamics import DynamicsModel, ModelConfig, load_generator, saved_generator
from murmurate.agents._soft_actor_critic import SoftActorCritic
from murmurate.agents.interface import Action, Imagined
from murmurate.ranges import (
    AnyFloat,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    PositiveOrInfinite,
    PositiveShare,
    UnitInterval,
    Widths,
)
from murmurate.replica.vector import Replica
from murmurate.replicator.learner import Context
from murmurate.spec import Batch, Outcome, derive_generator
from murmurate.worlds.terminations import AUTO, check, termination


@dataclass(frozen=True)
class PolicySettings:
    """Settings of soft actor-critic, which learns the policy (see ``SAC``).

    batch: transitions of an update. discount: discount factor per env step.
    policy_rate, critic_rate, temperature_rate: learning rates of Adam. With a temperature_rate of 0 the
        temperature is constant.
    temperature: initial alpha. target_entropy: H, at which the temperature keeps the policy's entropy; None:
        -D for actions of D numbers.
    clip: largest norm of the gradients of policy and critics (inf: no limit).
    hidden: widths of each net's layers; one number: two layers of that width.
    target_every: a learner's updates between moves of the target critics towards the critics. polyak: share
        of the way that they move; 1 copies.
    precision: precision of the products between hidden layers; ``auto`` is bfloat16 where the device is
        faster in it.
    """

    batch: PositiveInt = 256
    discount: UnitInterval = 0.99
    policy_rate: NonNegativeFloat = 3e-4
    critic_rate: NonNegativeFloat = 3e-4
    temperature_rate: NonNegativeFloat = 3e-4
    temperature: PositiveFloat = 1.0
    target_entropy: AnyFloat | None = None
    clip: PositiveOrInfinite = math.inf
    hidden: Widths = 256
    target_every: PositiveInt = 1
    polyak: PositiveShare = 0.005
    precision: Literal["float32", "bfloat16", "auto"] = "float32"

    # read by ``SoftActorCritic``; the name is for error messages
    name: ClassVar[str] = "a model-based agent"
    normalize_observations: ClassVar[bool] = False
    network: ClassVar[str] = ""


class PlannedFits:
    """What the config of an agent with a ``model`` tells ``murmurate plan``, which refuses one without these
    methods."""

    model: ModelConfig

    def fit_steps(self, transitions: float) -> float:
        """Assumed gradient steps of a fit to so many transitions."""
        return self.model.fit_steps(transitions)

    def with_short_fits(self) -> Any:
        """This config with fits of few gradient steps, each of which takes as long."""
        return dataclasses.replace(self, model=self.model.with_short_fits())  # type: ignore[type-var]


class WorldModel:
    """Predicts rewards, changes of observations, and where episodes end.

    end: the rule by which episodes end, see ``worlds.terminations``. Raises Refusal if this world's rule is
    not known, or does not fit its observations, and ValueError if an observation contains earlier ones, or
    whole numbers.
    """

    def __init__(self, config: ModelConfig, context: Context, end: str) -> None:
        spec = context.spec
        if spec.history > 1:
            raise ValueError(f"a model of {spec.name} predicts one observation: leave out frame_stack")
        if not spec.observation_dtype.is_floating_point:
            raise ValueError(
                f"a model predicts real numbers, and the observations of {spec.name} are uint8: convert them "
                "to float32, or use sac"
            )
        self.terminated = termination(spec.name, end)
        if end != AUTO and context.device.type != "meta":  # there, its tensors have no values to branch on
            check(self.terminated, end, spec.observation_shape, context.device)
        self._shape, self._device = spec.observation_shape, context.device
        observation_size = math.prod(spec.observation_shape)
        inputs = observation_size + math.prod(spec.action_shape)
        self.dynamics = DynamicsModel(config, context, inputs, 1 + observation_size)

    def fit(self, transitions: Mapping[str, Tensor], interrupted: Callable[[], bool]) -> bool:
        """See ``ModelAgent.fit``."""
        size = len(transitions["reward"])
        observation, action, reward, next_observation = (
            transitions[name].to(self._device, torch.float32).reshape(size, -1)
            for name in ("observation", "action", "reward", "next_observation")
        )
        inputs = torch.cat((observation, action), 1)
        return self.dynamics.fit(inputs, torch.cat((reward, next_observation - observation), 1), interrupted)

    def step(self, observation: Tensor, action: Tensor) -> Imagined:
        """One step from ``observation`` [B, ...] by ``action`` [B, D]."""
        flat = observation.flatten(1)
        predicted = self.dynamics.predict(torch.cat((flat, action.flatten(1)), 1))
        next_observation = (flat + predicted[:, 1:]).view(-1, *self._shape)
        return Imagined(
            observation, action, predicted[:, 0], next_observation, self.terminated(next_observation)
        )


class ModelBasedAgent:
    """One actor-learner with a model of its own (see ``ModelAgent``).

    config: an ``MBPO``, or another config with its fields.
    """

    acting = ("policy",)

    def __init__(self, config: Any, context: Context) -> None:
        self.soft_actor_critic = SoftActorCritic(config.policy, context)
        self.world_model = WorldModel(config.model, context, config.termination)
        self._context = context

    @property
    def replicas(self) -> dict[str, Replica]:
        return {**self.soft_actor_critic.replicas, "model": self.world_model.dynamics.replica}

    @property
    def counted(self) -> tuple[str, ...]:
        """The replicas whose updates count as the agent's: all but the model."""
        return tuple(self.soft_actor_critic.replicas)

    @cached_property
    def generator(self) -> torch.Generator:
        """Generator of the policy's actions in rollouts."""
        context = self._context
        return derive_generator(context.seed, "imagined actions", context.rank, context.device)

    def assign_simulators(self, first: int, total: int) -> None:
        """Exploration does not differ between simulators."""

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
        """A draw from the policy; its most likely action if ``greedy``."""
        return self.soft_actor_critic.act(observation, generator, greedy)

    def fit(self, transitions: Mapping[str, Tensor], interrupted: Callable[[], bool]) -> bool:
        return self.world_model.fit(transitions, interrupted)

    def imagine(self, observation: Tensor, learn: bool = True) -> Imagined:
        action = self.soft_actor_critic.act(observation, self.generator, greedy=False).action
        return self.world_model.step(observation, action)

    def learn(self, batch: Batch) -> Outcome:
        metrics, _ = self.soft_actor_critic.update(batch.data)
        return Outcome({**metrics, **self.world_model.dynamics.metrics()})

    def state(self) -> dict[str, Any]:
        return {
            "core": self.soft_actor_critic.state(),
            "model": self.world_model.dynamics.state(),
            "actions": saved_generator(self.generator, self._context),
        }

    def load(self, state: dict[str, Any]) -> None:
        self.soft_actor_critic.load(state["core"])
        self.world_model.dynamics.load(state["model"])
        load_generator(self.generator, state["actions"], self._context)
