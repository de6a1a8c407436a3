"""A time step of simulators as a replay is told of it."""

from __future__ import annotations

from torch import Tensor

from murmurate.replay.interface import Steps
from murmurate.spec import TimeStep


def steps_of(observation: Tensor, action: Tensor, step: TimeStep) -> Steps:
    """What was seen, what was done, and what came of it: its last observation where it was cut off."""
    following = step.observation
    if step.final_observation is not None:
        following = following.clone()
        following[step.truncated] = step.final_observation[step.truncated]
    return Steps(observation, action, step.reward, following, step.terminated, step.truncated)
