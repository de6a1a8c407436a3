"""Ranks that meet at a rendezvous under one store, in threads of the test's own process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

from murmurate.launch.job_spec import JobSpec
from murmurate.launch.rendezvous import Environment, Rendezvous
from murmurate.training.worker_context import Resume

needs_proc = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="memory is lent through /proc")


def around(server: TCPStore, rank: int, size: int = 2) -> Environment:
    return Environment(rank, size, 1, "127.0.0.1", server.port, 0, "test", agent_store=True)


def job(ranks: Rendezvous, folder: str) -> JobSpec:
    resume = Resume(Path(folder) / "last", {0: 0, 1: 0}, {"env_steps": 7, "replicas": 0}, 3.0)
    return JobSpec("test", ranks.epoch, 2, ranks.offer, 0.0, folder=folder, resume=resume)


def in_thread(act: Callable[[], Any]) -> Callable[[], Any]:
    """Begin ``act``; calling the result waits for its value, or raises its error."""
    found: list[Any] = []

    def go() -> None:
        try:
            found.append(act())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=go, daemon=True)
    thread.start()

    def value() -> Any:
        thread.join(60)
        assert found, "it is still waiting"
        if isinstance(found[0], Exception):
            raise found[0]
        return found[0]

    return value
