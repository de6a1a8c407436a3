"""Shared by agents: running statistics of observations, and of the returns of rollouts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from murmurate.errors import Refusal
from murmurate.nets.moments import ObservationNormalizer, RunningMoments
from murmurate.replicator.collectives import Group
from murmurate.replicator.learner import Context
from murmurate.spec import Trajectory

_LARGEST_REWARD = 10.0


def statistics_group(context: Context) -> Group:
    """The replicas that share statistics: all, if they exchange in common rounds (each at the same update);
    else this replica alone."""
    try:
        return context.group()
    except Refusal:
        return Group.of_one()


def include(moments: RunningMoments, samples: Tensor, group: Group) -> None:
    """Include ``samples`` [n, *shape] of every member of the group; all members have the same n. A member
    that has died counts as if it had samples like the others'."""
    doubles = samples.double()
    mean, square = group.mean((doubles.mean(0), doubles.square().mean(0)))
    moments.include(mean, square, len(samples) * group.size)


def statistics_updater(normalizer: nn.Module | None, context: Context) -> Callable[[Tensor], None]:
    """A function that includes a batch of observations [B, ...] in the running statistics of ``normalizer``,
    with the batches of all members of its ``statistics_group``. Without a normalizer it does nothing."""
    if not isinstance(normalizer, ObservationNormalizer):
        return lambda observation: None
    moments, group = normalizer.moments, statistics_group(context)
    return lambda observation: include(moments, observation, group)


class RewardScaler:
    """Rewards divided by the standard deviation of discounted returns, limited to +-10.

    The returns are those from the beginning of each episode to each step, ``G_t = r_t + discount * G_{t-1}``
    (as in ``VecNormalize`` of OpenAI's baselines, without a paper). Their mean is not subtracted, as that
    would change what is optimal. Differs: a rollout is included as a whole before its rewards are scaled.
    Gymnasium's ``NormalizeReward`` also differs in that it has no limit, and a return goes on after a
    truncation.
    """

    def __init__(self, discount: float, group: Group, device: torch.device) -> None:
        self.discount = discount
        self.group = group
        self.moments = RunningMoments(()).to(device)
        self._return: Tensor | None = None  # [B] G of the last step; None before the first

    def scaled(self, data: Trajectory) -> Tensor:
        """The scaled rewards [T, B] of a rollout that continues the previous one. Its returns are included
        in the statistics first."""
        g = torch.zeros_like(data.reward[0]) if self._return is None else self._return
        returns = torch.empty_like(data.reward)
        for t, (reward, first) in enumerate(zip(data.reward, data.first, strict=True)):
            g = reward + self.discount * g.masked_fill(first, 0.0)
            returns[t] = g
        self._return = g
        include(self.moments, returns.flatten(), self.group)
        scale = torch.rsqrt(self.moments.variance + 1e-8)
        return (data.reward * scale).clamp(-_LARGEST_REWARD, _LARGEST_REWARD).to(data.reward.dtype)

    def state(self) -> dict[str, Any]:
        last_return = {} if self._return is None else {"return": self._return.clone()}
        return last_return | {name: x.clone() for name, x in self.moments.named_buffers()}

    def load(self, state: dict[str, Any]) -> None:
        last_return = state.get("return")
        self._return = None if last_return is None else last_return.to(self.moments.mean.device)
        for name, x in self.moments.named_buffers():
            x.copy_(state[name])


class RunningStatistics:
    """The running statistics of an agent: of its observations, of its returns, of both or of neither.

    Args:
        normalizer: normalizer of the agent's nets; None if observations are read as they are.
        discount: discount of the returns that scale rewards; None if rewards are used as they are.
    """

    def __init__(self, context: Context, normalizer: nn.Module | None, discount: float | None) -> None:
        group = Group.of_one() if normalizer is None and discount is None else statistics_group(context)
        self._group = group
        self._moments = normalizer.moments if isinstance(normalizer, ObservationNormalizer) else None
        self._scaler = None if discount is None else RewardScaler(discount, group, context.device)

    def with_scaled_rewards(self, data: Trajectory) -> Trajectory:
        return data if self._scaler is None else dataclasses.replace(data, reward=self._scaler.scaled(data))

    def include(self, observation: Tensor) -> None:
        """Include the observations [T, B, ...] of a rollout. To be called after the last update from it, so
        that updates normalize observations as ``act`` did."""
        if self._moments is not None:
            include(self._moments, observation.flatten(0, 1), self._group)

    def state(self) -> dict[str, Any]:
        """The state of the scaling of rewards; the net's own state has the statistics of observations."""
        return {} if self._scaler is None else {"rewards": self._scaler.state()}

    def load(self, state: dict[str, Any]) -> None:
        if self._scaler is not None:
            self._scaler.load(state["rewards"])
