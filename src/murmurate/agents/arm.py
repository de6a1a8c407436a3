"""Advantage-based regret minimization (ARM): Jin 2018, chapter 2, Algorithm 1.

In each iteration t a batch of env steps is collected with a fixed policy; then a state value V and a
cumulative clipped action value Q+ are fitted to n-step returns. The next policy is in proportion to the
positive part of the cumulative clipped advantage A+ = Q+ - V, which plays the role of the regrets of CFR+.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from murmurate.agents._auto import replicated, resolve_auto
from murmurate.agents._running import statistics_updater
from murmurate.agents.interface import Action, OneReplica
from murmurate.losses.regret import (
    cumulative_target,
    importance_weights,
    regret_matching,
    sequence_returns,
)
from murmurate.nets.actor_critic import actor_critic
from murmurate.nets.mlp import layer_widths
from murmurate.nets.target import TargetNetwork
from murmurate.nets.torso import AUTO, checked_torso
from murmurate.ranges import (
    NonNegativeFloat,
    PositiveInt,
    PositiveOrInfinite,
    PositiveShare,
    ReturnSteps,
    UnitInterval,
    Widths,
)
from murmurate.replica.adam import Adam
from murmurate.replica.vector import Replica
from murmurate.replicator.learner import Context, LearnerConfig
from murmurate.spec import Batch, EnvSpec, Outcome, Sequences, SequenceSample, derive_generator


@dataclass(frozen=True)
class ARM(LearnerConfig):
    """Hyper-parameters; the defaults are those for Atari (Jin 2018, Table 2.1). How many env steps are
    collected in an iteration, and how many updates follow, are settings of the source.

    batch: sequences of an update. n_step: steps of the returns. discount: discount factor per env step (the
        thesis gives none).
    learning_rate: learning rate of Adam. adam_epsilon: added to the root in Adam's denominator.
    learning_rate_end: over the run the rate falls linearly to this share of its initial value (1: constant).
    clip: largest norm of the gradient. None: no limit, as in the thesis.
    target_rate: tau, the share of the way that the target value V' (``TargetNetwork``) moves to V with each
        update.
    importance_clip: c, the largest importance weight (section 2.6; Table 2.2 has 1), for a source that keeps
        several batches. None: on-policy, without weights.
    evaluate: ``policy`` draws actions from the learned policy, as in training; ``greedy`` takes the action
        with the greatest advantage. The best policy of a partially observed task may be stochastic.
    torso: mlp, nature2013, nature2015, jin2018, impala2018, or your own: FILE.py:NAME, module:NAME
        (docs/worlds.md); auto is nature2013 for images of at least 20 x 20 pixels, else mlp.
    hidden: widths of an MLP's layers; one number: two layers of that width.
    normalize_observations: normalize observations by the running mean and deviation of the drawn sequences,
        limited to +-10 (vectors only).
    precision: precision of the torso; ``auto`` is bfloat16 for images where the device is faster in it.
    """

    name: ClassVar[str] = "arm"
    summary: ClassVar[str] = "advantage-based regret minimization, for partial observability"

    batch: PositiveInt = 32
    n_step: ReturnSteps = 1
    discount: UnitInterval = 0.99
    learning_rate: NonNegativeFloat = 1e-4
    learning_rate_end: NonNegativeFloat = 1.0
    adam_epsilon: NonNegativeFloat = 1e-8
    clip: PositiveOrInfinite | None = None
    target_rate: PositiveShare = 0.01
    importance_clip: NonNegativeFloat | None = None
    evaluate: Literal["policy", "greedy"] = "policy"
    torso: str = AUTO
    hidden: Widths = 64
    precision: Literal["float32", "bfloat16", "auto"] = "float32"
    normalize_observations: bool = field(default=False, metadata={"since": 6})

    def __post_init__(self) -> None:
        object.__setattr__(self, "torso", checked_torso(self.torso))

    @property
    def requires(self) -> Sequences:
        if self.importance_clip is None:
            return Sequences(self.batch, self.n_step, behaviour={"advantage": ()})
        return Sequences(self.batch, self.n_step, every=True, behaviour={"probability": ()})

    def resolved(self, spec: EnvSpec, device: torch.device) -> ARM:
        """This config without an ``auto`` in it."""
        return resolve_auto(self, spec, device)

    def build(self, context: Context) -> ARMAgent:
        """The agent. Raises ValueError for a world whose action is a vector or has several parts."""
        return ARMAgent(self, context)


class ARMAgent(OneReplica):
    """One actor-learner (see ``Agent``).

    V (parameters theta) and Q+ (parameters omega) are two heads of one net: with Adam, the two updates of eq.
    2.15 and 2.16 with one learning rate are the same as one update of both. Differs: on images both heads
    read one torso, which the thesis does not mention.
    """

    def __init__(self, config: ARM, context: Context) -> None:
        spec, device = context.spec, context.device
        spec.refuse_factors("regret matching")
        if not spec.actions:
            raise ValueError(
                f"the actions of {spec.name} are vectors, and regret matching needs discrete ones: use a2c"
            )
        self.config = config = config.resolved(spec, device)
        self.net = actor_critic(
            spec,
            torso=config.torso,
            hidden=layer_widths(config.hidden),
            normalize=config.normalize_observations,
            generator=derive_generator(context.seed, "network"),
        ).to(device)
        # Q+ = V = 0: no advantage is positive, so pi_1 is uniform, and A+ is 0 in the first iteration
        for head in (self.net.policy_head, self.net.value_head):
            for parameter in head.parameters():
                torch.nn.init.zeros_(parameter)
        self.replica: Replica = replicated(
            config,
            context,
            self.net,
            lambda parameters: Adam(parameters, lr=config.learning_rate, eps=config.adam_epsilon),
        )
        self._update_statistics = statistics_updater(self.net.normalizer, context)
        self.target = TargetNetwork(self.net, polyak=config.target_rate)  # V'
        off_policy = config.importance_clip is not None
        # the net of the previous iteration, theta_{t-1} and omega_{t-1}, which defines pi_t
        self.previous = TargetNetwork(self.net, every=0) if off_policy else None
        self._followers = (self.target,) if self.previous is None else (self.target, self.previous)
        self.iterations = 0

    @torch.no_grad()
    def act(
        self,
        observation: Tensor,
        memory: Tensor | None,
        first: Tensor,
        generator: torch.Generator,
        greedy: bool = False,
    ) -> Action:
        advantage = _advantage(self.net, observation)
        if greedy and self.config.evaluate == "greedy":
            return Action(advantage.argmax(-1), None, outputs={"advantage": advantage})
        policy = self._policy(advantage, observation)
        action = torch.multinomial(policy, 1, generator=generator)
        if greedy:
            return Action(action[:, 0], None)
        recorded = {"advantage": advantage} if self.previous is None else {"probability": policy}
        behaviour = {name: values.gather(1, action)[:, 0] for name, values in recorded.items()}
        return Action(action[:, 0], None, behaviour=behaviour)

    def learn(self, batch: Batch) -> Outcome:
        data: SequenceSample = batch.data
        if batch.env_steps:  # the first minibatch of an iteration
            self._begin_iteration()
        advantage_tm1, weights = self._previous_advantage_and_weights(data)
        with torch.no_grad():
            last_value = self.target.net(data.last_observation)[1]
        returns = sequence_returns(
            data.reward, data.length, data.terminated, last_value, weights, discount=self.config.discount
        )
        first_weight = None if weights is None else weights[0]
        cumulative = cumulative_target(returns, advantage_tm1, data.reward[0], first_weight)
        q_plus, value = self.net(data.observation[0])
        q_plus_taken = q_plus.gather(1, data.action[0, :, None])[:, 0]
        value_error, cumulative_error = returns - value, cumulative - q_plus_taken
        loss = 0.5 * (value_error.square() + cumulative_error.square()).mean()
        exchange = self.replica.descend(loss)
        self._update_statistics(data.observation[0])
        for net in self._followers:
            net.after_update(exchange.staleness, self.replica.common_rounds)
        advantage = (q_plus - value[:, None]).detach()
        return Outcome(
            {
                "loss": loss.detach(),
                "value_loss": lambda: value_error.detach().square().mean(),
                "cumulative_loss": lambda: cumulative_error.detach().square().mean(),
                "value_mean": lambda: value.detach().mean(),
                "positive_actions": lambda: (advantage > 0).float().sum(1).mean(),
                "entropy": lambda: _entropy(self._policy(advantage, data.observation[0])),
                "importance_weight": lambda: 1.0 if weights is None else weights[0].mean(),
                "iterations": float(self.iterations),
                "gradient_norm": self.replica.gradient_norm,
                "learning_rate": self.replica.optimizer.param_groups[0]["lr"],
            }
        )

    def _policy(self, advantage: Tensor, observation: Tensor) -> Tensor:
        """Probabilities [..., A] for advantages [..., A] and observations [..., D]."""
        mask = self.net.mask
        return regret_matching(advantage, None if mask is None else mask.legal(observation))

    def _begin_iteration(self) -> None:
        self.iterations += 1
        for net in self._followers:
            net.reset()

    @torch.no_grad()
    def _previous_advantage_and_weights(self, data: SequenceSample) -> tuple[Tensor, Tensor | None]:
        """(the previous iteration's A+ of the first actions [B], the importance weights [n, B]).

        On-policy, this A+ was recorded when the previous net acted, and no weights are needed.
        """
        if self.previous is None or self.config.importance_clip is None:
            return data.behaviour["advantage"][0], None
        steps, size = data.action.shape
        advantage = _advantage(self.previous.net, data.observation.flatten(0, 1)).view(steps, size, -1)
        action = data.action[..., None]
        policy = self._policy(advantage, data.observation).gather(2, action)[..., 0]
        # after the end of a sequence the recorded probability is 0, and the weight does not matter
        behaviour = data.behaviour["probability"].clamp(min=torch.finfo(torch.float32).tiny)
        weights = importance_weights(policy, behaviour, clip=self.config.importance_clip)
        return advantage[0].gather(1, action[0])[:, 0], weights

    def state(self) -> dict[str, Any]:
        previous = {} if self.previous is None else {"previous": self.previous.state()}
        return {"target": self.target.state(), **previous, "iterations": self.iterations}

    def load(self, state: dict[str, Any]) -> None:
        self.target.load(state["target"])
        if self.previous is not None:
            self.previous.load(state["previous"])
        self.iterations = int(state["iterations"])


def _advantage(net: Any, observation: Tensor) -> Tensor:
    """A+ = Q+ - V [B, A]."""
    q_plus, value = net(observation)
    advantage: Tensor = q_plus - value[:, None]
    return advantage


def _entropy(policy: Tensor) -> Tensor:
    """Mean entropy of policies [B, A], in nats."""
    return -torch.xlogy(policy, policy).sum(-1).mean()
