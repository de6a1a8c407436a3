"""Trust-region policy optimisation (Schulman et al. 2015) with generalized advantages (GAE, 2016)."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.func import functional_call

from murmurate.agents._auto import linear_schedule
from murmurate.agents._on_policy import (
    advantages,
    divergence,
    draw,
    explained_variance,
    log_prob_and_entropy,
    log_probability,
    policy_outputs,
)
from murmurate.agents._running import RunningStatistics
from murmurate.agents.interface import Action, ActsByPolicy
from murmurate.losses.surrogate import surrogate
from murmurate.losses.trust_region import LineSearch, Product, fisher_product, line_search, natural_step
from murmurate.losses.value import value_loss
from murmurate.nets.mlp import layer_widths
from murmurate.nets.moments import observation_normalizer
from murmurate.nets.single_head import policy_net, value_net
from murmurate.nets.torso import AUTO, checked_torso, in_evaluation_mode, usual_torso
from murmurate.ranges import (
    NonNegativeFloat,
    OpenUnitInterval,
    PositiveFloat,
    PositiveInt,
    RepeatCount,
    UnitInterval,
    Widths,
)
from murmurate.replica.adam import Adam
from murmurate.replica.clipping import check_loss
from murmurate.replica.vector import Replica
from murmurate.replicator.learner import Context, LearnerConfig
from murmurate.spec import Batch, EnvSpec, Outcome, Rollouts, Trajectory, derive_generator

_PASS_NUMBERS = 2**24  # numbers in the observations of one forward pass


@dataclass(frozen=True)
class TRPO(LearnerConfig):
    """Hyper-parameters; the defaults for the policy's step are those of Jin 2018, Table 2.5.

    steps: number of steps of a rollout; the batch is ``steps`` x ``simulators``. discount: discount factor
    per env step.
    gae_lambda: 1 gives full returns less the value (up to the end of the rollout); below 1 is GAE.
    max_kl: delta, the largest mean KL divergence of a step, in nats. damping: added to the diagonal of the
        Fisher matrix. cg_iterations: number of iterations of the conjugate gradient.
    curvature_every: the Fisher products use one in ``curvature_every`` steps of the rollout.
    backtracks: how many fractions of the step are tried. shrink: the factor from each fraction to the next.
    value_learning_rate: learning rate of Adam, for the value net. value_epochs: passes over each rollout.
    value_minibatches: parts of a rollout, with one update for each in a pass.
    learning_rate_end: over the run ``value_learning_rate`` falls linearly to this share (1: constant).
    normalize_observations: normalize observations by their running mean and deviation, limited to +-10
    (vectors only).
    scale_rewards: divide rewards by the running deviation of discounted returns, limited to +-10.
    torso: torso of both nets: mlp, nature2013, nature2015, jin2018, impala2018, or your own: FILE.py:NAME,
        module:NAME (docs/worlds.md); auto is nature2013 for images and mlp for vectors.
    hidden: widths of an MLP's layers; one number: two layers of that width.
    """

    name: ClassVar[str] = "trpo"
    summary: ClassVar[str] = "natural policy gradients with a bound on each step's KL divergence"

    steps: PositiveInt = 512
    discount: UnitInterval = 0.99
    gae_lambda: UnitInterval = 0.97
    max_kl: PositiveFloat = 0.01
    damping: NonNegativeFloat = 0.1
    cg_iterations: RepeatCount = 10
    curvature_every: PositiveInt = 1
    backtracks: RepeatCount = 10
    shrink: OpenUnitInterval = 0.8
    value_learning_rate: NonNegativeFloat = 1e-3
    value_epochs: RepeatCount = 10
    value_minibatches: PositiveInt = 16
    learning_rate_end: NonNegativeFloat = 1.0
    normalize_observations: bool = False
    scale_rewards: bool = False
    torso: str = AUTO
    hidden: Widths = 64

    def __post_init__(self) -> None:
        object.__setattr__(self, "torso", checked_torso(self.torso))

    @property
    def requires(self) -> Rollouts:
        # as few simulators as allow at least one step for each minibatch
        return Rollouts(self.steps, simulators=math.ceil(self.value_minibatches / self.steps))

    def updates(self, batches: int) -> int:
        """The updates of the value net; the policy has fewer, one per batch."""
        return batches * self.value_epochs * self.value_minibatches

    def resolved(self, spec: EnvSpec, device: torch.device) -> TRPO:
        """This config without an ``auto`` in it."""
        return dataclasses.replace(self, torso=usual_torso(spec) if self.torso == AUTO else self.torso)

    def build(self, context: Context) -> TRPOAgent:
        return TRPOAgent(self, context)


class TRPOAgent(ActsByPolicy):
    """One actor-learner (see ``Agent``). All replicas make the same policy steps, computed from the means of
    their surrogates, divergences and Fisher products."""

    def __init__(self, config: TRPO, context: Context) -> None:
        spec, device = context.spec, context.device
        self.config = config = config.resolved(spec, device)
        self.spec, self.device, self.seed = spec, device, context.seed
        self.group = context.group()
        generator = derive_generator(context.seed, "network")
        hidden = layer_widths(config.hidden)
        self.policy_net = policy_net(spec, generator=generator, torso=config.torso, hidden=hidden).to(device)
        self.value_net = value_net(spec, generator=generator, torso=config.torso, hidden=hidden).to(device)
        normalizer = observation_normalizer(spec, config.normalize_observations)
        if normalizer is not None:
            self.policy_net.normalizer = self.value_net.normalizer = normalizer.to(device)
        self.statistics = RunningStatistics(
            context, normalizer, discount=config.discount if config.scale_rewards else None
        )
        # this class computes the step; the optimizer only subtracts what it is given
        self.policy: Replica = context.replicate(
            "policy", self.policy_net, lambda parameters: torch.optim.SGD(parameters, lr=1.0)
        )
        self.critic: Replica = context.replicate(
            "value",
            self.value_net,
            lambda parameters: Adam(parameters, lr=config.value_learning_rate),
            schedule=linear_schedule(config.learning_rate_end, context.updates),
        )

    @property
    def replicas(self) -> dict[str, Replica]:
        return {self.policy.name: self.policy, self.critic.name: self.critic}

    @torch.no_grad()
    def act(
        self,
        observation: Tensor,
        memory: Tensor | None,
        first: Tensor,
        generator: torch.Generator,
        greedy: bool = False,
    ) -> Action:
        policy = self.policy_net(observation)
        action = draw(policy, self.spec, generator, greedy)
        return Action(action, None, outputs=policy_outputs(policy, self.spec))

    def learn(self, batch: Batch) -> Outcome:
        data = self.statistics.with_scaled_rewards(batch.data)
        value, advantage = self._values_and_advantages(data)
        objective = _Objective(self, data, self._normalized(advantage))
        search, gradient_norm = self._improve(objective)
        critic_loss = self._fit_values(data.observation, advantage + value)
        self.statistics.include(data.observation)
        return Outcome(
            {
                "loss": search.loss,
                "value_loss": critic_loss,
                "entropy": objective.entropy,
                "kl": search.kl,
                "step_fraction": search.fraction,
                "explained_variance": lambda: explained_variance(value, advantage),
                "gradient_norm": gradient_norm,
                "learning_rate": self.critic.optimizer.param_groups[0]["lr"],
            }
        )

    @torch.no_grad()
    def _values_and_advantages(self, data: Trajectory) -> tuple[Tensor, Tensor]:
        """V and A [T, B]."""
        observation, final, c = data.observation.flatten(0, 1), data.truncated_observation, self.config
        value = torch.cat([self.value_net(part) for part in torch.split(observation, self.rows_per_pass)])
        value = value.view(data.reward.shape)
        last_value = self.value_net(data.last_observation)[:, 0]
        with in_evaluation_mode(self.value_net):  # as in ``final_values`` of agents/_on_policy.py
            final_value = None if final is None else self.value_net(final)[:, 0]
        return value, advantages(
            data, value, last_value, final_value, discount=c.discount, lambda_=c.gae_lambda
        )

    def _normalized(self, advantage: Tensor) -> Tensor:
        """``advantage`` with mean 0 and deviation 1 over all replicas."""
        mean, square = self.group.mean((advantage.mean(), advantage.square().mean()))
        normalized: Tensor = (advantage - mean) / ((square - mean.square()).clamp(min=0.0).sqrt() + 1e-8)
        return normalized

    def _improve(self, objective: _Objective) -> tuple[LineSearch, Tensor]:
        """One step of the policy; returns what the line search found, and the gradient's norm."""
        c, theta, mean = self.config, objective.theta, self.group.mean
        loss, gradient = mean(objective.loss_and_gradient())
        check_loss(loss, self.policy.name, self.policy.clock)
        curvature = objective.fisher_product()
        step = natural_step(
            lambda v: mean(curvature(v)) + c.damping * v,
            gradient,
            max_kl=c.max_kl,
            iterations=c.cg_iterations,
        )

        def evaluate(fraction: float) -> tuple[float, float]:
            new_loss, kl = mean(objective.loss_and_kl(theta + fraction * step)).tolist()
            return new_loss, kl

        search = line_search(evaluate, loss.item(), max_kl=c.max_kl, backtracks=c.backtracks, shrink=c.shrink)
        self.policy.follow(-search.fraction * step)
        return search, torch.linalg.vector_norm(gradient)

    def _fit_values(self, observation: Tensor, target: Tensor) -> Tensor:
        """Fit the value net to one rollout; returns the mean loss of the updates."""
        c = self.config
        observation, target = observation.flatten(0, 1), target.flatten()
        generator = derive_generator(self.seed, "minibatches", self.critic.clock)
        total = torch.zeros((), device=self.device)  # a list of thousands of losses would fragment memory
        for _ in range(c.value_epochs):
            order = torch.randperm(len(target), generator=generator).to(self.device)
            for rows in order.tensor_split(c.value_minibatches):
                loss = value_loss(self.value_net(observation[rows]), target[rows, None])
                self.critic.descend(loss)
                total += loss.detach()
        return total / (c.value_epochs * c.value_minibatches)

    @property
    def rows_per_pass(self) -> int:
        """How many observations go through a net at once."""
        return max(1, _PASS_NUMBERS // math.prod(self.spec.observation_shape))

    def state(self) -> dict[str, Any]:
        """The statistics that scale rewards; the replicas save their own states."""
        return self.statistics.state()

    def load(self, state: dict[str, Any]) -> None:
        self.statistics.load(state)


class _Steps(NamedTuple):
    """Some steps of a rollout: those of one forward pass.

    weight: their share of the rollout. observation: [n, ...]. action: [n] or [n, D]. old: the policy's
    outputs [n, A] at theta. advantage, old_log_prob: [1, n].
    """

    weight: float
    observation: Tensor
    action: Tensor
    advantage: Tensor
    old: Tensor
    old_log_prob: Tensor


class _Objective:
    """The surrogate and the divergence on one rollout as functions of the policy's parameter vector, and
    their derivatives at its present value, theta. entropy: mean entropy of the policy at theta."""

    def __init__(self, agent: TRPOAgent, data: Trajectory, advantage: Tensor) -> None:
        self._agent = agent
        self.theta = agent.policy.values().detach().clone()
        self._rows, self.entropy = self._rows_and_entropy(data, advantage, 1)
        every = agent.config.curvature_every
        self._curvature_rows = self._rows if every == 1 else self._rows_and_entropy(data, advantage, every)[0]

    @torch.no_grad()
    def _rows_and_entropy(
        self, data: Trajectory, advantage: Tensor, every: int
    ) -> tuple[list[_Steps], Tensor]:
        """(one step in ``every``, divided into forward passes; the mean entropy of these steps)."""
        flat = (x[::every].flatten(0, 1) for x in (data.observation, data.action, advantage))
        passes = zip(*(torch.split(x, self._agent.rows_per_pass) for x in flat), strict=True)
        total = advantage[::every].numel()
        rows, entropies = [], []
        for observation, action, pass_advantage in passes:
            old = self._policy(self.theta, observation)
            log_prob, entropy = log_prob_and_entropy(old, action, self._agent.spec)
            weight = len(pass_advantage) / total
            rows.append(_Steps(weight, observation, action, pass_advantage[None], old, log_prob[None]))
            entropies.append(weight * entropy.mean())
        return rows, torch.stack(entropies).sum()

    def _policy(self, theta: Tensor, observation: Tensor) -> Tensor:
        """The policy's outputs [n, A] with the parameter vector ``theta``."""
        parameters = dict(self._agent.policy.named_views(theta))
        out: Tensor = functional_call(self._agent.policy_net, parameters, (observation,))
        return out

    def _loss(self, rows: _Steps, policy: Tensor) -> Tensor:
        log_prob = log_probability(policy, rows.action, self._agent.spec)
        return rows.weight * surrogate(log_prob[None], rows.old_log_prob, rows.advantage)

    def _kl(self, rows: _Steps, policy: Tensor) -> Tensor:
        return rows.weight * divergence(rows.old, policy, self._agent.spec).mean()

    @torch.no_grad()
    def loss_and_kl(self, theta: Tensor) -> Tensor:
        """[2]: the surrogate's loss and the mean divergence at ``theta``."""
        total = torch.zeros(2, dtype=torch.float64)
        for rows in self._rows:
            policy = self._policy(theta, rows.observation)
            total += torch.stack([self._loss(rows, policy), self._kl(rows, policy)]).cpu()
        return total

    def loss_and_gradient(self) -> tuple[Tensor, Tensor]:
        x = self.theta.clone().requires_grad_()
        total, gradient = torch.zeros((), dtype=torch.float64), torch.zeros_like(self.theta)
        for rows in self._rows:
            loss = self._loss(rows, self._policy(x, rows.observation))
            gradient += torch.autograd.grad(loss, x)[0]
            total += loss.detach().cpu()
        return total, gradient

    def fisher_product(self) -> Product:
        """v -> F v. For a rollout of several forward passes each product builds their graphs anew, to save
        memory."""

        def product_of(rows: _Steps) -> Product:
            return fisher_product(lambda x: self._kl(rows, self._policy(x, rows.observation)), self.theta)

        if len(self._curvature_rows) == 1:
            return product_of(self._curvature_rows[0])

        def product(v: Tensor) -> Tensor:
            total = torch.zeros_like(v)
            for rows in self._curvature_rows:
                total += product_of(rows)(v)
            return total

        return product
