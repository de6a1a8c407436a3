"""Advantage actor-critic, the synchronous variant of A3C (Mnih et al. 2016; Dhariwal et al. 2017).

The gradient is that of GALA, eq. 1-4: policy gradient on the n-step advantage, TD error on the value, entropy
bonus.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from murmurate.agents._auto import replicated, resolve_auto
from murmurate.agents._on_policy import (
    ActsByNet,
    advantages,
    bootstrap_values,
    log_prob_and_entropy,
    make_net,
)
from murmurate.agents._running import RunningStatistics
from murmurate.losses.policy import policy_gradient
from murmurate.losses.value import value_loss
from murmurate.nets.own_network import checked_network
from murmurate.nets.torso import AUTO, checked_torso
from murmurate.ranges import (
    AnyFloat,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    PositiveOrInfinite,
    UnitInterval,
    Widths,
)
from murmurate.replica.vector import Replica
from murmurate.replicator.learner import Context, LearnerConfig
from murmurate.spec import Batch, EnvSpec, Outcome, Rollouts, Trajectory


@dataclass(frozen=True)
class A2C(LearnerConfig):
    """Hyper-parameters; the defaults are those of A2C on Atari (Stooke and Abbeel 2018, Appendix).

    torso: mlp, nature2013, nature2015, jin2018, impala2018, or your own: FILE.py:NAME, module:NAME
        (docs/worlds.md); auto is nature2013 for images of at least 20 x 20 pixels, else mlp.
    recurrent: width of an LSTM after the torso; 0: none.
    steps: number of steps of a rollout. discount: discount factor per env step.
    gae_lambda: 1 is the n-step return (GALA Algorithm 1); below 1 is GAE.
    entropy_coefficient, value_coefficient: weights of the entropy bonus and of the squared error of the value
        in the loss.
    normalize_advantages: normalize advantages to mean 0 and deviation 1, in each batch.
    optimizer: RMSprop or Adam. rmsprop_alpha: smoothing of RMSprop's squared gradients.
    rmsprop_epsilon: added to the root in the denominator of RMSprop, or of Adam.
    clip: largest norm of the gradient.
    hidden: widths of an MLP's layers; one number: two layers of that width.
    precision: ``bfloat16`` computes the torso in bfloat16 on a copy of the float32 parameters; heads,
        losses and the optimizer stay float32. ``auto`` is bfloat16 for images where the device is faster
        in it, else float32; a run records what it stands for before the first update.
    learning_rate: initial learning rate of the optimizer.
    normalize_observations: normalize observations by their running mean and deviation, limited to +-10
    (vectors only).
    scale_rewards: divide rewards by the running deviation of discounted returns, limited to +-10.
    learning_rate_end: over the run the rate falls linearly to this share of its initial value (1: constant).
    network: a whole net of your own in place of torso and heads: FILE.py:NAME, module:NAME (docs/worlds.md).
    """

    name: ClassVar[str] = "a2c"
    summary: ClassVar[str] = "advantage actor-critic on n-step returns"

    steps: PositiveInt = 5
    discount: UnitInterval = 0.99
    gae_lambda: UnitInterval = 1.0
    learning_rate: NonNegativeFloat = 7e-4
    learning_rate_end: NonNegativeFloat = 1.0
    rmsprop_epsilon: NonNegativeFloat = 1e-5
    rmsprop_alpha: UnitInterval = 0.99
    entropy_coefficient: AnyFloat = 0.01
    value_coefficient: NonNegativeFloat = 0.5
    normalize_advantages: bool = False
    clip: PositiveOrInfinite = 0.5
    optimizer: Literal["rmsprop", "adam"] = "rmsprop"
    torso: str = AUTO
    hidden: Widths = 64
    recurrent: NonNegativeInt = 0
    precision: Literal["float32", "bfloat16", "auto"] = "float32"
    normalize_observations: bool = field(default=False, metadata={"since": 6})
    scale_rewards: bool = field(default=False, metadata={"since": 6})
    network: str = field(default="", metadata={"since": 6})

    def __post_init__(self) -> None:
        object.__setattr__(self, "torso", checked_torso(self.torso))
        object.__setattr__(self, "network", checked_network(self.network))

    @property
    def requires(self) -> Rollouts:
        return Rollouts(self.steps)

    def resolved(self, spec: EnvSpec, device: torch.device) -> A2C:
        """This config without an ``auto`` in it."""
        return resolve_auto(self, spec, device)

    def build(self, context: Context) -> A2CAgent:
        return A2CAgent(self, context)


class A2CAgent(ActsByNet):
    """One actor-learner (see ``Agent``)."""

    def __init__(self, config: A2C, context: Context) -> None:
        spec, device = context.spec, context.device
        self.config = config = config.resolved(spec, device)
        self.spec = spec
        self.net = make_net(config, context)
        self.replica: Replica = replicated(config, context, self.net, self._optimizer)
        self.statistics = RunningStatistics(
            context,
            self.net.normalizer,
            discount=config.discount if config.scale_rewards else None,
        )

    def _optimizer(self, parameters: list[Any]) -> torch.optim.Optimizer:
        c = self.config
        if c.optimizer == "adam":
            return torch.optim.Adam(parameters, lr=c.learning_rate, eps=c.rmsprop_epsilon)
        return torch.optim.RMSprop(
            parameters, lr=c.learning_rate, alpha=c.rmsprop_alpha, eps=c.rmsprop_epsilon
        )

    def learn(self, batch: Batch) -> Outcome:
        data: Trajectory = self.statistics.with_scaled_rewards(batch.data)
        policy, value, memory = self.net.unroll(data.observation, data.memory, data.first)
        advantage, target = self._targets(data, value.detach(), memory)
        log_prob, entropy = log_prob_and_entropy(policy, data.action, self.spec)
        c = self.config
        if c.normalize_advantages and advantage.numel() > 1:
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        policy_loss = policy_gradient(log_prob, advantage)
        critic_loss = value_loss(value, target)
        bonus = entropy.mean()
        loss = policy_loss + c.value_coefficient * critic_loss - c.entropy_coefficient * bonus
        self.replica.descend(loss)
        self.statistics.include(data.observation)
        return Outcome(
            {
                "loss": loss.detach(),
                "policy_loss": policy_loss.detach(),
                "value_loss": critic_loss.detach(),
                "entropy": bonus.detach(),
                "gradient_norm": self.replica.gradient_norm,
                "learning_rate": self.replica.optimizer.param_groups[0]["lr"],
            }
        )

    def _targets(self, data: Trajectory, value: Tensor, memory: Tensor | None) -> tuple[Tensor, Tensor]:
        """Advantages and value targets [T, B], bootstrapped with the present critic.

        memory: the recurrent state after step T.
        """
        last_value, final_value = bootstrap_values(self.net, data, memory)
        c = self.config
        advantage = advantages(
            data, value, last_value, final_value, discount=c.discount, lambda_=c.gae_lambda
        )
        return advantage, advantage + value

    def state(self) -> dict[str, Any]:
        """The statistics that scale rewards; the replica saves its own state."""
        return self.statistics.state()

    def load(self, state: dict[str, Any]) -> None:
        self.statistics.load(state)
