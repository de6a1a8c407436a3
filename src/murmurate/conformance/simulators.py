"""A check that simulators that were saved and loaded continue like uninterrupted simulators."""

from __future__ import annotations

import copy

import torch

from murmurate.spec import EnvSpec, TimeStep
from murmurate.worlds.interface import Simulators, SimulatorWorld


def drawn_actions(spec: EnvSpec, steps: int, size: int, seed: int) -> torch.Tensor:
    """[steps, size] or [steps, size, *shape], as agents send them."""
    generator = torch.Generator().manual_seed(seed)
    if spec.actions:
        return torch.randint(spec.actions, (steps, size), generator=generator)
    if spec.factors:
        parts = [torch.randint(count, (steps, size), generator=generator) for count in spec.factors]
        return torch.stack(parts, -1).float()
    # sometimes beyond the bounds, because simulators must clip actions
    drawn = torch.randn(steps, size, *spec.action_shape, generator=generator)
    return drawn * torch.tensor(spec.action_high).view(spec.action_shape)


def play(simulators: Simulators, actions: torch.Tensor) -> TimeStep:
    simulators.send(actions)
    return simulators.receive()


def same_steps(one: TimeStep, other: TimeStep) -> bool:
    same_final = (one.final_observation is None) == (other.final_observation is None)
    if same_final and one.final_observation is not None and other.final_observation is not None:
        same_final = torch.equal(one.final_observation[one.truncated], other.final_observation[one.truncated])
    tensors = ("observation", "reward", "terminated", "truncated")
    equal = all(torch.equal(getattr(one, name), getattr(other, name)) for name in tensors)
    return same_final and equal and list(one.episodes) == list(other.episodes)


def assert_resumes_exactly(world: SimulatorWorld, before: int, after: int, size: int = 2) -> int:
    """Raise AssertionError unless simulators of ``world`` that are saved after ``before`` steps and loaded
    take the same ``after`` steps. Returns how many episodes ended in these."""
    simulators, loaded = (world.open(size, training=True) for _ in range(2))
    simulators.reset(1)
    loaded.reset(2)
    actions = drawn_actions(simulators.spec, before + after, size, seed=3)
    for t in range(before):
        last = play(simulators, actions[t])
        play(loaded, actions[t].flip(0))
    saved = simulators.state()
    assert saved is not None
    assert torch.equal(loaded.load(copy.deepcopy(saved)).observation, last.observation)
    ended = 0
    for t in range(before, before + after):
        step = play(simulators, actions[t])
        assert same_steps(step, play(loaded, actions[t])), t
        ended += len(step.episodes)
    for each in (simulators, loaded):
        each.close()
    return ended
