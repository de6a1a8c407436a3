"""Large batches are searched by several threads: what is found does not depend on how many, nor on what they
were doing before."""

from __future__ import annotations

import multiprocessing
import threading
from multiprocessing.connection import Connection

import psutil
import pytest
import torch

from compiled import NO_KERNELS
from murmurate import native
from murmurate.replay.sum_tree import sum_tree
from murmurate.replay.tree import SumTree

pytestmark = pytest.mark.skipif(native.kernels is None, reason=NO_KERNELS)
CAPACITY = 70_000
COUNTS = (1, 16_383, 16_384, 16_385, 50_001)
MANY = 3_000_000  # long enough for every thread to have its turn, on one core too


def priorities(scale: float = 1.0) -> torch.Tensor:
    priority = torch.rand(CAPACITY, generator=torch.Generator().manual_seed(0)) * scale
    priority[::5] = 0.0
    return priority


def full(threads: int, priority: torch.Tensor | None = None) -> SumTree:
    tree = sum_tree(CAPACITY, threads=threads)
    tree.set(torch.arange(CAPACITY), priorities() if priority is None else priority)
    return tree


def found(tree: SumTree) -> list[torch.Tensor]:
    """What it draws and finds, batch after batch."""
    out: list[torch.Tensor] = []
    for count in COUNTS:
        out += tree.sample(count, 0.4)
        out += tree.sample(count, 0.4, stratified=True)
        mass = torch.linspace(0, 1, count + 1, dtype=torch.float64)[:-1] * tree.total
        out.append(tree.find(mass))
    return out


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.fixture(scope="module")
def alone() -> list[torch.Tensor]:
    return found(full(threads=1))


@pytest.mark.parametrize("threads", [2, 3, 7, 1000])
def test_what_is_found_does_not_depend_on_the_number_of_threads(
    threads: int, alone: list[torch.Tensor]
) -> None:
    tree = full(threads)
    for _ in range(5):
        tree.load(full(threads=1).state())  # the same stream from its beginning
        assert same(found(tree), alone)


def test_no_threads_at_all_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one thread, not 0"):
        sum_tree(10, threads=0)


def test_threads_flush_denormals_where_the_caller_does() -> None:
    """What is below the least normal number counts where denormals do, and is nothing where not."""
    torch.set_flush_denormal(False)  # another test may have left it on
    full(threads=3).sample(MANY, 0.4)  # threads that have worked with denormals
    small = priorities(scale=4 * torch.finfo(torch.float32).tiny)

    def draws(threads: int) -> torch.Tensor:
        return full(threads, small).sample(MANY, 0.4).indices

    with_them = draws(1)
    assert torch.equal(draws(3), with_them)
    try:
        assert torch.set_flush_denormal(True)
        without = draws(1)
        assert torch.equal(draws(3), without)
    finally:
        torch.set_flush_denormal(False)
    assert not torch.equal(with_them, without)
    assert torch.equal(draws(3), with_them)


def test_many_callers_at_once_find_what_each_finds_alone(alone: list[torch.Tensor]) -> None:
    right = [False] * 4

    def work(k: int) -> None:
        right[k] = same(found(full(threads=3)), alone)

    callers = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert all(right)


def answer(tree: SumTree, alone: list[torch.Tensor], line: Connection) -> None:
    torch.set_num_threads(1)  # torch's own pool does not survive a fork
    before = psutil.Process().num_threads()
    line.send((same(found(tree), alone), psutil.Process().num_threads() - before))


@pytest.mark.timeout(120)
def test_a_forked_child_has_threads_of_its_own(alone: list[torch.Tensor]) -> None:
    """Forked again and again while another thread of the parent is served: locks are held at times."""
    tree, busy = full(threads=3), full(threads=3)
    done = threading.Event()

    def work() -> None:
        while not done.is_set():
            busy.sample(20_000, 0.4)

    other = threading.Thread(target=work)
    other.start()
    context = multiprocessing.get_context("fork")
    try:
        for _ in range(8):
            ours, theirs = context.Pipe(duplex=False)
            child = context.Process(target=answer, args=(tree, alone, theirs), daemon=True)
            child.start()
            assert ours.poll(60), "the child waits for threads that it does not have"
            assert ours.recv() == (True, 2)
            child.join()
    finally:
        done.set()
        other.join()
