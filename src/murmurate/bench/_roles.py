"""Shared by the benchmarks in which several processes measure together."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from murmurate.fabric.interface import Fabric
from murmurate.launch import together

# most measurements are so many updates, whose time depends on the machine; members that wait for one another
# in vain fail much earlier
_LONGEST_SECONDS = 6 * 3600.0


def run_together(
    members: int, work: Callable[..., Any], *arguments: Any, seconds: float = _LONGEST_SECONDS
) -> list[Any]:
    """``launch.together.run_together``, with a deadline that no number of updates in a plan reaches."""
    return together.run_together(members, work, *arguments, seconds=seconds)


def join_gloo(fabric: Fabric, store: str, members: int, timeout: timedelta | None = None) -> None:
    """Make the members a torch process group, too. store: path of the file by which they find each other.
    timeout: of each collective; None: torch's 30 minutes."""
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=fabric.rank, world_size=members, timeout=timeout
    )


def rmsprop(parameters: list[Any]) -> torch.optim.Optimizer:
    """The optimizer of the A2C recipes."""
    return torch.optim.RMSprop(parameters, lr=7e-4, alpha=0.99, eps=1e-5)
