"""Twin delayed deterministic policy gradients (Fujimoto et al. 2018), and its distributed form SPO-TD3."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch

from murmurate.agents._deterministic import DeterministicAgent
from murmurate.nets.own_network import checked_network
from murmurate.nets.precision import resolve_precision
from murmurate.ranges import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    PositiveOrInfinite,
    PositiveShare,
    ReturnSteps,
    UnitInterval,
    Widths,
)
from murmurate.replicator.learner import Context, LearnerConfig
from murmurate.spec import EnvSpec, Transitions


@dataclass(frozen=True)
class TD3(LearnerConfig):
    """Hyper-parameters; the defaults are those of the authors' code.

    Actions are learned scaled to [-1, 1] by their bounds, so noise has no unit.

    batch: transitions of an update; updates per env step are ``replay.samples_per_insert`` / batch.
    n_step: steps of the returns. discount: discount factor per env step.
    policy_rate, critic_rate: learning rates of Adam. clip: largest norm of each gradient (inf: no limit).
    hidden: widths of each net's layers; one number: two layers of that width.
    policy_delay: updates of the critics for each update of the policy; 0: the policy is updated at the end of
        each round, as often as the critics were in that round, with the critics on which the replicas have
        agreed (SPO-TD3: Zhang 2022, Algorithm 8).
    target_every: a learner's updates of the critics between moves of the target nets (policy and critics)
        towards the nets; under strategies with common rounds those that are due in a round are made together
        at its end. polyak: share of the way of a move; 1 copies.
    target_noise: standard deviation of the noise of target actions. noise_clip: largest size of this noise.
    exploration_noise: standard deviation of the noise that exploration adds to actions.
    normalize_observations: normalize observations by the running mean and deviation of the drawn batches,
    limited to +-10.
    precision: precision of the products between hidden layers, which are most of the work; ``auto`` is
        bfloat16 where the device is faster in it.
    network: nets of your own in place of those with ``hidden``, which may read images: FILE.py:NAME,
        module:NAME (docs/worlds.md).
    """

    name: ClassVar[str] = "td3"
    summary: ClassVar[str] = "deterministic policy, twin critics, delayed policy updates; vector actions"

    batch: PositiveInt = 256
    n_step: ReturnSteps = 1
    discount: UnitInterval = 0.99
    policy_rate: NonNegativeFloat = 3e-4
    critic_rate: NonNegativeFloat = 3e-4
    clip: PositiveOrInfinite = math.inf
    hidden: Widths = 256
    policy_delay: NonNegativeInt = 2
    target_every: PositiveInt = 2
    polyak: PositiveShare = 0.005
    target_noise: NonNegativeFloat = 0.2
    noise_clip: NonNegativeFloat = 0.5
    exploration_noise: NonNegativeFloat = 0.1
    normalize_observations: bool = False
    precision: Literal["float32", "bfloat16", "auto"] = "float32"
    network: str = field(default="", metadata={"since": 9})

    def __post_init__(self) -> None:
        object.__setattr__(self, "network", checked_network(self.network))

    @property
    def requires(self) -> Transitions:
        return Transitions(self.batch, self.n_step, self.discount)

    def resolved(self, spec: EnvSpec, device: torch.device) -> TD3:
        """This config without an ``auto`` in it."""
        return resolve_precision(self, device)

    def build(self, context: Context) -> DeterministicAgent:
        """The agent. Raises ValueError for a world of discrete actions, for images without ``network``, and
        as ``own_nets``."""
        config = self.resolved(context.spec, context.device)
        return DeterministicAgent(
            config,
            context,
            critics_count=2,
            policy_delay=config.policy_delay,
            target_noise=config.target_noise,
            noise_clip=config.noise_clip,
        )
