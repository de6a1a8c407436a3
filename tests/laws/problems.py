"""The problems of the conformance tests, with more settings, and others on which the laws are tried."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from murmurate.conformance import problems
from murmurate.conformance.problems import OPTIMIZERS, TrainingResult, same
from murmurate.replicator.replicator import Replicator
from murmurate.strategies.interface import Strategy

__all__ = [
    "HOW", "LINEAR", "OPTIMIZERS", "TYPICAL_OPTIMIZERS", "Point", "Problem", "TrainingResult", "halving",
    "same", "separate_last_layer", "slope",
]  # fmt: skip

LINEAR = ("sgd", "momentum", "nesterov", "decayed")  # the update is a linear map of the gradients
# the optimizers of most tests
TYPICAL_OPTIMIZERS = ("sgd", "momentum", "nesterov", "rmsprop", "adam", "adamw")
HOW = pytest.mark.parametrize(
    "how",
    [{}, {"float32": True, "clip": 0.3, "scheduled": True, "grouped": True}, {"bfloat16": True, "clip": 0.3}],
    ids=["plain", "full", "bfloat16"],
)


def halving(clock: int) -> float:
    """A learning-rate factor that is halved every three updates."""
    return 0.5 ** (clock // 3)


def separate_last_layer(net: nn.Module) -> list[dict[str, Any]]:
    """Two parameter groups: the last layer, with a learning rate of its own; the rest, with weight decay."""
    last = list(net.children())[-1]
    last_ids = {id(p) for p in last.parameters()}
    return [
        {"params": list(last.parameters()), "lr": 0.03},
        {"params": [p for p in net.parameters() if id(p) not in last_ids], "weight_decay": 0.02},
    ]


@dataclass(frozen=True)
class Problem(problems.Problem):
    float32: bool = False
    clip: float | None = None
    scheduled: bool = False
    grouped: bool = False
    bfloat16: bool = False

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.float32 or self.bfloat16 else torch.float64

    def options(self) -> dict[str, Any]:
        return {
            "clip": self.clip,
            "schedule": halving if self.scheduled else None,
            "groups": separate_last_layer if self.grouped else None,
            "compute_dtype": torch.bfloat16 if self.bfloat16 else None,
        }

    def loss(self, net: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
        if self.bfloat16:
            batches = [(x.bfloat16(), y) for x, y in batches]
        return super().loss(net, batches)

    def learn(self, strategy: Strategy, updates: int, fabric: Any) -> TrainingResult:
        """Train member ``fabric.rank`` on its own batches, with one step of the strategy for each."""
        replicator = Replicator(strategy, fabric)
        replica = replicator.replicate(
            "model", self.net(fabric.rank), OPTIMIZERS[self.optimizer], **self.options()
        )
        result = self._run(replica, updates, (fabric.rank,))
        result.strategy = replicator.bound_replicas["model"].strategy.state()
        return result


class Point(nn.Module):
    """A vector to be moved by closed-form gradients, through ``follow``."""

    def __init__(self, *values: float) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.tensor(values, dtype=torch.float64))


def slope(rank: int, step: int, x: Tensor) -> Tensor:
    """A gradient whose curvature and minimum depend on the rank, and its noise also on the step."""
    generator = torch.Generator().manual_seed(7919 * rank + step)
    noise = torch.randn(len(x), generator=generator, dtype=torch.float64)
    curvature = 0.5 + 0.4 * torch.cos(torch.arange(len(x), dtype=torch.float64) + rank)
    return curvature * (x - rank) + 0.3 * torch.sin(3.0 * x) + noise
