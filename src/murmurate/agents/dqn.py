"""Deep Q-learning (Mnih et al. 2015), with double Q, two streams, n-step returns and prioritized replay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from murmurate.agents._auto import replicated, resolve_auto
from murmurate.agents._running import statistics_updater
from murmurate.agents.interface import Action, OneReplica
from murmurate.losses.q_learning import q_step
from murmurate.nets.action_mask import LOWEST
from murmurate.nets.mlp import layer_widths
from murmurate.nets.own_network import action_value_net, checked_network, refuse_low_precision
from murmurate.nets.target import TargetNetwork
from murmurate.nets.torso import AUTO, checked_torso
from murmurate.ranges import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    PositiveOrInfinite,
    ReturnSteps,
    UnitInterval,
    Widths,
)
from murmurate.replay.interface import Sample
from murmurate.replica.adam import Adam
from murmurate.replica.vector import Replica
from murmurate.replicator.learner import Context, LearnerConfig
from murmurate.spec import Batch, EnvSpec, Outcome, Transitions, derive_generator


@dataclass(frozen=True)
class DQN(LearnerConfig):
    """Hyper-parameters; the defaults are those of DQN on Atari, except where a recipe sets them.

    batch: transitions of an update; updates per env step are ``replay.samples_per_insert`` / batch.
    n_step: steps of the returns. discount: discount factor per env step.
    learning_rate: learning rate of Adam. clip: largest norm of the gradient.
    target_every: a learner's updates between copies of the net to the target net. Under strategies with
        common rounds it is copied at the end of a round, so this is F x H (F > 1: Zhang 2022, section 5.2).
        With 0 it is copied before the first update after new env steps (in the middle of a common round, at
        its end): once a fit with ``replay.fit_every``.
    selector: which net chooses the action that the target net evaluates. ``online`` is double Q-learning,
        ``agreed`` uses the parameters of the last common round (SPO; under strategies without common rounds
        these are the net's own), ``target`` is Q-learning.
    behaviour: which net a learner without actor processes acts with: its ``own``, or ``agreed``, that of the
        last common round (SPO: Zhang 2022, Algorithm 6). Actor processes use the parameters that were
        published last, see ``replay.publish_every``.
    exploration: the probability of a random action. ``annealed`` falls from 1 to ``epsilon`` over
        ``explore_updates`` updates; ``ladder`` gives simulator i of B the probability epsilon ** (1 + 7 i /
        (B - 1)) (Horgan et al. 2018, section 4.1). epsilon: see ``exploration``. explore_updates: see
        ``exploration``.
    learning_rate_end: over the run the rate falls linearly to this share of its initial value (1: constant).
    adam_epsilon: added to the root of the mean squares. Rainbow's 1.5e-4 suits larger gradients: on Pong 95%
        of these roots are below 1.1e-5, and 1.5e-4 would make the mean step 28 times smaller.
    dueling: separate streams for the state's value and the actions' advantages (Wang et al. 2016).
    torso: mlp, nature2013, nature2015, jin2018, impala2018, or your own: FILE.py:NAME, module:NAME
        (docs/worlds.md); auto is nature2013 for images of at least 20 x 20 pixels, else mlp.
    hidden: widths of an MLP's layers; one number: two layers of that width.
    normalize_observations: normalize observations by the running mean and deviation of the drawn batches,
        limited to +-10 (vectors only).
    precision: precision of the torso; ``auto`` is bfloat16 for images where the device is faster in it.
    network: a whole net of your own in place of torso and heads: FILE.py:NAME, module:NAME (docs/worlds.md).
    """

    name: ClassVar[str] = "dqn"
    summary: ClassVar[str] = "Q-learning from replay: double, dueling, n-step, prioritized"

    batch: PositiveInt = 32
    n_step: ReturnSteps = 1
    discount: UnitInterval = 0.99
    learning_rate: NonNegativeFloat = 1e-4
    learning_rate_end: NonNegativeFloat = 1.0
    adam_epsilon: NonNegativeFloat = 1e-8
    clip: PositiveOrInfinite = 10.0
    target_every: NonNegativeInt = 2_000
    selector: Literal["online", "agreed", "target"] = "online"
    dueling: bool = False
    exploration: Literal["annealed", "ladder"] = "annealed"
    epsilon: UnitInterval = 0.01
    explore_updates: NonNegativeInt = 25_000
    torso: str = AUTO
    hidden: Widths = 128
    precision: Literal["float32", "bfloat16", "auto"] = "float32"
    normalize_observations: bool = field(default=False, metadata={"since": 6})
    network: str = field(default="", metadata={"since": 6})
    behaviour: Literal["own", "agreed"] = field(default="own", metadata={"since": 6})

    def __post_init__(self) -> None:
        object.__setattr__(self, "torso", checked_torso(self.torso))
        object.__setattr__(self, "network", checked_network(self.network))

    @property
    def requires(self) -> Transitions:
        return Transitions(self.batch, self.n_step, self.discount)

    def resolved(self, spec: EnvSpec, device: torch.device) -> DQN:
        """This config without an ``auto`` in it."""
        return resolve_auto(self, spec, device)

    def build(self, context: Context) -> DQNAgent:
        return DQNAgent(self, context)


class DQNAgent(OneReplica):
    """One actor-learner (see ``Agent``)."""

    def __init__(self, config: DQN, context: Context) -> None:
        spec, device = context.spec, context.device
        if not 0 <= config.epsilon <= 1:
            raise ValueError(f"epsilon is {config.epsilon}; a probability lies between 0 and 1")
        self.config = config = config.resolved(spec, device)
        self.spec, self.device = spec, device
        refuse_low_precision(config.network, config.precision)
        self.net = action_value_net(
            spec,
            network=config.network,
            generator=derive_generator(context.seed, "network"),
            torso=config.torso,
            hidden=layer_widths(config.hidden),
            dueling=config.dueling,
            normalize=config.normalize_observations,
        ).to(device)
        self.replica: Replica = replicated(
            config,
            context,
            self.net,
            lambda parameters: Adam(parameters, lr=config.learning_rate, eps=config.adam_epsilon),
        )
        self._update_statistics = statistics_updater(self.net.normalizer, context)
        self.target = TargetNetwork(self.net, every=config.target_every)
        agreed = "agreed" in (config.selector, config.behaviour)
        self.agreed = TargetNetwork(self.net) if agreed else None
        self._learns = False  # stays False in actor processes, whose net has the published parameters
        self._assigned: tuple[int, int] | None = None  # first simulator of the next ``act``, and their total
        self._lowest_simulator: int | None = None  # the lowest number assigned so far

    def assign_simulators(self, first: int, total: int) -> None:
        self._assigned = first, total
        lowest = self._lowest_simulator
        self._lowest_simulator = first if lowest is None else min(lowest, first)

    def epsilon(self, simulators: int) -> Tensor | float:
        """The present probability of a random action; [simulators] if each has its own."""
        c = self.config
        if c.exploration == "ladder":
            first, total = self._assigned or (0, simulators)
            return self._ladder(torch.arange(first, first + simulators, device=self.device), total)
        progress = min(self.clock / c.explore_updates, 1.0) if c.explore_updates else 1.0
        return 1.0 + (c.epsilon - 1.0) * progress

    def _ladder(self, simulator: Tensor, total: int) -> Tensor:
        return self.config.epsilon ** (1.0 + 7.0 * simulator / max(total - 1, 1))

    def _greatest_epsilon(self) -> Tensor:
        """The greatest epsilon of this learner's simulators, that of its first simulator."""
        lowest = self._lowest_simulator
        if self._assigned is None or lowest is None or self.config.exploration != "ladder":
            return torch.as_tensor(self.epsilon(2)).max()  # the same for any number of simulators
        return self._ladder(torch.tensor(lowest), self._assigned[1])

    @torch.no_grad()
    def act(
        self,
        observation: Tensor,
        memory: Tensor | None,
        first: Tensor,
        generator: torch.Generator,
        greedy: bool = False,
    ) -> Action:
        """Epsilon-greedy. The number of random draws does not depend on epsilon."""
        size, device = observation.shape[0], observation.device
        if not greedy:
            epsilon = self.epsilon(size)
            mask = self.net.mask
            if mask is None:
                random = torch.randint(self.spec.actions, (size,), generator=generator, device=device)
            else:
                random = mask.random(observation, generator)
            explores = torch.rand(size, generator=generator, device=device) < epsilon
            if isinstance(epsilon, float) and epsilon >= 1.0:
                return Action(random, None)  # a forward pass would change nothing
        values = self._acting_net(greedy)(observation)
        greedy_value, action = values.max(1)
        if not greedy:
            action = torch.where(explores, random, action)
        taken = values.gather(1, action[:, None])[:, 0]
        return Action(action, None, taken, greedy_value, outputs={"action_values": values})

    def _acting_net(self, greedy: bool) -> Callable[[Tensor], Tensor]:
        """The net that acts; in an evaluation always ``net``, which then has the consensus parameters."""
        if greedy or self.agreed is None or not self._learns or self.config.behaviour == "own":
            return self.net
        return self.agreed

    def learn(self, batch: Batch) -> Outcome:
        self._learns = True
        data: Sample = batch.data
        if self.config.target_every == 0 and batch.env_steps:  # a fit begins
            self.target.reset()
        with torch.no_grad():
            next_observation = self.net.preprocess(data.next_observation)
            q_t, q_t_selector = self.target(next_observation), self._selector_values(next_observation)
        value = self.net(data.observation)
        step = q_step(value, data.action, data.reward, data.discount, data.weights, q_t, q_t_selector)
        exchange = self.replica.descend(step.loss)
        self._update_statistics(data.observation)
        for target in (self.target, self.agreed):
            if target is not None:
                target.after_update(exchange.staleness, self.replica.common_rounds)
        value = value.detach()
        return Outcome(
            {
                "loss": step.loss.detach(),
                "q_mean": value.mean if self.net.mask is None else lambda: value[value > LOWEST].mean(),
                "td_error": lambda: step.error.abs().mean(),
                "epsilon": self._greatest_epsilon,
                "gradient_norm": self.replica.gradient_norm,
                "learning_rate": self.replica.optimizer.param_groups[0]["lr"],
            },
            priorities=step.error,
        )

    def _selector_values(self, observation: Tensor) -> Tensor | None:
        """Values [B, A] by the net that chooses the actions; None: the target net chooses them."""
        if self.config.selector == "target":
            return None
        agreed = self.agreed if self.config.selector == "agreed" else None
        values: Tensor = self.net(observation) if agreed is None else agreed(observation)
        return values

    def state(self) -> dict[str, Any]:
        target = self.target.state()
        agreed = {} if self.agreed is None else {"agreed": self.agreed.state()["net"]}
        return {"target": target.pop("net"), **agreed, **target}

    def load(self, state: dict[str, Any]) -> None:
        self._learns = True
        self.target.load({**state, "net": state["target"]})
        if self.agreed is not None:
            self.agreed.load({"net": state["agreed"], "since": 0})
