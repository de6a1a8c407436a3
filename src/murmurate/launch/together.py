"""Runs a function in several processes, each one member of a ``ProcessFabric``, for measurements."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import torch

from murmurate.errors import RunFailed
from murmurate.fabric.processes.fabric import ProcessFabric
from murmurate.fabric.processes.spawn import FINISHED, Exit, Worker, WorkerProcesses, take_signals

_DEADLINE_SECONDS = 280.0

Work = Callable[..., Any]


def run_together(members: int, work: Work, *arguments: Any, seconds: float = 0.0) -> list[Any]:
    """Call ``work(fabric, *arguments)`` in ``members`` processes; returns their results, by rank.

    seconds: for how long the work measures, which does not count against its deadline. No process outlives
    the call. Raises RunFailed if a process fails, with the reason.
    """
    allowed = seconds + _DEADLINE_SECONDS
    deadline = time.monotonic() + allowed
    results: dict[int, Any] = {}
    with WorkerProcesses(members) as workers:
        for rank in range(members):
            workers.start(rank, functools.partial(_member, work, arguments))
        while workers.alive:
            if time.monotonic() > deadline:
                late = workers.alive[0].rank
                raise RunFailed(f"member {late} did not answer within {allowed:g} s")
            for worker in workers.wait(1.0):
                end = worker.exit
                assert end is not None
                if end.how != FINISHED:
                    reason = end.trace or end.error
                    raise RunFailed(f"member {worker.rank} {end.how}: {reason}")
                results[worker.rank] = end.result
    return [results[rank] for rank in range(members)]


def _member(work: Work, arguments: tuple[Any, ...], worker: Worker) -> Exit:
    take_signals()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    fabric = ProcessFabric(worker.memory_file, worker.run_state, worker.rank)
    return Exit(FINISHED, result=work(fabric, *arguments))
