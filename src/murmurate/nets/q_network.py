"""Nets for action values, with one stream or two."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from murmurate.nets.action_mask import ActionMask, action_mask, masked
from murmurate.nets.conv import ConvTorso
from murmurate.nets.initialize import orthogonal_
from murmurate.nets.moments import observation_normalizer
from murmurate.nets.precision import first_dtype
from murmurate.nets.torso import AUTO, build_torso, seeded_by
from murmurate.spec import EnvSpec


class DuelingHead(nn.Module):
    """``Q = V + A - mean A`` (Wang et al. 2016, eq. 9). Differs: V and A are linear in the torso's features;
    in the paper each has a hidden layer of its own."""

    def __init__(self, in_features: int, actions: int) -> None:
        super().__init__()
        self.value = nn.Linear(in_features, 1)
        self.advantage = nn.Linear(in_features, actions)

    def forward(self, features: Tensor) -> Tensor:
        """Features [B, F] to action values [B, A]."""
        advantage: Tensor = self.advantage(features)
        value: Tensor = self.value(features)
        return value + advantage - advantage.mean(-1, keepdim=True)


class QNetwork(nn.Module):
    """A torso and a head. Features are cast to the head's dtype, and its result to float32.

    normalizer: module that normalises observations for the torso; None: they are not normalised. mask: masks
    the values of illegal actions; None: all actions are legal.
    """

    def __init__(self, torso: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.torso, self.head = torso, head
        self.normalizer: nn.Module | None = None
        self.mask: ActionMask | None = None

    def preprocess(self, observation: Tensor) -> Tensor:
        """Observations [B, ...] preprocessed for the torso, so that several such nets can share the work."""
        return self.torso.preprocess(observation) if isinstance(self.torso, ConvTorso) else observation

    def forward(self, observation: Tensor) -> Tensor:
        """Observations [B, ...], raw or after ``preprocess``, to Q(s, .) [B, A]."""
        features = self.torso(observation if self.normalizer is None else self.normalizer(observation))
        return masked(self.head(features.to(first_dtype(self.head))), observation, self.mask)


def q_network(
    spec: EnvSpec,
    *,
    generator: torch.Generator,
    torso: str = AUTO,
    hidden: Sequence[int] = (128, 128),
    dueling: bool = False,
    normalize: bool = False,
) -> QNetwork:
    """The net for a world, orthogonally initialised: gain sqrt(2) in the torso, 1 in the head.

    Args:
        spec: spec of the world, whose actions are discrete.
        generator: generator of all weights; the global generator does not change.
        torso: name of the torso (``nets/torso.py``); "auto" is ``usual_torso``.
        hidden: widths of the MLP's layers.
        dueling: whether to have separate streams for the state's value and the actions' advantages.
        normalize: whether to normalise observations by their running moments (``nets/moments.py``).

    Raises:
        ValueError: for actions that are vectors, an unknown torso, or one that cannot read the observations.
    """
    spec.refuse_factors("Q-learning")
    if not spec.actions:
        raise ValueError(
            f"the actions of {spec.name} are vectors, and Q-learning needs discrete ones: use a2c"
        )
    with seeded_by(generator):
        trunk = build_torso(spec, torso, hidden)
        features: int = trunk.out_features  # type: ignore[assignment]
        head = DuelingHead(features, spec.actions) if dueling else nn.Linear(features, spec.actions)
        net = QNetwork(trunk, head)
    net.normalizer, net.mask = observation_normalizer(spec, normalize), action_mask(spec)
    orthogonal_(net.torso, math.sqrt(2.0), generator)
    orthogonal_(net.head, 1.0, generator)
    return net
