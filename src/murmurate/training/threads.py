"""How torch computes in the caller's thread, of which a run in this process has its own settings."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

import psutil
import torch

from murmurate.native.cores import usable_cores


def all_threads() -> int:
    """Number of torch threads for a computation that nothing else competes with: one for each core that this
    process may use, or as many as OMP_NUM_THREADS allows."""
    usable = usable_cores()
    cores = min(psutil.cpu_count(logical=False) or usable, usable)  # not known on some hosts
    return min(cores, threads_of_environment() or cores)


def threads_of_environment() -> int | None:
    """The number in OMP_NUM_THREADS, which may list one for each level of nesting; None if it has none."""
    first = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(first) if first.isdecimal() and int(first) > 0 else None


@contextlib.contextmanager
def keeping_threads() -> Iterator[None]:
    """Restores the number of torch threads, and whether denormals count, at the end of this context: the
    caller goes on with both."""
    threads, flushes_denormals = torch.get_num_threads(), sys.float_info.min / 2 == 0.0
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.set_flush_denormal(flushes_denormals)
