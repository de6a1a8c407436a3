"""Converts time steps of simulators to the steps that a replay stores; draws random actions."""

from __future__ import annotations

import torch
from torch import Tensor

from murmurate.agents.interface import Action
from murmurate.nets.action_mask import action_mask
from murmurate.replay.interface import Steps
from murmurate.spec import EnvSpec, TimeStep


def steps_of(observation: Tensor, action: Action, step: TimeStep) -> Steps:
    """The transitions from ``observation`` by ``action``. Where an episode ended, the next observation is the
    episode's final one (for images, only where the episode was truncated)."""
    next_observation = step.observation
    if step.final_observation is not None:
        next_observation = next_observation.clone()
        ended = step.truncated | step.terminated if observation.is_floating_point() else step.truncated
        next_observation[ended] = step.final_observation[ended]
    return Steps(
        observation,
        action.action,
        step.reward,
        next_observation,
        step.terminated,
        step.truncated,
        behaviour=action.behaviour,
    )


def random_actions(spec: EnvSpec, observation: Tensor, generator: torch.Generator) -> Tensor:
    """[B] or [B, *shape]: for observations [B, ...], actions drawn uniformly from those that are legal."""
    device, size, mask = generator.device, len(observation), action_mask(spec)
    if mask is not None:
        return mask.random(observation, generator)
    if spec.actions:
        return torch.randint(spec.actions, (size,), generator=generator, device=device)
    uniform = torch.rand(size, *spec.action_shape, generator=generator, device=device)
    low, high = (
        torch.as_tensor(bound, device=device).view(spec.action_shape)
        for bound in (spec.action_low, spec.action_high)
    )
    return low + uniform * (high - low)
