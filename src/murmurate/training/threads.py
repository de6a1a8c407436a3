"""How torch computes in the caller's thread, of which a run in this process has its own settings."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import torch


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
