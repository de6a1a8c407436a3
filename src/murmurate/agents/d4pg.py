"""Distributed distributional deterministic policy gradients (Barth-Maron et al. 2018), also from pixels."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor

from murmurate.agents._auto import resolve_auto
from murmurate.agents._off_policy import check_vector_actions, replicate
from murmurate.agents._running import statistics_updater
from murmurate.agents.interface import Action, ActsByPolicy
from murmurate.losses.categorical import categorical_cross_entropy, expectation, projected_target, support
from murmurate.nets.control import ControlPolicy
from murmurate.nets.d4pg import CategoricalCritic, PixelEncoder, random_shift
from murmurate.nets.mlp import layer_widths
from murmurate.nets.target import TargetNetwork
from murmurate.nets.torso import AUTO, checked_torso, usual_torso
from murmurate.ranges import (
    AnyFloat,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    PositiveOrInfinite,
    PositiveShare,
    Range,
    ReturnSteps,
    UnitInterval,
    Widths,
)
from murmurate.replay.interface import Sample
from murmurate.replica.vector import Replica
from murmurate.replicator.learner import Context, LearnerConfig
from murmurate.spec import Batch, EnvSpec, Outcome, Transitions, derive_generator


@dataclass(frozen=True)
class D4PG(LearnerConfig):
    """Hyper-parameters; the defaults are the paper's for the Control Suite, but for ``hidden``.

    Actions are learned scaled to [-1, 1] by their bounds, so noise has no unit.

    batch: transitions of an update; updates per env step are ``replay.samples_per_insert`` / batch.
    n_step: steps of the returns. discount: discount factor per env step.
    policy_rate, critic_rate: learning rates of Adam. clip: largest norm of each gradient (inf: no limit).
    hidden: widths of the policy's and the critic's layers; one number: two layers of that width.
    atoms: number of returns that the critic gives probabilities to, at equal distances from v_min to v_max; a
        return outside counts as the nearer of these two. v_min, v_max: least and greatest of these returns.
    target_every: a learner's updates between moves of the target nets towards the nets; under strategies with
        common rounds those that are due in a round are made together at its end. polyak: share of the way of
        a move; 1 copies.
    exploration_noise: standard deviation of the noise that exploration adds to actions.
    torso: torso of images: nature2013, nature2015, jin2018, impala2018, or your own: FILE.py:NAME,
        module:NAME (docs/worlds.md); auto is nature2013. It is trained by the critic's loss alone.
    shift: largest random shift of images for an update, in pixels (Kostrikov et al. 2020: 4); 0: no shift.
    normalize_observations: normalize observations by the running mean and deviation of the drawn batches,
        limited to +-10 (vectors only).
    precision: precision of the torso, and of the products between hidden layers; ``auto`` is bfloat16 for
        images where the device is faster in it.
    """

    name: ClassVar[str] = "d4pg"
    summary: ClassVar[str] = (
        "deterministic policy, critic of return distributions; vector actions, also images"
    )

    batch: PositiveInt = 256
    n_step: ReturnSteps = 5
    discount: UnitInterval = 0.99
    policy_rate: NonNegativeFloat = 1e-4
    critic_rate: NonNegativeFloat = 1e-4
    clip: PositiveOrInfinite = math.inf
    hidden: Widths = 256
    atoms: Annotated[int, Range(2, 10_000)] = 51
    v_min: AnyFloat = -150.0
    v_max: AnyFloat = 150.0
    target_every: PositiveInt = 100
    polyak: PositiveShare = 1.0
    exploration_noise: NonNegativeFloat = 0.3
    torso: str = AUTO
    shift: NonNegativeInt = 0
    normalize_observations: bool = False
    precision: Literal["float32", "bfloat16", "auto"] = "float32"

    def __post_init__(self) -> None:
        object.__setattr__(self, "torso", checked_torso(self.torso))

    @property
    def requires(self) -> Transitions:
        return Transitions(self.batch, self.n_step, self.discount)

    def resolved(self, spec: EnvSpec, device: torch.device) -> D4PG:
        """This config without an ``auto`` in it."""
        return resolve_auto(self, spec, device)

    def build(self, context: Context) -> D4PGAgent:
        """The agent.

        Raises ValueError for discrete actions, options that do nothing in this world, a shift by a whole
        image, and a ``v_min`` that is not below ``v_max``.
        """
        return D4PGAgent(self, context)


class D4PGAgent(ActsByPolicy):
    """One actor-learner (see ``Agent``) with two replicated vectors (``Replica``): ``policy``, and
    ``critic``, which includes the encoder of images."""

    def __init__(self, config: D4PG, context: Context) -> None:
        spec, device = context.spec, context.device
        check_vector_actions(spec, config.name, images=True)
        _check_options(config, spec)
        self._seed, self._rank = context.seed, context.rank
        z = support(config.v_min, config.v_max, config.atoms)
        self.config = config = config.resolved(spec, device)
        generator, hidden = derive_generator(context.seed, "network"), layer_widths(config.hidden)
        encoder = PixelEncoder(spec, config.torso, hidden, generator) if spec.images else None
        features = math.prod(spec.observation_shape) if encoder is None else encoder.out_features
        self.policy = ControlPolicy(
            spec if encoder is None else _spec_of_features(spec, features),
            hidden,
            deterministic=True,
            normalize=config.normalize_observations,
            generator=generator,
        ).to(device)
        critic = CategoricalCritic(features, spec, hidden, z, encoder, generator=generator)
        self.critic = critic.to(device)
        if encoder is not None:
            self.acting = ("policy", "critic")
        clip = None if math.isinf(config.clip) else config.clip
        use_bfloat16 = config.precision == "bfloat16"
        self._policy = replicate(context, "policy", self.policy, config.policy_rate, clip, use_bfloat16)
        self._critic = replicate(context, "critic", self.critic, config.critic_rate, clip, use_bfloat16)
        self._target_policy = TargetNetwork(self.policy, every=config.target_every, polyak=config.polyak)
        self._target_critic = TargetNetwork(self.critic, every=config.target_every, polyak=config.polyak)
        self._targets: Sequence[TargetNetwork[Any]] = (self._target_policy, self._target_critic)
        self._update_statistics = statistics_updater(self.policy.normalizer, context)

    @property
    def replicas(self) -> dict[str, Replica]:
        return {"policy": self._policy, "critic": self._critic}

    @torch.no_grad()
    def act(
        self,
        observation: Tensor,
        memory: Tensor | None,
        first: Tensor,
        generator: torch.Generator,
        greedy: bool = False,
    ) -> Action:
        """The policy's action, with Gaussian noise unless ``greedy``, between the bounds."""
        encoder, bounds = self.critic.encoder, self.policy.bounds
        action = self.policy(observation if encoder is None else encoder(observation))
        sigma = self.config.exploration_noise
        if greedy or sigma == 0:
            return Action(action, None)
        noise = torch.randn(action.flatten(1).shape, generator=generator, device=action.device)
        scaled = bounds.to_scaled(action).add(noise, alpha=sigma).clamp_(-1, 1)
        return Action(bounds.to_world(scaled), None)

    # -- learning -----------------------------------------------------------------------------------

    def learn(self, batch: Batch) -> Outcome:
        """One update of the critic, then one of the policy. The policy's update uses the updated head of the
        critic, and the features of images computed before the critic's update."""
        data: Sample = batch.data
        observation, next_observation = self._shifted(data)
        self._update_statistics(observation)
        target = self._target(data, next_observation)
        features = self._features(self.policy, self.critic, observation)
        logits = self.critic(features, self.policy.bounds.to_scaled(data.action))
        cross_entropy = categorical_cross_entropy(logits, target, data.weights)
        exchange = self._critic.descend(cross_entropy.loss)
        value = self._update_policy(features.detach())
        for net in self._targets:
            net.after_update(exchange.staleness, self._critic.common_rounds)
        z, logits = self.critic.support, logits.detach()
        return Outcome(
            {
                "loss": cross_entropy.loss.detach(),
                "q_mean": lambda: expectation(logits.softmax(1), z).mean(),
                "policy_value": value,
                "target_at_ends": lambda: target[:, [0, -1]].sum(1).mean(),
            },
            priorities=cross_entropy.each,
        )

    def _shifted(self, data: Sample) -> tuple[Tensor, Tensor]:
        """The observation and the next one, each image shifted at random."""
        observation, next_observation, shift = data.observation, data.next_observation, self.config.shift
        if not shift:
            return observation, next_observation
        generator = derive_generator(self._seed, f"shifts of {self._rank}", self._critic.clock)
        return random_shift(observation, shift, generator), random_shift(next_observation, shift, generator)

    @torch.no_grad()
    def _target(self, data: Sample, next_observation: Tensor) -> Tensor:
        """y [B, K] of the target nets (Barth-Maron et al. 2018, Algorithm 1, line 6)."""
        policy, critic = self._target_policy.net, self._target_critic.net
        features = self._features(policy, critic, next_observation)
        p = critic(features, _scaled_action(policy, features)).softmax(1)
        return projected_target(data.reward, data.discount, p, critic.support)

    def _update_policy(self, features: Tensor) -> Tensor:
        """One step up the gradient of mean E[Z(s, pi(s))] (Algorithm 1, line 7). It changes neither the
        encoder nor the critic's gradient."""
        p = self.critic(features, _scaled_action(self.policy, features)).softmax(1)
        value = expectation(p, self.critic.support).mean()
        self._policy.descend(-value)
        return value.detach()

    @staticmethod
    def _features(policy: ControlPolicy, critic: CategoricalCritic, observation: Tensor) -> Tensor:
        """The nets' inputs [B, F] float32: an encoder's features of images, or (normalized) vectors."""
        if critic.encoder is None:
            return policy.observation_features(observation)
        features: Tensor = critic.encoder(observation)
        return features

    # -- state --------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        return {"targets": [target.state() for target in self._targets]}

    def load(self, state: dict[str, Any]) -> None:
        saved: Sequence[dict[str, Any]] = state["targets"]
        for target, target_state in zip(self._targets, saved, strict=True):
            target.load(target_state)


def _scaled_action(policy: ControlPolicy, features: Tensor) -> Tensor:
    """The policy's scaled action [B, D]."""
    return torch.tanh(policy.net(features)[0])


def _spec_of_features(spec: EnvSpec, features: int) -> EnvSpec:
    """``spec`` with an encoder's features in place of its observations."""
    return dataclasses.replace(
        spec, observation_shape=(features,), observation_dtype=torch.float32, stacked=False, channels=1
    )


def _check_options(config: D4PG, spec: EnvSpec) -> None:
    """Raise ValueError for options that do nothing for observations of this kind, and for a shift by a whole
    image."""
    if spec.images and config.normalize_observations:
        raise ValueError("normalize_observations is for vectors, and the encoder reads images: leave it out")
    if spec.images and config.shift >= (least := min(spec.observation_shape[-2:])):
        raise ValueError(f"shift is {config.shift}, and images of {least} pixels allow at most {least - 1}")
    if not spec.images and (config.shift or config.torso not in (AUTO, usual_torso(spec))):
        option = f"shift is {config.shift}" if config.shift else f"torso is {config.torso}"
        raise ValueError(f"{option}, and {spec.name} has no images: leave it out")
