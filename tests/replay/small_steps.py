"""Steps of one simulator for replays."""

from __future__ import annotations

import torch

from murmurate.replay.interface import Steps


def step(observation, action, reward, after, terminated=False, truncated=False):
    """Of one simulator."""
    return Steps(
        torch.as_tensor(observation)[None],
        torch.as_tensor(action)[None],
        torch.tensor([float(reward)]),
        torch.as_tensor(after)[None],
        torch.tensor([terminated]),
        torch.tensor([truncated]),
    )


def rows(replay, count, start=0):
    for t in range(start, start + count):
        replay.observe(0, step([float(t)], t, t, [t + 1.0]))
