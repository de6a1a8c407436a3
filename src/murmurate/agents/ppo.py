"""Proximal policy optimisation (Schulman et al. 2017): epochs of clipped updates from each rollout."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from murmurate.agents._auto import replicated, resolve_auto
from murmurate.agents._on_policy import (
    ActsByNet,
    advantages,
    explained_variance,
    log_prob_and_entropy,
    log_probability,
    make_net,
    one_step,
)
from murmurate.agents._running import RunningStatistics
from murmurate.losses.surrogate import clipped_surrogate, clipped_value_loss
from murmurate.losses.value import value_loss
from murmurate.nets.own_network import checked_network
from murmurate.nets.torso import AUTO, checked_torso, in_evaluation_mode
from murmurate.ranges import (
    AnyFloat,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    PositiveOrInfinite,
    Range,
    RepeatCount,
    UnitInterval,
    Widths,
)
from murmurate.replica.adam import Adam
from murmurate.replica.vector import Replica
from murmurate.replicator.learner import Context, LearnerConfig
from murmurate.spec import Batch, EnvSpec, Outcome, Rollouts, Trajectory, derive_generator


@dataclass(frozen=True)
class PPO(LearnerConfig):
    """Hyper-parameters; the defaults are those of CleanRL's ``ppo_atari``.

    steps: number of steps of a rollout. epochs: passes over each rollout. minibatches: parts of a rollout,
        with one update for each in a pass; a recurrent policy's parts are whole simulators, of which there
        must be at least as many.
    discount: discount factor per env step. gae_lambda: weight of longer returns in the advantages.
    ratio_clip: epsilon of eq. 7. value_clip: epsilon for the change of a value; inf: no limit.
    value_coefficient: weight of the mean squared error; CleanRL's ``vf_coef`` is twice this.
    normalize_advantages: normalize advantages to mean 0 and deviation 1, in each minibatch.
    entropy_coefficient: weight of the entropy bonus in the loss.
    clip: largest norm of the gradient. learning_rate: learning rate of Adam. adam_epsilon: added to the root
        in Adam's denominator.
    learning_rate_end: over the run the rate falls linearly to this share of its initial value (1: constant).
    torso: mlp, nature2013, nature2015, jin2018, impala2018, or your own: FILE.py:NAME, module:NAME
        (docs/worlds.md); auto is nature2013 for images of at least 20 x 20 pixels, else mlp.
    hidden: widths of an MLP's layers; one number: two layers of that width.
    recurrent: width of an LSTM after the torso; 0: none.
    normalize_observations: normalize observations by their running mean and deviation, limited to +-10
    (vectors only).
    scale_rewards: divide rewards by the running deviation of discounted returns, limited to +-10.
    precision: precision of the torso; ``auto`` is bfloat16 for images where the device is faster in it.
    network: a whole net of your own in place of torso and heads: FILE.py:NAME, module:NAME (docs/worlds.md).
    """

    name: ClassVar[str] = "ppo"
    summary: ClassVar[str] = "clipped policy gradients, several epochs from each rollout"

    steps: PositiveInt = 128
    epochs: RepeatCount = 4
    minibatches: PositiveInt = 4
    discount: UnitInterval = 0.99
    gae_lambda: UnitInterval = 0.95
    ratio_clip: NonNegativeFloat = 0.1
    value_clip: Annotated[float, Range(0, math.inf)] = 0.1
    value_coefficient: NonNegativeFloat = 0.25
    entropy_coefficient: AnyFloat = 0.01
    normalize_advantages: bool = True
    clip: PositiveOrInfinite = 0.5
    learning_rate: NonNegativeFloat = 2.5e-4
    learning_rate_end: NonNegativeFloat = 0.0
    adam_epsilon: NonNegativeFloat = 1e-5
    torso: str = AUTO
    hidden: Widths = 64
    recurrent: NonNegativeInt = 0
    normalize_observations: bool = False
    scale_rewards: bool = False
    precision: Literal["float32", "bfloat16", "auto"] = "float32"
    network: str = field(default="", metadata={"since": 6})

    def __post_init__(self) -> None:
        object.__setattr__(self, "torso", checked_torso(self.torso))
        object.__setattr__(self, "network", checked_network(self.network))

    @property
    def requires(self) -> Rollouts:
        behaviour: dict[str, tuple[int, ...]] = {"log_probability": (), "value": ()}
        if self.recurrent:
            behaviour["memory"] = (2 * self.recurrent,)
        # as few as allow at least one step, or one simulator, for each minibatch
        simulators = self.minibatches if self.recurrent else math.ceil(self.minibatches / self.steps)
        return Rollouts(self.steps, behaviour, simulators=simulators)

    def updates(self, batches: int) -> int:
        return batches * self.epochs * self.minibatches

    def resolved(self, spec: EnvSpec, device: torch.device) -> PPO:
        """This config without an ``auto`` in it."""
        return resolve_auto(self, spec, device)

    def build(self, context: Context) -> PPOAgent:
        return PPOAgent(self, context)


class _Minibatch(NamedTuple):
    """Steps [T, B] of some simulators of a rollout, or [1, B] of any of its steps.

    old_log_prob, old_value: outputs of the policy and the critic that acted. memory: recurrent state before
    step 0.
    """

    memory: Tensor | None
    observation: Tensor
    action: Tensor
    first: Tensor
    old_log_prob: Tensor
    old_value: Tensor
    advantage: Tensor
    target: Tensor


class PPOAgent(ActsByNet):
    """One actor-learner (see ``Agent``)."""

    records_values = True

    def __init__(self, config: PPO, context: Context) -> None:
        spec, device = context.spec, context.device
        self.config = config = config.resolved(spec, device)
        self.spec, self.seed = spec, context.seed
        self.net = make_net(config, context)
        if config.network and self.net.initial_memory(1) is not None:
            raise ValueError(
                "ppo records the recurrent state of every step, and does not know its size in a net of your "
                "own: use a2c or impala, or a torso with recurrent"
            )
        self.replica: Replica = replicated(
            config,
            context,
            self.net,
            lambda parameters: Adam(parameters, lr=config.learning_rate, eps=config.adam_epsilon),
        )
        self.statistics = RunningStatistics(
            context,
            self.net.normalizer,
            discount=config.discount if config.scale_rewards else None,
        )

    def recorded(
        self, policy: Tensor, action: Tensor, value: Tensor | None, memory: Tensor | None
    ) -> dict[str, Tensor]:
        assert value is not None
        columns = {"log_probability": log_probability(policy, action, self.spec), "value": value}
        return columns if memory is None else {**columns, "memory": memory}

    def learn(self, batch: Batch) -> Outcome:
        data = self.statistics.with_scaled_rewards(batch.data)
        advantage = self._advantages(data)
        generator = derive_generator(self.seed, "minibatches", self.clock)
        totals: dict[str, Tensor] = {}  # sums: lists of thousands of metrics would fragment memory
        for _ in range(self.config.epochs):
            for minibatch in self._minibatches(data, advantage, generator):
                for name, value in self._update(minibatch).items():
                    if value is not None:
                        totals[name] = totals.get(name, 0.0) + value
        self.statistics.include(data.observation)
        return Outcome(
            {name: total / self.config.updates(1) for name, total in totals.items()}
            | {
                "explained_variance": lambda: explained_variance(data.behaviour["value"], advantage),
                "learning_rate": self.replica.optimizer.param_groups[0]["lr"],
            }
        )

    @torch.no_grad()
    def _advantages(self, data: Trajectory) -> Tensor:
        """Advantages [T, B] from the values recorded during the rollout; bootstrap values come from the
        critic, which has not been updated since."""
        value, memory, c = data.behaviour["value"], data.behaviour.get("memory"), self.config
        ended = data.terminated[-1] | data.truncated[-1]
        last_memory = None if memory is None else memory[-1]
        _, last_value, _ = one_step(self.net, data.last_observation, last_memory, ended)
        final_value = None
        if data.truncated_observation is not None:
            # each final observation is evaluated with the recurrent state of its episode
            final_memory = None if memory is None else memory[data.truncated]
            not_first = torch.zeros(len(data.truncated_observation), dtype=torch.bool, device=value.device)
            with in_evaluation_mode(self.net):  # as in ``final_values``
                _, final_value, _ = one_step(self.net, data.truncated_observation, final_memory, not_first)
        return advantages(data, value, last_value, final_value, discount=c.discount, lambda_=c.gae_lambda)

    def _minibatches(
        self, data: Trajectory, advantage: Tensor, generator: torch.Generator
    ) -> Iterator[_Minibatch]:
        """A pass over the rollout in random order of its steps, or of its simulators for a recurrent net."""
        value, memory = data.behaviour["value"], data.memory
        tensors = [
            data.observation,
            data.action,
            data.first,
            data.behaviour["log_probability"],
            value,
            advantage,
            advantage + value,
        ]
        if memory is None:
            tensors = [x.flatten(0, 1)[None] for x in tensors]
        order = torch.randperm(advantage.numel() if memory is None else len(memory), generator=generator)
        for indices in order.to(advantage.device).tensor_split(self.config.minibatches):
            first_memory = None if memory is None else memory[indices]
            yield _Minibatch(first_memory, *(x.index_select(1, indices) for x in tensors))

    def _update(self, m: _Minibatch) -> dict[str, Tensor | None]:
        """One update; returns its metrics."""
        c = self.config
        policy, value, _ = self.net.unroll(m.observation, m.memory, m.first)
        log_prob, entropy = log_prob_and_entropy(policy, m.action, self.spec)
        advantage = m.advantage
        if c.normalize_advantages and advantage.numel() > 1:
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        policy_loss = clipped_surrogate(log_prob, m.old_log_prob, advantage, clip=c.ratio_clip)
        if math.isinf(c.value_clip):
            critic_loss = value_loss(value, m.target)
        else:
            critic_loss = clipped_value_loss(value, m.old_value, m.target, clip=c.value_clip)
        bonus = entropy.mean()
        loss = policy_loss + c.value_coefficient * critic_loss - c.entropy_coefficient * bonus
        self.replica.descend(loss)
        with torch.no_grad():
            log_ratio = log_prob - m.old_log_prob
            return {
                "loss": loss.detach(),
                "policy_loss": policy_loss.detach(),
                "value_loss": critic_loss.detach(),
                "entropy": bonus.detach(),
                # an estimate of KL(old || new) that is never negative (Schulman 2020)
                "kl": (torch.expm1(log_ratio) - log_ratio).mean(),
                "clipped_share": ((log_ratio.exp() - 1.0).abs() > c.ratio_clip).float().mean(),
                "gradient_norm": self.replica.gradient_norm,
            }

    def state(self) -> dict[str, Any]:
        """The statistics that scale rewards; the replica saves its own state, and the order of minibatches
        follows from the replica's clock."""
        return self.statistics.state()

    def load(self, state: dict[str, Any]) -> None:
        self.statistics.load(state)
