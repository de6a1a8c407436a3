"""Several processes that measure together: each is one member of a ``ProcessFabric``.

What a member does is a function ``work(fabric, run_state, *arguments) -> plain values``; what all of them
returned comes back by rank. Nobody outlives the call.
"""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

from murmurate.errors import RunFailed
from murmurate.fabric.processes.fabric import ProcessFabric
from murmurate.fabric.processes.shared_memory import SharedMemoryFile
from murmurate.launch.role import open_run_state

_DEADLINE_SECONDS = 280.0

Work = Callable[..., Any]


def together(members: int, work: Work, *arguments: Any) -> list[Any]:
    """``work`` in as many processes. Raises RunFailed with the first one's reason if one fails."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # inherited by the fork server, before torch loads
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["murmurate.launch.preloaded"])
    memory_file = SharedMemoryFile.create()
    open_run_state(memory_file, members).open()
    lines, processes = [], []
    try:
        for rank in range(members):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_member, args=(members, rank, memory_file, theirs, work, arguments), daemon=True
            )
            process.start()
            theirs.close()
            lines.append(ours)
            processes.append(process)
        return [_answer(rank, line) for rank, line in enumerate(lines)]
    finally:
        for process in processes:
            process.kill()
            process.join()
        memory_file.close()


def _answer(rank: int, line: Connection) -> Any:
    try:
        if not line.poll(_DEADLINE_SECONDS):
            raise RunFailed(f"member {rank} of the bench did not answer within {_DEADLINE_SECONDS:g} s")
        kind, value = line.recv()
    except EOFError:
        raise RunFailed(f"member {rank} of the bench died") from None
    if kind == "failed":
        raise RunFailed(f"member {rank} of the bench failed: {value}")
    return value


def _member(
    members: int,
    rank: int,
    memory_file: SharedMemoryFile,
    line: Connection,
    work: Work,
    arguments: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    run_state = open_run_state(memory_file, members)
    try:
        line.send(("done", work(ProcessFabric(memory_file, run_state, rank), *arguments)))
    except Exception:
        line.send(("failed", traceback.format_exc()))
