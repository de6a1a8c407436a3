"""Rollouts that an agent has played itself on observations of noise, with ends of both kinds."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from murmurate.spec import EnvSpec, Trajectory


def played(learner: Any, seed: int = 0, steps: int = 6, simulators: int = 4, ends: float = 0.2) -> Trajectory:
    """[T, B], with what the agent records beside its actions; the memory before it is not zero."""
    spec: EnvSpec = learner.spec
    g = torch.Generator().manual_seed(seed)
    terminated = torch.rand(steps, simulators, generator=g) < ends
    truncated = (torch.rand(steps, simulators, generator=g) < ends) & ~terminated
    first = torch.zeros(steps + 1, simulators, dtype=torch.bool)
    first[1:] = terminated | truncated
    observation = torch.randn(steps + 1, simulators, *spec.observation_shape, generator=g)
    memory: Tensor | None = learner.initial_memory(simulators)
    if memory is not None:
        memory = torch.randn(memory.shape, generator=g)
    before, acted = memory, []
    for t in range(steps):
        acted.append(learner.act(observation[t], memory, first[t], g))
        memory = acted[-1].memory
    count = int(truncated.sum())
    return Trajectory(
        observation=observation[:steps],
        action=torch.stack([a.action for a in acted]),
        reward=torch.randn(steps, simulators, generator=g),
        terminated=terminated,
        truncated=truncated,
        first=first[:steps],
        last_observation=observation[steps],
        truncated_observation=torch.randn(count, *spec.observation_shape, generator=g) if count else None,
        memory=before,
        behaviour={
            name: torch.stack([a.behaviour[name] for a in acted])
            for name in learner.config.requires.behaviour
        },
    )
