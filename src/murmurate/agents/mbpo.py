"""Model-based policy optimisation (Janner et al. 2019): soft actor-critic on short rollouts of a model."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from murmurate import plugins
from murmurate.agents._dynamics import ModelConfig
from murmurate.agents._model_based import ModelBasedAgent, PlannedFits, PolicySettings
from murmurate.nets.precision import resolve_precision
from murmurate.replicator.learner import Context, LearnerConfig
from murmurate.spec import EnvSpec, Model
from murmurate.worlds.terminations import AUTO


@dataclass(frozen=True)
class MBPO(PlannedFits, LearnerConfig):
    """Hyper-parameters; the source has those for when the model is fitted and rolled out.

    policy: policy of soft actor-critic. model: the ensemble and its training.
    termination: where the model's episodes end; ``auto`` for worlds whose rule is known, else a function of
        your own, FILE.py:FUNCTION (docs/algorithms/mbpo.md).
    """

    name: ClassVar[str] = "mbpo"
    summary: ClassVar[str] = "soft actor-critic on short rollouts of a learned model; vector actions"

    policy: PolicySettings = field(default_factory=PolicySettings)
    model: ModelConfig = field(default_factory=ModelConfig)
    termination: str = AUTO

    def __post_init__(self) -> None:
        object.__setattr__(self, "termination", plugins.absolute(self.termination))

    @property
    def requires(self) -> Model:
        return Model(self.policy.batch, self.policy.discount)

    def resolved(self, spec: EnvSpec, device: torch.device) -> MBPO:
        """This config without an ``auto`` in a precision."""
        policy, model = resolve_precision(self.policy, device), resolve_precision(self.model, device)
        return dataclasses.replace(self, policy=policy, model=model)

    def build(self, context: Context) -> ModelBasedAgent:
        """The agent. Raises ValueError for images, stacked observations, and actions that are discrete or
        without bounds; Refusal if it is not known where the world's episodes end (``WorldModel``)."""
        return ModelBasedAgent(self.resolved(context.spec, context.device), context)
