"""A data loader with workers inside a member: they run, and none outlives the process that started it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import murmurate
from replicator.example_scripts import environment
from waiting import until


def loader(workers: int = 2) -> DataLoader[tuple[torch.Tensor, ...]]:
    rows = torch.arange(32.0).reshape(16, 2)
    return DataLoader(TensorDataset(rows), batch_size=4, num_workers=workers)


def sums(loop):
    net = torch.nn.Linear(2, 1)
    optimizer = loop.wrap_optimizer(torch.optim.SGD(net.parameters(), lr=1e-3))
    seen = []
    for (batch,) in loop.inputs(loader()):
        optimizer.zero_grad()
        net(batch).mean().backward()
        optimizer.step()
        seen.append(float(batch.sum()))
    return seen


@pytest.mark.parametrize("launcher", ["local", "inline"])
def test_each_replica_learns_from_a_loader_with_workers(launcher):
    result = murmurate.run(sums, replicas=2, launcher=launcher)
    whole = [float(batch.sum()) for (batch,) in loader(workers=0)]
    assert [sum(shares) for shares in zip(*result, strict=True)] == whole


def start_as_an_orphan(worker):
    parent = os.getppid()
    until(lambda: os.getppid() != parent)


def for_ever(loop):
    with open(os.environ["PIDS"], "a") as pids:
        while True:
            # torch's worker looks for its parent after this function only
            late = DataLoader(loader().dataset, num_workers=2, worker_init_fn=start_as_an_orphan)
            batches = iter(late)  # kept, and its workers with it
            for worker in batches._workers:
                pids.write(f"{loop.rank} {os.getpid()} {worker.pid}\n")
            pids.flush()
            signal.pause()


def lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


COMMAND = """
import murmurate, replicator.test_data_loader as t
murmurate.run(t.for_ever, replicas=2)
"""


@pytest.mark.parametrize("victim", [pytest.param("the launcher", marks=pytest.mark.slow), "a member"])
def test_no_worker_of_a_loader_outlives_a_kill(victim: str, tmp_path: Path) -> None:
    file = tmp_path / "pids"
    command = subprocess.Popen([sys.executable, "-c", COMMAND], env=environment() | {"PIDS": str(file)})
    try:
        until(lambda: file.exists() and len(file.read_text().splitlines()) == 4, "two workers a member")
        rows = [tuple(map(int, line.split())) for line in file.read_text().splitlines()]
        mine = {pid for rank, *both in rows if victim == "the launcher" or rank == 1 for pid in both}
        os.kill(command.pid if victim == "the launcher" else max(rows)[1], signal.SIGKILL)
        until(lambda: not any(map(lives, mine)), "all of its processes gone")
        assert victim == "the launcher" or command.poll() is None, "the others go on"
    finally:
        command.kill()
        command.wait()
