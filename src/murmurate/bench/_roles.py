"""Several processes that measure together: each is one member of a ``ProcessFabric``.

What a member does is a function ``work(fabric, run_state, *arguments) -> plain values``; what all of them
returned comes back by rank. Nobody outlives the call.
"""

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


def together(members: int, work: Work, *arguments: Any) -> list[Any]:
    """``work`` in as many processes. Raises RunFailed with the first one's reason if one fails."""
    until = time.monotonic() + _DEADLINE_SECONDS
    results: dict[int, Any] = {}
    with WorkerProcesses(members) as workers:
        for rank in range(members):
            workers.start(rank, functools.partial(_member, work, arguments))
        while workers.alive:
            if time.monotonic() > until:
                late = workers.alive[0].rank
                raise RunFailed(f"member {late} of the bench did not answer within {_DEADLINE_SECONDS:g} s")
            for worker in workers.wait(1.0):
                found = worker.exit
                assert found is not None
                if found.how != FINISHED:
                    words = f"member {worker.rank} of the bench {found.how}: {found.trace or found.error}"
                    raise RunFailed(words)
                results[worker.rank] = found.result
    return [results[rank] for rank in range(members)]


def _member(work: Work, arguments: tuple[Any, ...], worker: Worker) -> Exit:
    take_signals()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    fabric = ProcessFabric(worker.memory_file, worker.run_state, worker.rank)
    return Exit(FINISHED, result=work(fabric, *arguments))
