"""Batch normalisation: the kernels, their twin in torch, and torch's own layers agree; ghost batches are
batches, and replicas' batches one batch."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
import torch
from torch import Tensor, nn

from compiled import NO_KERNELS
from murmurate import native
from murmurate.nets import _normalize_kernels as kernels
from murmurate.nets.batch_norm import BatchNorm

needs_compiled = pytest.mark.skipif(native.kernels is None, reason=NO_KERNELS)
SHAPES = [(8, 16, 5, 7), (3, 37, 4, 4), (2, 130, 1, 3), (64, 64, 8, 8)]


def layer(channels: int, seed: int = 0, **options: object) -> BatchNorm:
    made = BatchNorm(channels, **options)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        made.weight.uniform_(0.5, 2, generator=generator)
        made.bias.uniform_(-1, 1, generator=generator)
    return made


def drawn(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 2 + 3
    return x.to(dtype).contiguous(memory_format=torch.channels_last)


def passes(norm: BatchNorm, x: Tensor, residual: Tensor | None, rectify: bool) -> list[Tensor]:
    """y, the gradients of a drawn weighting of it, and the running statistics."""
    leaves = [x.clone().requires_grad_()]
    if residual is not None:
        leaves.append(residual.clone().requires_grad_())
    y = norm(leaves[0], leaves[1] if residual is not None else None, rectify)
    given = drawn(tuple(y.shape), 9).to(y.dtype) - 3
    gradients = torch.autograd.grad(y, [*leaves, norm.weight, norm.bias], given)
    return [y.detach(), *gradients, norm.running_mean.clone(), norm.running_var.clone()]


@needs_compiled
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("dtype", "residual", "rectify", "ghost"),
    [
        (torch.float32, True, True, 0),
        (torch.float32, False, True, 2),
        (torch.float32, True, False, 0),
        # torch rounds the whole batch's once more, so that rectifiers may change sides
        (torch.bfloat16, True, True, 2),
        (torch.bfloat16, False, False, 0),
    ],
)
def test_the_kernels_compute_what_their_twin_does(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    residual: bool,
    rectify: bool,
    ghost: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x, other = drawn(shape, 1, dtype), drawn(shape, 2, dtype) if residual else None
    assert kernels.can_process(x, other)
    compiled = passes(layer(shape[1], ghost=ghost), x, other, rectify)
    monkeypatch.setattr(kernels, "can_process", lambda x, residual: False)
    twin = passes(layer(shape[1], ghost=ghost), x, other, rectify)
    for ours, theirs in zip(compiled, twin, strict=True):
        # a rounding of bfloat16 apart at most, and sums over all pixels in another order
        bound = 2**-7 if ours.dtype == torch.bfloat16 else 2e-5
        assert (ours - theirs).abs().max() <= bound * (1 + theirs.abs().max())


@pytest.mark.parametrize("compiled", [pytest.param(True, marks=needs_compiled), False])
def test_it_is_torchs_layer_with_an_addition_and_a_rectifier(
    compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compiled:
        monkeypatch.setattr(kernels, "can_process", lambda x, residual: False)
    norm = layer(24)
    oracle = nn.BatchNorm2d(24)
    oracle.load_state_dict(norm.state_dict(), strict=False)
    x, residual = drawn((6, 24, 5, 3), 1), drawn((6, 24, 5, 3), 2)
    ours = passes(norm, x, residual, True)
    leaves = [x.clone().requires_grad_(), residual.clone().requires_grad_()]
    y = torch.relu(oracle(leaves[0]) + leaves[1])
    theirs = [y, *torch.autograd.grad(y, [*leaves, oracle.weight, oracle.bias], drawn((6, 24, 5, 3), 9) - 3)]
    for a, b in zip(ours, [*theirs, oracle.running_mean, oracle.running_var], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    norm.eval(), oracle.eval()
    with torch.no_grad():
        torch.testing.assert_close(norm(x, residual, True), torch.relu(oracle(x) + residual))


def test_gradients_are_those_of_finite_differences() -> None:
    norm = layer(3).double()
    x, residual = (drawn((2, 3, 2, 2), seed).double().requires_grad_() for seed in (1, 2))
    assert torch.autograd.gradcheck(lambda x, r: norm(x, r, True), (x, residual))


@pytest.mark.parametrize("compiled", [pytest.param(True, marks=needs_compiled), False])
def test_ghost_batches_are_normalised_by_themselves(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not compiled:
        monkeypatch.setattr(kernels, "can_process", lambda x, residual: False)
    x = drawn((7, 8, 3, 3), 1)
    ghost, whole = layer(8, ghost=3), layer(8)
    parts = torch.cat([whole(part) for part in x.split(3)])
    torch.testing.assert_close(ghost(x), parts)


@pytest.mark.parametrize("compiled", [pytest.param(True, marks=needs_compiled), False])
def test_statistics_over_replicas_make_their_batches_one(
    compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compiled:
        monkeypatch.setattr(kernels, "can_process", lambda x, residual: False)
    x, given = drawn((9, 5, 4, 4), 1), drawn((9, 5, 4, 4), 2) - 3
    whole = layer(5)
    leaf = x.clone().requires_grad_()
    y = whole(leaf, rectify=True)
    expected = torch.autograd.grad(y, [leaf, whole.weight, whole.bias], given)
    meeting = Meeting(2)
    norms = [layer(5, sum_over=meeting.sum) for _ in range(2)]
    leaves = [part.clone().requires_grad_() for part in x.split([4, 5])]
    results: list[list[Tensor]] = [[], []]

    def replica(rank: int) -> None:
        out = norms[rank](leaves[rank], rectify=True)
        wanted = [leaves[rank], norms[rank].weight, norms[rank].bias]
        results[rank] = [out.detach(), *torch.autograd.grad(out, wanted, given.split([4, 5])[rank])]

    threads = [threading.Thread(target=replica, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    first, second = results
    torch.testing.assert_close(torch.cat([first[0], second[0]]), y.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.cat([first[1], second[1]]), expected[0], rtol=1e-4, atol=1e-5)
    for k in (2, 3):  # all-reduce adds the replicas' gradients of parameters
        torch.testing.assert_close(first[k] + second[k], expected[k - 1], rtol=1e-4, atol=1e-4)
    for norm in norms:
        torch.testing.assert_close(norm.running_var, whole.running_var)


@needs_compiled
def test_results_do_not_depend_on_the_number_of_threads() -> None:
    x = drawn((64, 16, 9, 9), 1)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = passes(layer(16), x, None, True)
        torch.set_num_threads(3)
        three = passes(layer(16), x, None, True)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(one, three, strict=True))


@needs_compiled
def test_what_is_not_a_number_is_passed_on() -> None:
    x = drawn((2, 16, 3, 3), 1)
    x[0, 3, 1, 1] = float("nan")
    y = layer(16)(x, rectify=True)
    assert y[:, 3].isnan().all()
    assert not y[:, :3].isnan().any()


@pytest.mark.parametrize(("shape", "ghost"), [((1, 4, 1, 1), 0), ((3, 4, 1, 1), 2)])
def test_one_value_a_channel_is_refused(shape: tuple[int, ...], ghost: int) -> None:
    with pytest.raises(ValueError, match="larger batches"):
        BatchNorm(4, ghost=ghost)(torch.ones(shape))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_value_a_channel_over_all_replicas_is_refused(dtype: torch.dtype) -> None:
    norm = BatchNorm(4, sum_over=lambda x: x).to(dtype)
    with pytest.raises(ValueError, match="larger batches"):
        norm(torch.ones(1, 4, 1, 1, dtype=dtype))
    assert norm.running_var.tolist() == [1.0] * 4


class Meeting:
    """Sums over threads, as a group of replicas does: differentiable, and its backward pass is a sum, too."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.values: list[Tensor] = []
        self.lock = threading.Lock()

    def total(self, x: Tensor) -> Tensor:
        with self.lock:
            self.values.append(x)
        self.barrier.wait(20)
        found = torch.stack(self.values).sum(0)
        if self.barrier.wait(20) == 0:
            self.values = []
        self.barrier.wait(20)
        return found

    def sum(self, x: Tensor) -> Tensor:
        return _Sum.apply(self, x)  # type: ignore[no-any-return, no-untyped-call]


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, meeting: Meeting, x: Tensor) -> Tensor:  # type: ignore[no-untyped-def, override]
        ctx.meeting = meeting
        return meeting.total(x)

    @staticmethod
    def backward(ctx, gradient: Tensor):  # type: ignore[no-untyped-def, override]
        return None, ctx.meeting.total(gradient)


