"""IMPALA: an actor-critic that corrects for the age of the policy that acted (Espeholt et al. 2018).

Actors choose actions with a policy mu that is some updates old, and record log mu(a|x). The learner weights
TD errors and policy gradients by pi / mu, clipped (V-trace, ``losses/vtrace.py``).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from murmurate.agents._auto import replicated, resolve_auto
from murmurate.agents._on_policy import (
    ActsByNet,
    bootstrap_values,
    log_prob_and_entropy,
    log_probability,
    make_net,
)
from murmurate.agents._running import statistics_updater
from murmurate.losses.policy import policy_gradient
from murmurate.losses.value import value_loss
from murmurate.losses.vtrace import VTrace, vtrace
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
class IMPALA(LearnerConfig):
    """Hyper-parameters; the defaults are the paper's on Atari (its Appendix G).

    torso: mlp, nature2013, nature2015, jin2018, impala2018 (the paper's deep one) or a function of your own,
        FILE.py:NAME (docs/worlds.md); auto is nature2013 for images and mlp for vectors.
    recurrent: width of an LSTM after the torso; 0: none.
    steps: number of steps of a trajectory. discount: discount factor per env step.
    rho_bar, c_bar, policy_rho_bar: largest weights of a TD error, of later TD errors, and of an advantage.
    trace_lambda: weight of longer returns.
    value_coefficient: weight of the squared error: the paper's 0.5, times the factor 1/2 in its loss.
    entropy_coefficient: weight of the entropy bonus in the loss.
    learning_rate: initial learning rate of the optimizer.
    optimizer: RMSprop or Adam. rmsprop_alpha: smoothing of RMSprop's squared gradients.
    optimizer_epsilon: added to the root in RMSprop's (or Adam's) denominator. Losses are sums over the batch,
        as in the paper, so this and ``clip`` are on the scale of the paper's batches of 640 steps.
    clip: largest norm of the gradient.
    hidden: widths of an MLP's layers; one number: two layers of that width.
    precision: ``bfloat16`` computes the torso in bfloat16 on a copy of the float32 parameters; ``auto`` is
        bfloat16 for images where the device is faster in it, else float32.
    normalize_observations: normalize observations by their running mean and deviation, limited to +-10
        (vectors only).
    learning_rate_end: over the run the rate falls linearly to this share of its initial value (1: constant).
    network: a whole net of your own in place of torso and heads: FILE.py:NAME, module:NAME (docs/worlds.md).
    """

    name: ClassVar[str] = "impala"
    summary: ClassVar[str] = "actor-critic with V-trace: actors may be some updates behind"

    steps: PositiveInt = 20
    discount: UnitInterval = 0.99
    rho_bar: PositiveOrInfinite = 1.0
    c_bar: PositiveOrInfinite = 1.0
    policy_rho_bar: PositiveOrInfinite = 1.0
    trace_lambda: UnitInterval = 1.0
    learning_rate: NonNegativeFloat = 6e-4
    learning_rate_end: NonNegativeFloat = 0.0
    optimizer: Literal["rmsprop", "adam"] = "rmsprop"
    optimizer_epsilon: NonNegativeFloat = 0.1
    rmsprop_alpha: UnitInterval = 0.99
    entropy_coefficient: AnyFloat = 0.01
    value_coefficient: NonNegativeFloat = 0.25
    clip: PositiveOrInfinite = 40.0
    torso: str = AUTO
    hidden: Widths = 64
    recurrent: NonNegativeInt = 0
    precision: Literal["float32", "bfloat16", "auto"] = "float32"
    normalize_observations: bool = field(default=False, metadata={"since": 6})
    network: str = field(default="", metadata={"since": 6})

    def __post_init__(self) -> None:
        object.__setattr__(self, "torso", checked_torso(self.torso))
        object.__setattr__(self, "network", checked_network(self.network))

    @property
    def requires(self) -> Rollouts:
        return Rollouts(self.steps, {"log_probability": ()})

    def resolved(self, spec: EnvSpec, device: torch.device) -> IMPALA:
        """This config without an ``auto`` in it."""
        return resolve_auto(self, spec, device)

    def build(self, context: Context) -> IMPALAAgent:
        return IMPALAAgent(self, context)


class IMPALAAgent(ActsByNet):
    """A learner, and in an actor process the policy that acts (see ``Agent``)."""

    def __init__(self, config: IMPALA, context: Context) -> None:
        spec, device = context.spec, context.device
        self.config = config = config.resolved(spec, device)
        self.spec = spec
        self.net = make_net(config, context)
        self.replica: Replica = replicated(config, context, self.net, self._optimizer)
        self._update_statistics = statistics_updater(self.net.normalizer, context)

    def _optimizer(self, parameters: list[Any]) -> torch.optim.Optimizer:
        c = self.config
        if c.optimizer == "adam":
            return torch.optim.Adam(parameters, lr=c.learning_rate, eps=c.optimizer_epsilon)
        return torch.optim.RMSprop(
            parameters, lr=c.learning_rate, alpha=c.rmsprop_alpha, eps=c.optimizer_epsilon
        )

    def recorded(
        self, policy: Tensor, action: Tensor, value: Tensor | None, memory: Tensor | None
    ) -> dict[str, Tensor]:
        return {"log_probability": log_probability(policy, action, self.spec)}

    def learn(self, batch: Batch) -> Outcome:
        data: Trajectory = batch.data
        policy, value, memory = self.net.unroll(data.observation, data.memory, data.first)
        log_prob, entropy = log_prob_and_entropy(policy, data.action, self.spec)
        rho = (log_prob.detach() - data.behaviour["log_probability"]).exp()
        corrected = self._vtrace(data, rho, value.detach(), memory)
        policy_loss = policy_gradient(log_prob, corrected.advantage_t)
        critic_loss = value_loss(value, corrected.target_t)
        bonus = entropy.mean()
        c = self.config
        loss = policy_loss + c.value_coefficient * critic_loss - c.entropy_coefficient * bonus
        self.replica.descend(loss * data.reward.numel())  # the paper sums over steps and trajectories
        self._update_statistics(data.observation.flatten(0, 1))
        return Outcome(
            {
                "loss": loss.detach(),
                "policy_loss": policy_loss.detach(),
                "value_loss": critic_loss.detach(),
                "entropy": bonus.detach(),
                "rho_mean": lambda: rho.mean(),
                # a margin, so that ratios above 1 by rounding alone do not count
                "rho_clipped": lambda: (rho > (1 + 1e-3) * c.rho_bar).float().mean(),
                "gradient_norm": self.replica.gradient_norm,
                "learning_rate": self.replica.optimizer.param_groups[0]["lr"],
            }
        )

    def _vtrace(self, data: Trajectory, rho: Tensor, value: Tensor, memory: Tensor | None) -> VTrace:
        """Targets and advantages, bootstrapped with the present critic. memory: recurrent state after step
        T."""
        last_value, final_value = bootstrap_values(self.net, data, memory)
        truncated_value = torch.zeros_like(value)
        if final_value is not None:
            truncated_value[data.truncated] = final_value
        c = self.config
        return vtrace(
            rho,
            data.reward,
            value,
            data.terminated,
            data.truncated,
            last_value,
            truncated_value,
            discount=c.discount,
            lambda_=c.trace_lambda,
            rho_bar=c.rho_bar,
            c_bar=c.c_bar,
            policy_rho_bar=c.policy_rho_bar,
        )
