"""Small problems on which strategies are tested, and the training loop for them.

Data, and the noise of gradients, depend only on (rank, step), so that two runs can be compared to the bit.
Everything is defined at module level, so that a member can be a thread or a process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from murmurate.replica.vector import Exchange, Replica

OPTIMIZERS: dict[str, Callable[[list[Any]], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "decayed": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.05),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, alpha=0.9, eps=1e-5),
    "centered": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True, eps=1e-5),
    "adam": lambda p: torch.optim.Adam(p, lr=0.02, eps=1e-5),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.02, eps=1e-5, weight_decay=0.1),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.02, eps=1e-5, amsgrad=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.02, eps=1e-5),
    "dampened": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, dampening=0.5),
}


@dataclass(frozen=True)
class Problem:
    """Fit noise with a tanh net: it is smooth, so rounding errors stay small."""

    optimizer: str = "sgd"
    share: int = 6  # samples of one replica in one batch

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64

    def net(self, seed: int = 0) -> nn.Module:
        net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).to(self.dtype)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.copy_(0.7 * torch.randn(parameter.shape, generator=generator))
        return net

    def options(self) -> dict[str, Any]:
        """Options of the replica."""
        return {}

    def batch(self, rank: int, step: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1000 * step + rank)
        x = torch.randn(self.share, 4, generator=generator).to(self.dtype)
        y = torch.randn(self.share, 3, generator=generator).to(self.dtype)
        return x, y

    def loss(self, net: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
        x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
        loss: Tensor = (net(x).to(y.dtype) - y).square().mean()
        return loss

    def alone(self, updates: int, ranks: Iterable[int] = (0,)) -> TrainingResult:
        """Train a bare Replica on the joined batches of ``ranks``: no strategy, no fabric, no replicator."""
        replica = Replica("model", self.net(), OPTIMIZERS[self.optimizer], **self.options())
        return self._run(replica, updates, tuple(ranks))

    def _run(self, replica: Replica, updates: int, ranks: tuple[int, ...], start: int = 0) -> TrainingResult:
        result = TrainingResult()
        for step in range(start, start + updates):
            batches = [self.batch(rank, step) for rank in ranks]
            result.exchanges.append(replica.descend(self.loss(replica.module, batches)))
            result.path.append(replica.params.detach().clone())
        result.state = replica.state()
        return result


@dataclass
class TrainingResult:
    """The training of one replica: its path, and its state at the end."""

    path: list[Tensor] = field(default_factory=list)  # the vector [N] after each step
    exchanges: list[Exchange] = field(default_factory=list)
    state: dict[str, Any] = field(default_factory=dict)
    strategy: dict[str, Any] = field(default_factory=dict)

    @property
    def params(self) -> Tensor:
        return self.path[-1]


def same(one: Any, other: Any) -> bool:
    """Whether two nested structures are equal to the bit."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return bool(one == other)
