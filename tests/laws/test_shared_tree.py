"""One process writes a tree, others draw from it meanwhile: no index that is not there, no torn sum."""

from __future__ import annotations

import math
import mmap
import multiprocessing
import time
from typing import Any

import pytest
import torch

from compiled import NO_KERNELS
from murmurate import native
from murmurate.replay.sum_tree import sum_tree, tree_bytes

pytestmark = [
    pytest.mark.skipif(native.kernels is None, reason=NO_KERNELS),
    pytest.mark.timeout(240),
]
CAPACITY, FILLED = 5_000, 3_777
ENOUGH = 10_000  # leaves that each process sets or draws at least, however slow the machine is


def write(memory: memoryview, seconds: float, line: Any) -> None:
    """Sets and takes out at random, in batches of all sizes; leaves at least one leaf that is positive."""
    torch.set_num_threads(1)  # a pool of threads does not survive a fork
    tree = sum_tree(CAPACITY, seed=1, memory=memory)
    generator = torch.Generator().manual_seed(1)
    until, count = time.monotonic() + seconds, 0
    while time.monotonic() < until or count <= ENOUGH:
        size = int(torch.randint(1, 300, (), generator=generator))
        index = torch.randint(1, FILLED, (size,), generator=generator)
        priority = torch.rand(size, generator=generator) * 10.0 ** int(
            torch.randint(-3, 4, (), generator=generator)
        )
        priority[torch.rand(size, generator=generator) < 0.2] = 0.0
        tree.set(index, priority)
        count += size
    line.send((count, tree.total, tree.priorities.double().sum().item()))


def draw(memory: memoryview, seconds: float, seed: int, line: Any) -> None:
    torch.set_num_threads(1)
    tree = sum_tree(CAPACITY, seed=seed, memory=memory)
    until, drawn, wrong = time.monotonic() + seconds, 0, 0
    while time.monotonic() < until or drawn <= ENOUGH:
        found = tree.sample(256, 0.4)
        wrong += int(((found.indices < 0) | (found.indices >= FILLED)).sum())
        drawn += 256
        total = tree.total
        wrong += not (math.isfinite(total) and total > 0.0)
        # what is drawn had a chance at some moment: at worst it was taken out just now, and that is rare
    line.send((drawn, wrong))


@pytest.mark.parametrize("seconds", [1.5, pytest.param(60.0, marks=pytest.mark.slow)])
def test_readers_find_what_is_there_while_a_writer_writes(seconds: float) -> None:
    memory = memoryview(mmap.mmap(-1, tree_bytes(CAPACITY)))
    tree = sum_tree(CAPACITY, memory=memory)
    tree.set(torch.arange(FILLED), torch.rand(FILLED, generator=torch.Generator().manual_seed(0)) + 0.1)
    context = multiprocessing.get_context("fork")
    lines, processes = [], []
    for work, more in ((write, ()), (draw, (2,)), (draw, (3,))):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=work, args=(memory, seconds, *more, theirs), daemon=True)
        process.start()
        lines.append(ours)
        processes.append(process)
    (written, total, exact), *read = [line.recv() for line in lines]
    for process in processes:
        process.join()
    assert written > ENOUGH
    assert total == pytest.approx(exact, rel=1e-6)
    for drawn, wrong in read:
        assert drawn > ENOUGH
        assert wrong == 0
    # who comes later finds the same tree, and a sum is that of its leaves on every level
    assert sum_tree(CAPACITY, memory=memory).total == total
    masses = torch.linspace(0, 1, 4_000, dtype=torch.float64)[:-1] * total
    found = tree.find(masses)
    assert (tree.priorities[found] > 0).all()
    upto = tree.priorities.double().cumsum(0)
    assert ((upto[found] - masses).clamp(max=0).abs() <= 1e-6 * total).all()
