"""Torch's number of threads, of which a run in this process sets its own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def keeping_threads() -> Iterator[None]:
    """Restores the number of torch threads at the end of this context: the caller goes on with it."""
    threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
