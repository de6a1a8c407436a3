"""A sum tree of any fan-out is a cumulative sum, in every backend and instruction set."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compiled import GPU, NO_KERNELS, needs_triton
from murmurate import native
from murmurate.replay.sum_tree import sum_tree, tree_bytes
from murmurate.replay.tree import NATIVE_FAN_OUT

SETS = ("portable", "avx2", "avx512")


def runs(simd):
    if native.kernels is None:
        return False
    before = native.kernels.simd()
    try:
        native.kernels.use(simd)
    except ValueError:
        return False
    native.kernels.use(before)
    return True


IN_TORCH = ["torch", *(["cuda"] if torch.cuda.is_available() else [])]
COMPILED = [simd for simd in SETS if runs(simd)]
BACKENDS = [*IN_TORCH, pytest.param("triton", marks=needs_triton), *COMPILED]


def make(backend, capacity, fan_out=NATIVE_FAN_OUT, seed=0):
    if backend in IN_TORCH:
        device = "cpu" if backend == "torch" else backend
        return sum_tree(capacity, fan_out=fan_out, seed=seed, backend="torch", device=device)
    if backend == "triton":
        return sum_tree(capacity, fan_out=fan_out, seed=seed, backend="triton", device=GPU)
    native.kernels.use(backend)
    return sum_tree(capacity, seed=seed, backend="native")


@pytest.fixture(autouse=True)
def best_again():
    yield
    if native.kernels is not None:
        native.kernels.use(native.simd)


class Oracle:
    """Priorities in float64, and their cumulative sum."""

    def __init__(self, capacity):
        self.p = np.zeros(capacity)

    def set(self, index, priority):
        self.p[index.numpy()] = priority.numpy()  # of equal indices the last holds

    def check(self, tree, generator):
        total = self.p.sum()
        assert np.array_equal(tree.priorities.cpu().numpy(), self.p.astype(np.float32))
        assert tree.total == pytest.approx(total, rel=1e-6)
        positive = self.p[self.p > 0]
        assert tree.minimum == (positive.min() if len(positive) else math.inf)
        if total == 0:
            with pytest.raises(ValueError, match="nothing to draw"):
                tree.find(torch.zeros(1, dtype=torch.float64))
            return
        upto = self.p.cumsum()
        mass = torch.rand(200, dtype=torch.float64, generator=generator) * tree.total
        # the ends of intervals are where mistakes are made
        mass = torch.cat([mass, torch.tensor([0.0, math.nextafter(tree.total, 0.0)], dtype=torch.float64)])
        found = tree.find(mass).cpu().numpy()
        assert (self.p[found] > 0).all(), "a priority of zero is never drawn"
        before = upto[found] - self.p[found]
        off = np.maximum(before - mass.numpy(), mass.numpy() - upto[found])
        assert off.max() <= 1e-6 * total


@st.composite
def workloads(draw):
    capacity = draw(st.integers(1, 2000))
    seed = draw(st.integers(0, 2**31))
    sizes = draw(st.lists(st.integers(1, 2 * capacity + 3), min_size=1, max_size=4))
    spread = draw(st.sampled_from([0.0, 1.0, 8.0]))  # decades between priorities
    zeros = draw(st.sampled_from([0.0, 0.5, 0.999]))
    return capacity, seed, sizes, spread, zeros


@pytest.mark.parametrize("backend", [*IN_TORCH, *COMPILED])
@settings(max_examples=40)
@given(work=workloads(), fan_out=st.integers(2, 64))
def test_it_is_a_cumulative_sum(backend, work, fan_out):
    check_cumulative_sum(backend, work, fan_out)


@needs_triton
@settings(max_examples=12)  # in the interpreter each takes as long as ten of the others
@given(work=workloads(), fan_out=st.integers(2, 64))
def test_in_triton_it_is_a_cumulative_sum(work, fan_out):
    check_cumulative_sum("triton", work, fan_out)


def check_cumulative_sum(backend, work, fan_out):
    capacity, seed, sizes, spread, zeros = work
    generator = torch.Generator().manual_seed(seed)
    tree, oracle = make(backend, capacity, fan_out), Oracle(capacity)
    oracle.check(tree, generator)
    for size in sizes:
        index = torch.randint(capacity, (size,), generator=generator)
        priority = 10 ** (-spread * torch.rand(size, generator=generator))
        priority[torch.rand(size, generator=generator) < zeros] = 0.0
        tree.set(index, priority)
        oracle.set(index, priority)
        oracle.check(tree, generator)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("stratified", [False, True])
def test_it_draws_in_proportion(backend, stratified):
    """Chi-square over 1500 leaves of 200 draws each on average; 5 standard deviations of it."""
    capacity, draws = 1500, 300_000
    tree = make(backend, capacity, seed=3)
    generator = torch.Generator().manual_seed(1)
    priority = (torch.rand(capacity, generator=generator) + 0.001) ** 0.6
    priority[::7] = 0.0
    tree.set(torch.arange(capacity), priority)
    counts = torch.zeros(capacity, dtype=torch.int64)
    for _ in range(6):
        index, weight = (x.cpu() for x in tree.sample(draws // 6, 0.4, stratified=stratified))
        counts += torch.bincount(index, minlength=capacity)
        wanted = (priority[index] / priority[priority > 0].min()) ** -0.4
        torch.testing.assert_close(weight, wanted, rtol=1e-5, atol=0)
    kept = priority > 0
    assert int(counts[~kept].sum()) == 0
    expected = draws * priority[kept].double() / priority[kept].double().sum()
    chi = float(((counts[kept] - expected) ** 2 / expected).sum())
    freedom = int(kept.sum()) - 1
    assert chi < freedom + 5 * math.sqrt(2 * freedom)
    assert stratified or chi > freedom - 5 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("backend", BACKENDS)
def test_sums_do_not_drift(backend):
    """Priorities that decay by four decades: what was large once leaves no trace."""
    capacity, steps = 4096, 60 if backend == "triton" else 150
    tree = make(backend, capacity)
    generator = torch.Generator().manual_seed(2)
    for step in range(steps):
        index = torch.randint(capacity, (512,), generator=generator)
        tree.set(index, torch.rand(512, generator=generator) * 10 ** (-4 * step / steps))
    exact = float(tree.priorities.double().sum())
    assert tree.total == pytest.approx(exact, rel=1e-6)


@pytest.mark.skipif(len([*IN_TORCH, *COMPILED]) < 2, reason=NO_KERNELS)
def test_all_draw_the_same():
    """One seed, one stream of random numbers: backends differ only where a sum is rounded otherwise."""
    capacity = 2000
    priority = torch.rand(capacity, generator=torch.Generator().manual_seed(4))
    drawn = []
    for backend in [*IN_TORCH, *COMPILED]:
        tree = make(backend, capacity, seed=-5)
        tree.set(torch.arange(capacity), priority)
        drawn.append(torch.cat([tree.sample(n, 0.5)[0].cpu() for n in (1, 63, 64, 65, 1500)]))
    for other in drawn[1:]:
        assert float((other != drawn[0]).double().mean()) < 1e-3


@pytest.mark.skipif(len(COMPILED) < 2, reason="there are no two instruction sets here")
@pytest.mark.parametrize("capacity", [5, 16, 200, 257, 5_000, 70_000])
@pytest.mark.parametrize("zeros", [0.0, 0.9])
def test_instruction_sets_find_the_same_to_the_bit(capacity, zeros):
    """At random masses, and at the ends of intervals and their neighbours."""
    generator = torch.Generator().manual_seed(capacity)
    priority = torch.rand(capacity, generator=generator) + 1e-3
    priority[torch.rand(capacity, generator=generator) < zeros] = 0.0
    priority[0] = 1.0
    found = []
    for backend in COMPILED:
        tree = make(backend, capacity, seed=7)
        tree.set(torch.arange(capacity), priority)
        ends = priority.double().cumsum(0)
        mass = torch.cat([torch.rand(500, dtype=torch.float64, generator=generator) * tree.total, ends])
        mass = torch.cat([mass, ends.nextafter(torch.zeros(())), ends.nextafter(torch.tensor(torch.inf))])
        mass = mass[mass < tree.total] if not found else found[0][0]
        found.append((mass, tree.find(mass), *tree.sample(1_000, 0.4)))
    for other in found[1:]:
        for one, same in zip(found[0], other, strict=True):
            assert torch.equal(one, same)


@pytest.mark.parametrize("backend", COMPILED)
@pytest.mark.parametrize("zeros", [0.0, 0.9])
def test_where_leaves_lie_far_off_many_searches_find_what_few_do(backend, zeros):
    """From so many leaves on, groups of queries follow one another through the levels."""
    capacity = 2**22 + 5
    generator = torch.Generator().manual_seed(1)
    priority = torch.rand(capacity, generator=generator)
    priority[torch.rand(capacity, generator=generator) < zeros] = 0.0
    tree = make(backend, capacity)
    tree.set(torch.arange(capacity), priority)
    mass = torch.rand(3 * 256 + 70, dtype=torch.float64, generator=generator) * tree.total
    mass[:2] = torch.tensor([0.0, math.nextafter(tree.total, 0.0)], dtype=torch.float64)
    found = tree.find(mass)
    assert torch.equal(found, torch.cat([tree.find(some) for some in mass.split(50)]))
    upto = priority.double().cumsum(0)
    assert (priority[found] > 0).all()
    off = torch.maximum(upto[found] - priority[found] - mass, mass - upto[found])
    assert off.max() <= 1e-6 * tree.total


@pytest.mark.parametrize("backend", BACKENDS)
def test_it_goes_on_from_its_state(backend):
    first, second = make(backend, 1000, seed=1), make(backend, 1000, seed=9)
    first.set(torch.arange(1000), torch.rand(1000))
    first.sample(10, 0.4)
    second.load(first.state())
    for one, other in zip(first.sample(500, 0.7), second.sample(500, 0.7), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mass", [-1e-9, 10.0, math.inf, math.nan])
def test_a_mass_outside_the_tree_is_refused(backend, mass):
    tree = make(backend, 100)
    tree.set(torch.arange(10), torch.ones(10))
    with pytest.raises(ValueError, match="between 0 and the total, 10"):
        tree.find(torch.tensor([0.5, mass], dtype=torch.float64))


@pytest.mark.parametrize("backend", COMPILED)
def test_what_vanishes_between_a_search_and_a_look_weighs_no_more_than_the_least(backend):
    """Leaves that another process has set to 0, whose sums it has not reached yet."""
    tree = make(backend, 64)
    tree.set(torch.arange(64), torch.linspace(1.0, 4.0, 64))
    tree.priorities[16:32] = 0.0
    drawn = tree.sample(2000, 0.4)
    vanished = tree.priorities[drawn.indices] == 0
    assert vanished.any()
    assert drawn.weights[vanished].eq(1.0).all()
    assert drawn.weights.max() <= 1.0


@pytest.mark.skipif(native.kernels is None, reason=NO_KERNELS)
def test_no_tree_without_leaves_and_no_draw_from_a_sum_that_is_no_number():
    with pytest.raises(ValueError, match="at least one leaf"):
        tree_bytes(0)
    tree = sum_tree(10)
    tree.set(torch.tensor([1, 2]), torch.full((2,), 3e38))
    with pytest.raises(ValueError, match="their sum is not finite"):
        tree.sample(4, 0.4)
