"""Deep deterministic policy gradients (Lillicrap et al. 2016)."""

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
class DDPG(LearnerConfig):
    """Hyper-parameters; the defaults are those of TD3 without its three additions (twin critics, delayed
    policy updates, smoothed targets), as Fujimoto et al. compare them ("Our DDPG").

    Actions are learned scaled to [-1, 1] by their bounds. Differs from Lillicrap et al., who explore
    with an Ornstein-Uhlenbeck process: the noise is Gaussian.

    batch: transitions of an update; updates per env step are ``replay.samples_per_insert`` / batch.
    n_step: steps of the returns. discount: discount factor per env step.
    policy_rate, critic_rate: learning rates of Adam. clip: largest norm of each gradient (inf: no limit).
    hidden: widths of each net's layers; one number: two layers of that width.
    target_every: a learner's updates between moves of the target nets towards the nets; under strategies with
        common rounds those that are due in a round are made together at its end. polyak: share of the way of
        a move; 1 copies.
    exploration_noise: standard deviation of the noise that exploration adds to actions.
    normalize_observations: normalize observations by the running mean and deviation of the drawn batches,
    limited to +-10.
    precision: precision of the products between hidden layers, which are most of the work; ``auto`` is
        bfloat16 where the device is faster in it.
    network: nets of your own in place of those with ``hidden``, which may read images: FILE.py:NAME,
        module:NAME (docs/worlds.md).
    """

    name: ClassVar[str] = "ddpg"
    summary: ClassVar[str] = "deterministic policy and one critic, from replay; vector actions"

    batch: PositiveInt = 256
    n_step: ReturnSteps = 1
    discount: UnitInterval = 0.99
    policy_rate: NonNegativeFloat = 3e-4
    critic_rate: NonNegativeFloat = 3e-4
    clip: PositiveOrInfinite = math.inf
    hidden: Widths = 256
    target_every: PositiveInt = 1
    polyak: PositiveShare = 0.005
    exploration_noise: NonNegativeFloat = 0.1
    normalize_observations: bool = False
    precision: Literal["float32", "bfloat16", "auto"] = "float32"
    network: str = field(default="", metadata={"since": 9})

    def __post_init__(self) -> None:
        object.__setattr__(self, "network", checked_network(self.network))

    @property
    def requires(self) -> Transitions:
        return Transitions(self.batch, self.n_step, self.discount)

    def resolved(self, spec: EnvSpec, device: torch.device) -> DDPG:
        """This config without an ``auto`` in it."""
        return resolve_precision(self, device)

    def build(self, context: Context) -> DeterministicAgent:
        """The agent. Raises ValueError for a world of discrete actions, for images without ``network``, and
        as ``own_nets``."""
        config = self.resolved(context.spec, context.device)
        return DeterministicAgent(
            config, context, critics_count=1, policy_delay=1, target_noise=0.0, noise_clip=0.0
        )
