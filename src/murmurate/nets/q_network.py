"""Action values over a torso, in one stream or two."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from murmurate.nets.conv import ConvTorso
from murmurate.nets.initialize import orthogonal_
from murmurate.nets.torso import AUTO, build_torso, drawn_from
from murmurate.spec import EnvSpec


class DuelingHead(nn.Module):
    """``Q = V + A - mean A`` (Wang et al. 2016, eq. 9)."""

    def __init__(self, in_features: int, actions: int) -> None:
        super().__init__()
        self.value = nn.Linear(in_features, 1)
        self.advantage = nn.Linear(in_features, actions)

    def forward(self, features: Tensor) -> Tensor:
        """[B, F] to [B, A]."""
        advantage: Tensor = self.advantage(features)
        value: Tensor = self.value(features)
        return value + advantage - advantage.mean(-1, keepdim=True)


class QNetwork(nn.Module):
    """Torso and head. What the head gives is float32; features are cast to its dtype."""

    def __init__(self, torso: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.torso, self.head = torso, head

    def lay(self, observation: Tensor) -> Tensor:
        """[B, ...] as nets of this kind read it, so that several can share the work."""
        return self.torso.lay(observation) if isinstance(self.torso, ConvTorso) else observation

    def forward(self, observation: Tensor) -> Tensor:
        """[B, ...], or what ``lay`` makes of it, to Q(s, .) [B, A]."""
        features = self.torso(observation)
        values: Tensor = self.head(features.to(next(self.head.parameters()).dtype))
        return values.float()


def q_network(
    spec: EnvSpec,
    *,
    generator: torch.Generator,
    torso: str = AUTO,
    hidden: Sequence[int] = (128, 128),
    dueling: bool = False,
) -> QNetwork:
    """The net for a world, orthogonally initialised: gain sqrt(2) in the torso, 1 in the head.

    Args:
        spec: the world; its actions are discrete.
        generator: all weights are drawn from it; the global one is not touched.
        torso: its name (``nets/torso.py``); "auto" is nature2013 for images and mlp for vectors.
        hidden: widths of the MLP's layers.
        dueling: two streams, of the state's value and the actions' advantages.

    Raises:
        ValueError: for vectors of actions, an unknown torso, or one that cannot read what is observed.
    """
    if not spec.actions:
        raise ValueError(
            f"the actions of {spec.name} are vectors, and Q-learning chooses among a few: use a2c"
        )
    with drawn_from(generator):
        trunk = build_torso(spec, torso, hidden)
        features: int = trunk.out_features  # type: ignore[assignment]
        head = DuelingHead(features, spec.actions) if dueling else nn.Linear(features, spec.actions)
        net = QNetwork(trunk, head)
    orthogonal_(net.torso, math.sqrt(2.0), generator)
    orthogonal_(net.head, 1.0, generator)
    return net
