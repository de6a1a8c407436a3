"""The compiled torso against its definition in float64, and against its twin in torch."""

import copy
import multiprocessing
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F

from murmurate import native
from murmurate.nets import _conv_kernels
from murmurate.nets.conv import NATURE_2013, Convolution, ConvTorso, _Blocks
from nets.compiled_torsos import compiled, twin
from nets.test_conv import ATARI, frames, made, nature_2013, nature_2015

built = pytest.mark.skipif(native.kernels is None, reason=f"no compiled kernels: {native.simd}")

# Sums of up to 3136 products in float32, in another order, may fall to the other side of a rounding or of a
# kink. A number so wrong is off by one part in 256, or by all of its small self, and there are few of them.
TOLERANCE = 0.02

SHAPES = [
    (nature_2013, ATARI, {}),
    (nature_2015, ATARI, {}),
    # blocks of 48 and of 16 numbers; an odd number of tiles of filters; a row and a column that nobody reads
    (ConvTorso, (3, 84, 84), {"layers": NATURE_2013, "width": 64}),
    (ConvTorso, (1, 52, 76), {"layers": NATURE_2013, "width": 64}),
    (ConvTorso, (4, 64, 48), {"layers": (Convolution(48, 8, 4), Convolution(32, 4, 2)), "width": 96}),
    # one layer, whose filters have 9 blocks; three layers, the last with filters of one block
    (ConvTorso, (2, 40, 36), {"layers": (Convolution(16, 12, 4),), "width": 32}),
    (
        ConvTorso,
        (2, 60, 64),
        {"layers": (Convolution(16, 4, 4), Convolution(32, 6, 2), Convolution(32, 1, 1)), "width": 32},
    ),
]


class Rounded(torch.autograd.Function):
    """To bfloat16 and back, and the gradient as well."""

    @staticmethod
    def forward(ctx, x):
        return x.bfloat16().double()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.bfloat16().double()


def exactly(torso, observation):
    """The definition in float64, with what a layer hands to the next one rounded, in both directions."""
    x = observation.double() / 255
    for convolution in torso.convolutions:
        weight, bias = convolution.weight.double(), convolution.bias.double()
        x = Rounded.apply(F.conv2d(x, weight, bias, convolution.stride).relu())
    x = x.permute(0, 2, 3, 1).flatten(1)
    return Rounded.apply(F.linear(x, torso.linear.weight.double(), torso.linear.bias.double()).relu())


def off(mine, theirs):
    return ((mine.double() - theirs).norm() / theirs.norm()).item()


def both_passes(run, torso, x, direction):
    features = run(torso, x)
    gradients = torch.autograd.grad(features, list(torso.parameters()), direction.to(features.dtype))
    return [features.detach(), *gradients]


def direction_for(torso, batch, seed=2):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, torso.out_features, generator=generator).bfloat16()


@compiled
@pytest.mark.parametrize("batch", [1, 5, 16, 33, 80])
@pytest.mark.parametrize(("make", "shape", "options"), SHAPES)
def test_features_and_all_gradients_are_those_of_the_definition(make, shape, options, batch):
    torso = made(make, shape, **options).to(torch.bfloat16)
    x, direction = frames(1, batch, shape), direction_for(torso, batch)
    mine = both_passes(ConvTorso.forward, torso, x, direction)
    assert "_Passes" in torso(x).grad_fn.name()  # not the twin against itself
    exact = both_passes(exactly, torso, x, direction)
    torch_s = both_passes(twin, torso, x, direction)
    assert (mine[0] > 0).float().mean() > 0.1  # the comparison must not be of zeros
    for parameter, got in zip([mine[0], *torso.parameters()], mine, strict=True):
        assert got.dtype == torch.bfloat16
        assert got.shape == parameter.shape
        assert got.stride() == parameter.stride()
    for got, expected, other in zip(mine, exact, torch_s, strict=True):
        assert off(got, expected) < TOLERANCE
        # two roundings; the kernels sum biases' gradients before they are rounded, the definition behind it
        assert off(got, expected) < 1.5 * off(other, expected) + 2**-7
    with torch.no_grad():
        assert torch.equal(torso(x), mine[0])


@compiled
def test_parameters_in_a_vector_at_any_place_and_copies():
    """The vector of a replica begins where it likes: 2 bytes behind a multiple of 64, here."""
    torso = made(nature_2013).to(torch.bfloat16)
    x, direction = frames(1, 7), direction_for(torso, 7)
    expected = both_passes(ConvTorso.forward, torso, x, direction)
    moved = copy.deepcopy(torso)
    vector = torch.empty(sum(p.numel() for p in moved.parameters()) + 1, dtype=torch.bfloat16)
    place = 1
    for p in moved.parameters():
        view = vector.as_strided(p.shape, p.stride(), place)
        view.copy_(p.detach())
        p.data = view
        place += p.numel()
    for other in (moved, copy.deepcopy(moved)):
        for mine, theirs in zip(both_passes(ConvTorso.forward, other, x, direction), expected, strict=True):
            assert torch.equal(mine, theirs)


