"""Refusals of the sum tree, its memory, and the choice of the backend."""

from __future__ import annotations

import mmap
import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from compiled import GPU, NO_KERNELS, needs_triton
from murmurate import native
from murmurate.errors import Refusal
from murmurate.native import gpu
from murmurate.replay.sum_tree import sum_tree, tree_bytes
from murmurate.replay.tree import Draw, SumTree

BACKENDS = [
    *(["torch", "native"] if native.kernels is not None else ["torch"]),
    pytest.param("triton", marks=needs_triton),
]
needs_native = pytest.mark.skipif(native.kernels is None, reason=NO_KERNELS)


def tree_of(capacity: int, backend: str) -> SumTree:
    return sum_tree(capacity, backend=backend, device=GPU if backend == "triton" else "cpu")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("index", "priority", "words"),
    [
        ([0, 3, 4], [1.0, -2.5, 1.0], "index 3 is -2.5"),
        ([0, 1], [1.0, float("nan")], "index 1 is nan"),
        ([2, 1], [float("inf"), 1.0], "index 2 is inf"),
        ([0, 10], [1.0, 1.0], "no index 10 in a tree of 10"),
        ([-1], [1.0], "no index -1"),
        ([0, 1], [1.0], "give one for each"),
    ],
)
def test_what_makes_no_sense_changes_nothing(backend, index, priority, words):
    tree = tree_of(10, backend)
    tree.set(torch.tensor([0, 5]), torch.tensor([0.5, 0.25]))
    with pytest.raises(ValueError, match=words):
        tree.set(torch.tensor(index), torch.tensor(priority))
    assert tree.priorities.tolist() == [0.5, 0, 0, 0, 0, 0.25, 0, 0, 0, 0]
    assert tree.total == 0.75


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_last_of_equal_indices_wins(backend):
    tree = tree_of(40, backend)
    tree.set(torch.tensor([7, 3, 7, 7, 3]), torch.tensor([1.0, 2.0, 3.0, 4.0, 0.0]))
    assert tree.priorities.nonzero().tolist() == [[7]]
    assert tree.total == 4.0
    assert tree.minimum == 4.0


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_error_becomes_a_priority(backend):
    tree = tree_of(8, backend)
    error = torch.tensor([-2.0, 0.0, 0.5, 1e-30, 3e4])
    tree.update(torch.arange(5), error, 0.6, 1e-3)
    torch.testing.assert_close(tree.priorities[:5].cpu(), (error.abs() + 1e-3) ** 0.6, rtol=2e-6, atol=0)
    tree.update(torch.arange(2), torch.tensor([0.0, 3.0]), 0.0, 0.0)
    assert tree.priorities[:2].tolist() == [1.0, 1.0], "an alpha of 0 is uniform"
    tree.update(torch.arange(5), error, 0.6, 0.0)
    assert tree.priorities[1] == 0.0
    with pytest.raises(ValueError, match="index 1 is nan"):
        tree.update(torch.arange(2), torch.tensor([1.0, float("nan")]), 0.6, 0.0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("wrong", [float("nan"), float("-inf")])
def test_an_error_that_is_not_finite_is_refused_whatever_its_power_is(backend, wrong):
    tree = tree_of(8, backend)
    with pytest.raises(ValueError, match=f"priority of index 1 is {abs(wrong)}: priorities are finite"):
        tree.update(torch.arange(2), torch.tensor([1.0, wrong]), 0.0, 0.0)
    assert tree.total == 0.0


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_a_graph_computed_is_set_without_one(backend):
    tree, error = tree_of(8, backend), torch.tensor([-2.0, 0.5], requires_grad=True)
    tree.update(torch.arange(2), error, 1.0, 0.0)
    tree.set(torch.tensor([2]), error[1:] * 2)
    assert tree.priorities[:3].tolist() == [2.0, 0.5, 1.0]
    assert not tree.priorities.requires_grad
    assert not tree.sample(4, 0.4).weights.requires_grad


@pytest.mark.parametrize("backend", BACKENDS)
def test_draws_do_not_depend_on_torchs_default_device(backend):
    priority, mass = torch.linspace(0, 1, 300), torch.linspace(0, 9, 32, dtype=torch.float64)
    index = torch.arange(300)

    def drawn():
        tree = tree_of(300, backend)
        tree.set(index, priority)
        again = tree_of(300, backend)
        again.load(tree.state())
        return [again.find(mass), *again.sample(64, 0.4), *again.sample(64, 0.4, stratified=True)]

    expected = drawn()
    with torch.device("meta"):
        result = drawn()
    assert all(torch.equal(x, y) for x, y in zip(result, expected, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_draws_into_tensors_that_are_there(backend):
    tree = tree_of(100, backend)
    tree.set(torch.arange(100), torch.ones(100))
    device = tree.priorities.device
    out = Draw(torch.full((64,), -1, device=device), torch.zeros(64, device=device))
    assert tree.sample(64, 0.4, out=out) is out
    assert bool(((out.indices >= 0) & (out.indices < 100)).all())
    assert out.weights.tolist() == [1.0] * 64


class Opaque(torch.Tensor):
    """Tells nobody's C code what it is."""

    __dlpack_c_exchange_api__ = None


FORMS = {
    "as it is": lambda x: x,
    "every second": lambda x: x.repeat_interleave(2)[::2],
    "narrow": lambda x: x.to(torch.float64 if x.is_floating_point() else torch.int32),
    "opaque": lambda x: x.as_subclass(Opaque),
    "a parameter": lambda x: torch.nn.Parameter(x, requires_grad=False),
}


@needs_native
@pytest.mark.parametrize("first", FORMS)
@pytest.mark.parametrize("second", FORMS)
def test_however_a_tensor_lies_its_numbers_are_what_counts(first, second):
    generator = torch.Generator().manual_seed(0)
    index, error = torch.randperm(300, generator=generator)[:64], torch.rand(64, generator=generator)
    plain, other = sum_tree(300), sum_tree(300)
    one, two = FORMS[first], FORMS[second]
    for tree, i, e in ((plain, index, error), (other, one(index), two(error))):
        tree.update(i, e, 0.5, 0.1)
        tree.set(i[:5], e[5:10])
    assert torch.equal(plain.priorities, other.priorities)
    mass = torch.linspace(0, 1, 33, dtype=torch.float64)[:-1] * plain.total
    result = other.find(one(mass) if first != "narrow" else mass, torch.empty(32, dtype=torch.int64))
    assert torch.equal(result, plain.find(mass))
    with pytest.raises(ValueError, match="give one for each"):
        other.set(one(index), two(error[:5]))


@needs_native
@pytest.mark.parametrize(
    ("indices", "weights", "words"),
    [
        (
            torch.zeros(7, dtype=torch.int64),
            torch.zeros(8),
            r"torch.int64 \[8\] on the CPU, but this is .*\[7\]",
        ),
        (torch.zeros(8, dtype=torch.int64), torch.zeros(7), r"torch.float32 \[8\]"),
        (torch.zeros(8, dtype=torch.int32), torch.zeros(8), "this is torch.int32"),
        (torch.zeros(16, dtype=torch.int64)[::2], torch.zeros(8), "contiguous"),
    ],
)
def test_outputs_that_do_not_fit_are_refused(indices, weights, words):
    tree = sum_tree(100)
    tree.set(torch.arange(100), torch.ones(100))
    with pytest.raises(ValueError, match=words):
        tree.sample(8, 0.4, out=Draw(indices, weights))
    if len(weights) == 8:
        with pytest.raises(ValueError, match=words):
            tree.find(torch.zeros(8, dtype=torch.float64), indices)


@pytest.mark.parametrize("backend", BACKENDS)
def test_indices_of_the_wrong_kind_are_refused(backend):
    tree = tree_of(10, backend)
    with pytest.raises(TypeError, match=r"expected a tensor of torch\.int64, this is torch\.float32"):
        tree.set(torch.tensor([0.5]), torch.tensor([1.0]))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
def test_indices_of_any_integer_dtype_are_indices(backend, dtype):
    tree = tree_of(16, backend)
    tree.set(torch.tensor([1, 0] * 8, dtype=dtype), torch.arange(16.0))  # as many as the tree has leaves
    assert tree.priorities.nonzero()[:, 0].tolist() == [0, 1]
    assert tree.priorities[:2].tolist() == [15.0, 14.0]


@needs_native
def test_a_tree_in_shared_memory_is_seen_by_who_comes_later():
    size = -(-tree_bytes(5000) // mmap.PAGESIZE) * mmap.PAGESIZE
    descriptor = os.memfd_create("tree")
    os.ftruncate(descriptor, size)
    one, other = (memoryview(mmap.mmap(descriptor, size)) for _ in range(2))
    writer = sum_tree(5000, memory=one)
    writer.set(torch.arange(5000), torch.rand(5000))
    reader = sum_tree(5000, memory=other)
    assert reader.total == writer.total
    assert reader.minimum == writer.minimum
    writer.set(torch.tensor([17]), torch.tensor([1e6]))
    assert torch.equal(reader.priorities, writer.priorities)
    assert (reader.sample(1000, 0.4).indices == 17).double().mean() > 0.9
    os.close(descriptor)


@needs_native
def test_a_compiled_tree_has_at_most_as_many_leaves_as_its_levels_hold():
    assert tree_bytes(16**8) > 4 * 16**8
    for capacity in (16**8 + 1, 16**9 + 1, 2**63 - 1):
        with pytest.raises(ValueError, match=f"at most 4294967296 leaves, not {capacity}: use"):
            tree_bytes(capacity)
        with pytest.raises(ValueError, match="at most 4294967296 leaves"):
            sum_tree(capacity)


@needs_native
def test_trees_work_side_by_side_in_threads():
    trees = [sum_tree(1 << 14, seed=k) for k in range(4)]

    def work(tree):
        for step in range(200):
            tree.set(torch.randint(1 << 14, (256,)), torch.rand(256))
            tree.sample(256, 0.4)
            assert tree.total > 0, step

    with ThreadPoolExecutor(len(trees)) as threads:
        list(threads.map(work, trees))  # raises what one of them raised
    for tree in trees:
        assert tree.total == pytest.approx(float(tree.priorities.double().sum()), rel=1e-6)


def test_a_device_without_float64_is_refused():
    with pytest.raises(Refusal, match=r"which mps devices lack. Use device='cpu'"):
        sum_tree(10, device="mps")


def test_the_fastest_that_can_do_it_is_taken():
    assert sum_tree(10, fan_out=7).backend == "torch"
    assert sum_tree(10).backend == ("torch" if native.kernels is None else "native")
    with pytest.raises(Refusal, match="fan-out of 16, not 8" if native.kernels else "do not run"):
        sum_tree(10, fan_out=8, backend="native")
    with pytest.raises(Refusal, match="only the native sum tree takes memory"):
        sum_tree(10, backend="torch", memory=memoryview(bytearray(4096)))
    for wrong in ({"capacity": 0}, {"capacity": 5, "fan_out": 1}):
        with pytest.raises(ValueError, match="at least"):
            sum_tree(**wrong)


def test_a_tree_in_triton_that_cannot_run_says_why(monkeypatch):
    with pytest.raises(Refusal, match="fan-out of at most 64, not 65"):
        sum_tree(10, fan_out=65, backend="triton")
    monkeypatch.setattr(gpu, "interpreted", lambda: False)
    monkeypatch.setattr(gpu, "installed", lambda: True)
    with pytest.raises(Refusal, match="on a CPU its interpreter does, with TRITON_INTERPRET=1"):
        sum_tree(10, backend="triton")
    monkeypatch.setattr(gpu, "installed", lambda: False)
    with pytest.raises(Refusal, match=r"pip install 'murmurate\[gpu\]'"):
        sum_tree(10, backend="triton")


def test_a_wrong_choice_by_hand_is_told(monkeypatch):
    monkeypatch.setenv("MURMURATE_NATIVE", "avx1024")
    with pytest.raises(Refusal, match=r"does not run on this machine\. Use off, portable, avx2 or avx512,"):
        native._load()
    monkeypatch.setenv("MURMURATE_NATIVE", "off")
    assert native._load() == (None, "switched off by MURMURATE_NATIVE")
