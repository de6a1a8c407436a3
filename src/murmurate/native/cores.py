"""How many cores this process may use."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

from murmurate.native.control_groups import groups_of


def usable_cores() -> int:
    """Number of cores that this process may use: those that it may run on, but no more than the time of cores
    that its control groups allow (``docker run --cpus 2``, a limit of Kubernetes), rounded up."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min([cores, *map(math.ceil, _quotas())])


def _quotas() -> Iterator[float]:
    """Cores whose whole time each control group allows, of those that limit it."""
    for group, version in groups_of("cpu"):
        try:
            quota, period = map(float, _quota_and_period(group, version))
        except (OSError, ValueError):  # the quota is "max", for example: there is none
            continue
        if quota > 0 and period > 0:  # of cgroups v1 the quota -1 is none
            yield quota / period


def _quota_and_period(group: Path, version: int) -> list[str]:
    if version == 2:
        return (group / "cpu.max").read_text().split()
    return [(group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period")]