def test_a_hook_that_lays_saved_tensors_out_anew_changes_no_gradient() -> None:
    generator = torch.Generator().manual_seed(0)
    x, gradient = (torch.randn(2, 3, 4, 4, generator=generator) for _ in range(2))
    x = x.contiguous(memory_format=torch.channels_last).requires_grad_()
    found = []
    for pack in (lambda saved: saved, lambda saved: saved.contiguous()):
        norm = BatchNorm(3)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
            y = norm(x, rectify=True)
        found.append(torch.autograd.grad(y, [x, norm.weight, norm.bias], gradient))
    torch.testing.assert_close(found[0], found[1])


def test_in_evaluation_a_bias_alone_has_a_gradient_in_every_layout() -> None:
    norm = BatchNorm(3).eval()
    norm.weight.requires_grad_(False)
    x = torch.ones(2, 3, 4, 4)
    for each in (x, x.contiguous(memory_format=torch.channels_last)):
        assert norm(each).requires_grad
    norm.bias.requires_grad_(False)
    assert not norm(x).requires_grad


def test_statistics_are_where_the_images_are_whatever_torch_s_default_device_is() -> None:
    x = torch.randn(4, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    norm, expected = BatchNorm(3), BatchNorm(3)(x)
    with torch.device("meta"):
        found = norm(x)
    torch.testing.assert_close(found, expected)


_WITHOUT_MEMORY = """
import resource
import torch
from murmurate.nets.batch_norm import BatchNorm

norm = BatchNorm(1 << 16)  # the kernel's own sums take 16 MiB
x = torch.ones(2, 1 << 16, 1, 2).contiguous(memory_format=torch.channels_last)
norm(x)
pages = int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (4 << 20),) * 2)
filling = []
try:
    while True:
        filling.append(bytearray(4 << 20))
except MemoryError:
    filling.pop()  # room for tensors
try:
    norm(x)
except MemoryError:
    print("refused")
"""


@needs_compiled
@pytest.mark.skipif(sys.platform != "linux", reason="the limit is one of Linux")
def test_kernels_that_get_no_memory_raise_and_do_not_end_the_process() -> None:
    done = subprocess.run([sys.executable, "-c", _WITHOUT_MEMORY], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "refused\n"), done.stderr
