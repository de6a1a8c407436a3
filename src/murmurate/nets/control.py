"""Policies and critics for vector actions."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from murmurate.nets.batched_mlp import BatchedMLP
from murmurate.nets.moments import observation_normalizer
from murmurate.nets.own_control import OwnNets
from murmurate.spec import EnvSpec

_LEAST_LOG_STD, _GREATEST_LOG_STD = -20.0, 2.0


class ActionBounds(nn.Module):
    """Converts between a world's actions [B, *shape] and scaled actions [B, D], which are in [-1, 1].

    centre, reach: the middle and half the width of each component's range.
    """

    centre: Tensor
    reach: Tensor

    def __init__(self, spec: EnvSpec) -> None:
        super().__init__()
        self.shape = spec.action_shape
        self.is_unscaled = set(spec.action_low) == {-1.0} and set(spec.action_high) == {1.0}
        low, high = (np.asarray(bound, np.float32) for bound in (spec.action_low, spec.action_high))
        self.register_buffer("centre", torch.tensor((low + high) / 2), persistent=False)
        self.register_buffer("reach", torch.tensor((high - low) / 2), persistent=False)

    def to_world(self, scaled: Tensor) -> Tensor:
        action = scaled if self.is_unscaled else torch.addcmul(self.centre, scaled, self.reach)
        return action.view(-1, *self.shape)

    def to_scaled(self, action: Tensor) -> Tensor:
        flat = action.flatten(1)
        if self.is_unscaled:
            return flat
        # a component that can have only one value is scaled to 0
        return (flat - self.centre) / torch.where(self.reach == 0, 1.0, self.reach)


class ControlPolicy(nn.Module):
    """An MLP from observations to the parameters of a policy over scaled actions (see ``ActionBounds``).

    deterministic: whether tanh of the result is the scaled action; otherwise the two halves of the result are
    the mean and log_std of a squashed Gaussian, whose log_std is limited to [-20, 2].

    Attributes:
        net: a ``BatchedMLP`` of one member, or the net given as ``own``. bounds: bounds of the actions.
        normalizer: normalizer of the observations; None: they are read as they are.
    """

    def __init__(
        self,
        spec: EnvSpec,
        hidden: Sequence[int],
        *,
        deterministic: bool,
        normalize: bool = False,
        generator: torch.Generator,
        own: OwnNets | None = None,
    ) -> None:
        super().__init__()
        observed, dimensions = math.prod(spec.observation_shape), math.prod(spec.action_shape)
        out = dimensions if deterministic else 2 * dimensions
        self.deterministic = deterministic
        self.bounds = ActionBounds(spec)
        self.normalizer = observation_normalizer(spec, normalize)
        self.net = own or BatchedMLP(1, (observed, *hidden, out), generator=generator)

    def observation_features(self, observation: Tensor) -> Tensor:
        """Observations [B, ...] as the nets read them, [B, F]."""
        return (observation if self.normalizer is None else self.normalizer(observation)).flatten(1)

    def forward(self, observation: Tensor) -> Tensor:
        """Observations [B, ...] to greedy actions [B, *shape] (tanh of the mean), in the world's bounds."""
        out = self.net(self.observation_features(observation))[0].float()
        mean = out if self.deterministic else out.chunk(2, 1)[0]
        return self.bounds.to_world(torch.tanh(mean))


def limited_log_std(log_std: Tensor) -> Tensor:
    """log_std [B, D] limited to [-20, 2]."""
    return log_std.clamp(_LEAST_LOG_STD, _GREATEST_LOG_STD)


def through_limit(slope: Tensor, log_std: Tensor) -> Tensor:
    """The gradient [B, D] with respect to the input of ``limited_log_std`` from ``slope``, that with respect
    to its output; 0 at the limits."""
    result: Tensor = torch.ops.aten.hardtanh_backward(slope, log_std, _LEAST_LOG_STD, _GREATEST_LOG_STD)
    return result


def critics(spec: EnvSpec, hidden: Sequence[int], members: int, *, generator: torch.Generator) -> BatchedMLP:
    """``members`` critics from observations and scaled actions, as [B, F + D], to values [E, B, 1]."""
    inputs = math.prod(spec.observation_shape) + math.prod(spec.action_shape)
    return BatchedMLP(members, (inputs, *hidden, 1), generator=generator)
