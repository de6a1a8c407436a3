"""The state of a ``torch.optim`` optimizer: in a fixed order, and as it is before the first step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

MakeOptimizer = Callable[[list[Any]], torch.optim.Optimizer]

# Initial values that are neither zero nor set by the optimizer's constructor.
_AT_FIRST = {"mu_product": 1.0}


def entries(optimizer: torch.optim.Optimizer) -> Iterator[tuple[nn.Parameter, dict[str, Any]]]:
    """Each parameter with its (live) state, group after group."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield parameter, optimizer.state[parameter]


def materialise(optimizer: torch.optim.Optimizer, make_optimizer: MakeOptimizer) -> None:
    """Create lazily made state, with its values before the first step.

    A copy of the optimizer steps once on zeros, which leaves moments zero, and counters are reset.
    Existing state is kept.
    """
    if all(state for _, state in entries(optimizer)):
        return
    twin = _twin(optimizer, make_optimizer)
    _step_along(twin, 0.0)
    for (_, mine), (_, theirs) in zip(entries(optimizer), entries(twin), strict=True):
        for key, value in theirs.items():
            if key == "step" or key in _AT_FIRST:
                start = _AT_FIRST.get(key, 0.0)
                value = torch.full_like(value, start) if torch.is_tensor(value) else type(value)(start)
            mine.setdefault(key, value)


def check_start(optimizer: torch.optim.Optimizer, make_optimizer: MakeOptimizer) -> None:
    """Raise ValueError if a materialised first step is not the optimizer's own first step.

    Dampened momentum is such a case: its first step uses the whole gradient, later ones a part.
    """
    plain, primed = _twin(optimizer, make_optimizer), _twin(optimizer, make_optimizer)
    materialise(primed, make_optimizer)
    _step_along(plain, 1.0)
    _step_along(primed, 1.0)
    for (one, _), (other, _) in zip(entries(plain), entries(primed), strict=True):
        if not torch.equal(one, other):
            raise ValueError(
                f"the first step of {type(optimizer).__name__} with these settings differs from the rest in "
                "a way that shared moments cannot start from. Use another optimizer, or keep the moments "
                "apart (hogwild: shared_moments=False)."
            )


def _twin(optimizer: torch.optim.Optimizer, make_optimizer: MakeOptimizer) -> torch.optim.Optimizer:
    groups = [
        {
            **{k: v for k, v in group.items() if k != "params"},
            "params": [nn.Parameter(torch.zeros_like(p)) for p in group["params"]],
        }
        for group in optimizer.param_groups
    ]
    return make_optimizer(groups)


def _step_along(optimizer: torch.optim.Optimizer, slope: float) -> None:
    for parameter, _ in entries(optimizer):
        parameter.grad = torch.full_like(parameter, slope)
    optimizer.step()
