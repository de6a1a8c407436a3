"""Maximum-entropy model rollouts (Zhang 2022, chapter 3, Algorithm 2): one-step rollouts, from states at
which the policy has moved away from the actions that were imagined there before.

The lines of the algorithm: the source fits the model (4-6), plays (7), gives the new transition its priority
(8), draws states by priority, with their weights (10, 11), stores what was imagined as a segment (14), and
draws batches from one segment (18). The rest is here: imagined actions and steps (12), the rollout policy
pi_psi (15), priorities (16), and the update of soft actor-critic, with weights in the critics' loss (19, 20).
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from murmurate import plugins
from murmurate.agents._dynamics import ModelConfig
from murmurate.agents._model_based import ModelBasedAgent, PlannedFits, PolicySettings
from murmurate.agents.interface import Imagined
from murmurate.losses.gaussian_nll import entropy_priority, gaussian_nll
from murmurate.nets.batched_mlp import BatchedMLP
from murmurate.nets.control import ActionBounds, limited_log_std
from murmurate.nets.mlp import layer_widths
from murmurate.nets.precision import resolve_precision
from murmurate.ranges import NonNegativeFloat, RepeatCount
from murmurate.replica.adam import Adam
from murmurate.replica.vector import Replica
from murmurate.replicator.learner import Context, LearnerConfig
from murmurate.spec import Batch, EnvSpec, Model, Outcome, derive_generator
from murmurate.worlds.terminations import AUTO

_LEAST_PRIORITY, _GREATEST_PRIORITY = 1e-4, 50.0  # as in the author's code


@dataclass(frozen=True)
class MEMR(PlannedFits, LearnerConfig):
    """Hyper-parameters; the source has alpha, beta, and those for when the model is fitted and rolled out.

    policy: policy of soft actor-critic. model: the ensemble and its training.
    rollout_rate: learning rate (Adam) of the rollout policy pi_psi, the Gaussian distribution of imagined
        actions. rollout_epochs: D, passes over the new actions after each round of rollouts, in mini-batches
        of ``policy.batch``.
    termination: where the model's episodes end; ``auto`` for worlds whose rule is known, else a function of
        your own, FILE.py:FUNCTION (docs/algorithms/mbpo.md).
    """

    name: ClassVar[str] = "memr"
    summary: ClassVar[str] = "MBPO with one-step rollouts from states drawn by entropy; vector actions"

    policy: PolicySettings = field(default_factory=PolicySettings)
    model: ModelConfig = field(default_factory=ModelConfig)
    rollout_rate: NonNegativeFloat = 3e-4
    rollout_epochs: RepeatCount = 1
    termination: str = AUTO

    def __post_init__(self) -> None:
        object.__setattr__(self, "termination", plugins.absolute(self.termination))

    @property
    def requires(self) -> Model:
        return Model(self.policy.batch, self.policy.discount, priorities=True)

    def resolved(self, spec: EnvSpec, device: torch.device) -> MEMR:
        """This config without an ``auto`` in a precision."""
        policy, model = resolve_precision(self.policy, device), resolve_precision(self.model, device)
        return dataclasses.replace(self, policy=policy, model=model)

    def build(self, context: Context) -> MEMRAgent:
        """The agent. Raises ValueError for images, stacked observations, and actions that are discrete or
        without bounds; Refusal if it is not known where the world's episodes end (``WorldModel``)."""
        return MEMRAgent(self.resolved(context.spec, context.device), context)


class MEMRAgent(ModelBasedAgent):
    """One actor-learner with a model and a rollout policy (see ``PrioritizingAgent``)."""

    def __init__(self, config: MEMR, context: Context) -> None:
        super().__init__(config, context)
        self.rollouts = RolloutPolicy(config, context)

    def imagine(self, observation: Tensor, learn: bool = True) -> Imagined:
        """Lines 12, 15 (if ``learn``) and 16 for the states s_j [M, ...]."""
        imagined = super().imagine(observation)
        if learn:
            self.rollouts.fit(observation, imagined.action, self.generator)
        return imagined._replace(priority=self.priority(observation, imagined.action))

    def priority(self, observation: Tensor, action: Tensor) -> Tensor:
        """The priorities [B] by eq. 3.7, limited to [1e-4, 50]."""
        return self.rollouts.priority(observation, action).clamp(_LEAST_PRIORITY, _GREATEST_PRIORITY)

    @property
    def replicas(self) -> dict[str, Replica]:
        return {**super().replicas, "rollout_policy": self.rollouts.replica}

    def learn(self, batch: Batch) -> Outcome:
        outcome = super().learn(batch)
        return Outcome({**outcome.metrics, "rollout_policy_loss": self.rollouts.loss})

    def state(self) -> dict[str, Any]:
        return {**super().state(), "rollout_loss": self.rollouts.loss}

    def load(self, state: dict[str, Any]) -> None:
        super().load(state)
        self.rollouts.loss = float(state["rollout_loss"])


class RolloutPolicy:
    """pi_psi: a diagonal Gaussian distribution of imagined actions, scaled to [-1, 1], given the state.

    loss: loss of the last mini-batch, twice the negative log-likelihood per dimension, without its constant.
    """

    def __init__(self, config: MEMR, context: Context) -> None:
        spec, hidden = context.spec, layer_widths(config.policy.hidden)
        self._epochs, self._batch, self.loss = config.rollout_epochs, config.policy.batch, math.nan
        self._bounds = ActionBounds(spec).to(context.device)
        widths = (math.prod(spec.observation_shape), *hidden, 2 * math.prod(spec.action_shape))
        generator = derive_generator(context.seed, "rollout policy")
        self._net: nn.Module = BatchedMLP(1, widths, generator=generator).to(context.device)
        self.replica: Replica = context.replicate(
            "rollout_policy", self._net, lambda parameters: Adam(parameters, lr=config.rollout_rate)
        )

    def fit(self, observation: Tensor, action: Tensor, generator: torch.Generator) -> None:
        """Maximum likelihood on ``observation`` [M, ...] and ``action`` [M, D], in mini-batches."""
        size = len(observation)
        batch = min(self._batch, size)
        steps, step, staleness = self._epochs * -(-size // batch), 0, 0
        while step < steps or (staleness and self.replica.common_rounds):  # ends with a common round
            start = step * batch % size
            if start < batch:  # a new pass
                order = torch.randperm(size, generator=generator, device=generator.device)
            rows = order[torch.arange(start, start + batch, device=order.device) % size]
            mean, log_std = self._distribution(observation[rows])
            loss = gaussian_nll(mean, 2 * log_std, self._bounds.to_scaled(action[rows]))
            staleness = self.replica.descend(loss).staleness
            step += 1
        self.loss = float(loss.detach())

    @torch.no_grad()
    def priority(self, observation: Tensor, action: Tensor) -> Tensor:
        """The priorities [B] by eq. 3.7."""
        return entropy_priority(self._bounds.to_scaled(action), *self._distribution(observation))

    def _distribution(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        """mu_psi, log sigma_psi: [B, D] each."""
        mean, log_std = self._net(observation.flatten(1))[0].chunk(2, 1)
        return mean, limited_log_std(log_std)
