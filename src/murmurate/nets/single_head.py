"""Nets of one torso and one head: a policy, or a value function, for agents that train them separately."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from murmurate.nets.action_mask import ActionMask, action_mask, masked
from murmurate.nets.actor_critic import policy_head
from murmurate.nets.initialize import orthogonal_
from murmurate.nets.torso import AUTO, build_torso, seeded_by
from murmurate.spec import EnvSpec


class SingleHead(nn.Module):
    """A head over a torso: observations [B, ...] to [B, A], float32.

    normalizer: module that normalises observations for the torso, and may be shared by several nets; None:
    they are not normalised. mask: masks the logits of illegal actions; None: all actions are legal.
    """

    def __init__(self, torso: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.torso = torso
        self.head = head
        self.normalizer: nn.Module | None = None
        self.mask: ActionMask | None = None

    def forward(self, observation: Tensor) -> Tensor:
        seen = observation if self.normalizer is None else self.normalizer(observation)
        return masked(self.head(self.torso(seen)), observation, self.mask)


def policy_net(
    spec: EnvSpec, *, generator: torch.Generator, torso: str = AUTO, hidden: Sequence[int] = (64, 64)
) -> SingleHead:
    """A net from observations [B, ...] to the policy's parameters [B, A] (logits, or mean and log_std),
    initialised orthogonally: gain sqrt(2) in the torso, 0.01 in the head. Arguments and errors as for
    ``actor_critic``."""
    with seeded_by(generator):
        trunk = build_torso(spec, torso, hidden)
        head = policy_head(cast(int, trunk.out_features), spec)
    net = _initialised(trunk, head, 0.01, generator)
    net.mask = action_mask(spec)
    return net


def value_net(
    spec: EnvSpec, *, generator: torch.Generator, torso: str = AUTO, hidden: Sequence[int] = (64, 64)
) -> SingleHead:
    """A net from observations [B, ...] to values [B, 1]; as ``policy_net``, but with gain 1 in the head."""
    with seeded_by(generator):
        trunk = build_torso(spec, torso, hidden)
        head = nn.Linear(cast(int, trunk.out_features), 1)
    return _initialised(trunk, head, 1.0, generator)


def _initialised(torso: nn.Module, head: nn.Module, gain: float, generator: torch.Generator) -> SingleHead:
    orthogonal_(torso, math.sqrt(2.0), generator)
    orthogonal_(head, gain, generator)
    return SingleHead(torso, head)
