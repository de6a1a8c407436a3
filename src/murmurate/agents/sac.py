"""Soft actor-critic with an automatic temperature (Haarnoja et al. 2018b)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from murmurate.agents._soft_actor_critic import SoftActorCritic
from murmurate.agents.interface import Action, ActsByPolicy
from murmurate.nets.own_network import checked_network
from murmurate.nets.precision import resolve_precision
from murmurate.ranges import (
    AnyFloat,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    PositiveOrInfinite,
    PositiveShare,
    ReturnSteps,
    UnitInterval,
    Widths,
)
from murmurate.replica.vector import Replica
from murmurate.replicator.learner import Context, LearnerConfig
from murmurate.spec import Batch, EnvSpec, Outcome, Transitions


@dataclass(frozen=True)
class SAC(LearnerConfig):
    """Hyper-parameters; the defaults are those of Haarnoja et al. 2018b, Table 1.

    Actions are learned scaled to [-1, 1] by their bounds, and entropies are those of scaled actions.

    batch: transitions of an update; updates per env step are ``replay.samples_per_insert`` / batch.
    n_step: steps of the returns. discount: discount factor per env step.
    policy_rate, critic_rate, temperature_rate: learning rates of Adam. With a temperature_rate of 0 the
        temperature is constant.
    temperature: initial alpha. target_entropy: H, at which the temperature keeps the policy's entropy; None:
        -D for actions of D numbers.
    clip: largest norm of the gradients of policy and critics (inf: no limit).
    hidden: widths of each net's layers; one number: two layers of that width.
    target_every: a learner's updates between moves of the target critics towards the critics; under
        strategies with common rounds those that are due in a round are made together at its end. polyak:
        share of the way of a move; 1 copies.
    normalize_observations: normalize observations by the running mean and deviation of the drawn batches,
        limited to +-10.
    precision: precision of the products between hidden layers, which are most of the work; ``auto`` is
        bfloat16 where the device is faster in it.
    network: nets of your own in place of those with ``hidden``, which may read images: FILE.py:NAME,
        module:NAME (docs/worlds.md).
    """

    name: ClassVar[str] = "sac"
    summary: ClassVar[str] = "maximum entropy policy, twin critics, automatic temperature; vector actions"

    batch: PositiveInt = 256
    n_step: ReturnSteps = 1
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
    normalize_observations: bool = False
    precision: Literal["float32", "bfloat16", "auto"] = "float32"
    network: str = field(default="", metadata={"since": 9})

    def __post_init__(self) -> None:
        object.__setattr__(self, "network", checked_network(self.network))

    @property
    def requires(self) -> Transitions:
        return Transitions(self.batch, self.n_step, self.discount)

    def resolved(self, spec: EnvSpec, device: torch.device) -> SAC:
        """This config without an ``auto`` in it."""
        return resolve_precision(self, device)

    def build(self, context: Context) -> SACAgent:
        """The agent. Raises ValueError for a world of discrete actions, for images without ``network``, and
        as ``own_nets``."""
        return SACAgent(self.resolved(context.spec, context.device), context)


class SACAgent(ActsByPolicy):
    """One actor-learner (see ``Agent``)."""

    def __init__(self, config: SAC, context: Context) -> None:
        self.config, self.core = config, SoftActorCritic(config, context)

    @property
    def replicas(self) -> dict[str, Replica]:
        return self.core.replicas

    def act(
        self,
        observation: Tensor,
        memory: Tensor | None,
        first: Tensor,
        generator: torch.Generator,
        greedy: bool = False,
    ) -> Action:
        """A draw from the policy; its most likely action if ``greedy``."""
        return self.core.act(observation, generator, greedy)

    def learn(self, batch: Batch) -> Outcome:
        metrics, error = self.core.update(batch.data)
        return Outcome(metrics, priorities=error)

    def state(self) -> dict[str, Any]:
        return self.core.state()

    def load(self, state: dict[str, Any]) -> None:
        self.core.load(state)
