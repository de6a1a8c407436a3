"""The tree in Triton finds the leaves that its twin in torch finds, to the last index."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from compiled import GPU, needs_triton
from murmurate.replay.sum_tree import sum_tree
from murmurate.replay.tree import SumTree

pytestmark = needs_triton


def pair(capacity: int, fan_out: int = 16, seed: int = 0) -> tuple[SumTree, SumTree]:
    """The twin, on a CPU, where torch adds in the order of the children; and the tree in Triton."""
    twin = sum_tree(capacity, fan_out=fan_out, seed=seed, backend="torch")
    return twin, sum_tree(capacity, fan_out=fan_out, seed=seed, backend="triton", device=GPU)


def uneven(count: int, generator: torch.Generator) -> torch.Tensor:
    """Priorities over 24 decades, whose sums all round, and some of zero."""
    priority = 10 ** (24 * torch.rand(count, generator=generator) - 12)
    priority[torch.rand(count, generator=generator) < 0.2] = 0.0
    return priority


@pytest.mark.parametrize(
    ("capacity", "fan_out"), [(1, 2), (16, 16), (17, 16), (300, 3), (5000, 64), (70_000, 16)]
)
def test_sums_are_equal_to_the_bit_and_so_are_draws(capacity: int, fan_out: int) -> None:
    generator = torch.Generator().manual_seed(capacity)
    twin, tree = pair(capacity, fan_out, seed=-7)
    for size in (capacity, 1, capacity // 3 + 1):  # all nodes of a level, few, and some
        index = torch.randint(capacity, (size,), generator=generator)
        priority = uneven(size, generator)
        priority[-1] = 1.0
        for one in (twin, tree):
            one.set(index, priority)
        assert torch.equal(tree.priorities.cpu(), twin.priorities)
        assert (tree.total, tree.minimum) == (twin.total, twin.minimum)
        for stratified in (False, True):
            wanted, found = twin.sample(777, 0.4, stratified), tree.sample(777, 0.4, stratified)
            assert torch.equal(found.indices.cpu(), wanted.indices)
            torch.testing.assert_close(found.weights.cpu(), wanted.weights, rtol=1e-5, atol=0)
    ends = torch.cat([x.double().cumsum(0) for x in twin.priorities.split(fan_out)])
    mass = torch.cat([ends, ends.nextafter(torch.zeros(())), ends.nextafter(torch.tensor(torch.inf))])
    mass = mass[(mass >= 0) & (mass < twin.total)]
    assert torch.equal(tree.find(mass).cpu(), twin.find(mass))


@pytest.mark.parametrize("draws", [120_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
def test_many_draws_between_updates_are_the_same(draws: int) -> None:
    capacity, rounds = 1 << 17, 4
    twin, tree = pair(capacity, seed=3)
    generator = torch.Generator().manual_seed(0)
    twin.set(torch.arange(capacity), uneven(capacity, generator))
    tree.load(twin.state())
    for _ in range(rounds):
        wanted, found = twin.sample(draws // rounds, 0.5), tree.sample(draws // rounds, 0.5)
        assert torch.equal(found.indices.cpu(), wanted.indices)
        error = torch.randn(draws // rounds, generator=generator)
        highest = [one.update(wanted.indices, error, 0.6, 1e-6) for one in (twin, tree)]
        assert highest[0] == pytest.approx(highest[1], rel=1e-6)


def test_a_refused_set_leaves_nothing_for_the_next() -> None:
    """The last of equal indices is elected by numbers that grow with every call, refused ones too."""
    _, tree = pair(100)
    with pytest.raises(ValueError, match="index 5 is -1"):
        tree.set(torch.tensor([3, 5, 3, 100]), torch.tensor([1.0, -1.0, 2.0, 1.0]))
    assert tree.total == 0.0
    tree.set(torch.tensor([3]), torch.tensor([4.0]))
    tree.set(torch.tensor([5, 3, 5]), torch.tensor([1.0, 0.5, 2.0]))
    assert tree.priorities[[3, 5]].tolist() == [0.5, 2.0]


def test_every_kernel_compiles_for_gpus_that_need_not_be_here(tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    program = [sys.executable, str(Path(__file__).with_name("triton_compiled.py"))]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    kernels = {line.split()[0] for line in done.stdout.splitlines()}
    assert kernels == {"_find", "_sample", "_elect", "_write", "_refresh", "_gather", "_step"}
