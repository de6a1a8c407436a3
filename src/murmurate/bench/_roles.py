"""Shared by the benchmarks in which several processes measure together."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from murmurate.fabric.interface import Fabric
from murmurate.launch.together import run_together as run_together


def join_gloo(fabric: Fabric, store: str, members: int, timeout: timedelta | None = None) -> None:
    """Make the members a torch process group, too. store: path of the file by which they find each other.
    timeout: of each collective; None: torch's 30 minutes."""
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=fabric.rank, world_size=members, timeout=timeout
    )


def rmsprop(parameters: list[Any]) -> torch.optim.Optimizer:
    """The optimizer of the A2C recipes."""
    return torch.optim.RMSprop(parameters, lr=7e-4, alpha=0.99, eps=1e-5)