@compiled
def test_what_is_not_finite_is_not_hidden():
    torso = made(nature_2013).to(torch.bfloat16)
    with torch.no_grad():
        torso.convolutions[0].bias[3] = float("nan")
    features = torso(frames(0, 2))
    assert features.isnan().any()
    features.sum().backward()
    assert torso.convolutions[1].weight.grad.isnan().any()


@compiled
def test_nothing_is_read_behind_the_frames_or_kept_from_another_batch():
    """Batches of other sizes in between, and frames that end with a buffer, give the same numbers."""
    torso = made(nature_2013).to(torch.bfloat16)
    direction = direction_for(torso, 33)
    laid = torso.preprocess(frames(1, 33))
    expected = both_passes(ConvTorso.forward, torso, laid, direction)
    both_passes(ConvTorso.forward, torso, frames(2, 80), direction_for(torso, 80))
    window = torch.full((laid.numel() + 2 * 441 * 64,), float("nan"), dtype=torch.bfloat16)
    inside = window.as_strided(laid.shape, laid.stride(), 441 * 64)
    inside.copy_(laid)
    for got, wanted in zip(both_passes(ConvTorso.forward, torso, inside, direction), expected, strict=True):
        assert torch.equal(got, wanted)


@built
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("simd", ["portable", "avx2", "avx512"])
@pytest.mark.parametrize("shape", [ATARI, (3, 84, 84), (1, 52, 76), (5, 8, 280), (1024, 4, 8), (17, 12, 4)])
def test_blocks_are_those_of_the_twin_bit_for_bit(shape, simd, dtype):
    kernels, before = native.kernels, native.kernels.simd()
    try:
        kernels.use(simd)
    except ValueError as reason:
        pytest.skip(str(reason))
    try:
        blocks, c = _Blocks(shape, Convolution(16, 4, 4)), shape[0]
        window = frames(5, 6, (2 * c + 1, *shape[1:]))
        for x in (
            window[:, :c].contiguous(),
            window[:, c : 2 * c],
            window[::2, 1 : c + 1],
            window[:1, :c],
            window[:, :c].contiguous(memory_format=torch.channels_last),
        ):
            laid = _conv_kernels.to_blocks(x, dtype)
            expected = blocks(x, dtype)
            assert laid.dtype == dtype
            assert torch.equal(laid, expected)
            assert laid.is_contiguous(memory_format=torch.channels_last)
    finally:
        kernels.use(before)


def _passes(torso, x, direction, times=1):
    for _ in range(times):
        result = both_passes(ConvTorso.forward, torso, x, direction)
    return result


@compiled
def test_threads_side_by_side_do_not_disturb_one_another():
    """The lock is released meanwhile, and each thread has memory of its own."""
    jobs = []
    for seed, batch in enumerate((9, 40, 17)):
        torso = made(nature_2013, seed=seed).to(torch.bfloat16)
        jobs.append((torso, frames(seed, batch), direction_for(torso, batch, seed)))
    expected = [_passes(*job) for job in jobs]
    with ThreadPoolExecutor(len(jobs)) as pool:
        results = list(pool.map(lambda job: _passes(*job, times=20), jobs))
    for result, wanted in zip(results, expected, strict=True):
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(result, wanted, strict=True))


def _child(torso, x, direction, pipe):
    torch.set_num_threads(1)
    pipe.send([tensor.float().numpy() for tensor in _passes(torso, x, direction)])


@compiled
def test_a_forked_child_computes_the_same():
    """Replicas are forked from a process that has run the torso; its leave to use registers is theirs."""
    torso = made(nature_2013).to(torch.bfloat16)
    x, direction = frames(3, 5), direction_for(torso, 5)
    expected = _passes(torso, x, direction)
    ours, theirs = multiprocessing.Pipe(duplex=False)
    context = multiprocessing.get_context("fork")
    child = context.Process(target=_child, args=(torso, x, direction, theirs), daemon=True)
    child.start()
    assert ours.poll(60), "the child says nothing"
    for mine, wanted in zip(ours.recv(), expected, strict=True):
        assert torch.equal(torch.from_numpy(mine), wanted.float())
    child.join(60)
    assert child.exitcode == 0
