"""The compiled torso against its definition in float64, and against its twin in torch."""

import copy
import multiprocessing
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

from murmurate import native
from murmurate.nets import _conv_kernels
from murmurate.nets.conv import NATURE_2013, Convolution, ConvTorso, _Blocks
from nets.test_conv import ATARI, frames, made, nature_2013, nature_2015

BUILDS = ["amx", "avx512_bf16"]
HERE = _conv_kernels._kernel_names()
compiled = pytest.mark.usefixtures("compiled_for")
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


@pytest.fixture(params=BUILDS)
def compiled_for(request, monkeypatch):
    """Each of the builds that run here, in its turn."""
    if request.param not in HERE:
        pytest.skip(f"no {request.param} here, or no kernels for it: {native.simd}")
    monkeypatch.setattr(_conv_kernels, "_kernel_names", lambda: [request.param])


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


def twin(torso, observation):
    laid = torso.blocks(observation, torso.linear.weight.dtype)
    return torso._forward_in_torch(laid)


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
def test_the_kernels_run_where_they_should_and_only_there():
    x = frames(0, 3)
    torso = made(nature_2013).to(torch.bfloat16)
    assert "_Passes" in torso(x).grad_fn.name()
    for other in (
        made(nature_2013),  # float32
        made(nature_2013, channels_last=False).to(torch.bfloat16),
        made(ConvTorso, layers=(Convolution(8, 8, 4), Convolution(8, 4, 2))).to(
            torch.bfloat16
        ),  # half a tile
        made(ConvTorso, layers=(Convolution(16, 8, 4), Convolution(32, 3, 2))).to(torch.bfloat16),
    ):
        assert "_Passes" not in other(x).grad_fn.name()
    strided = made(nature_2013).to(torch.bfloat16)
    strided.linear.weight.data = strided.linear.weight.data.t().contiguous().t()
    assert "_Passes" not in strided(x).grad_fn.name()
    torch.testing.assert_close(strided(x), torso(x), rtol=0.03, atol=0.03)


@compiled
@pytest.mark.parametrize("batch", [4, 600])
def test_gradients_that_come_expanded_are_read_as_they_are(batch):
    torso, x = made(nature_2013).to(torch.bfloat16), frames(0, batch)
    torso(x).sum().backward()  # hands back a single one for all
    expanded = [p.grad.clone() for p in torso.parameters()]
    torso.zero_grad()
    out = torso(x)
    out.backward(torch.ones_like(out))
    assert all(torch.equal(a, p.grad) for a, p in zip(expanded, torso.parameters(), strict=True))


@compiled
def test_outputs_lie_where_the_net_does_whatever_the_default_device():
    torso, x = made(nature_2013).to(torch.bfloat16), frames(0, 3)
    there = torso(x)
    with torch.device("meta"):
        assert torch.equal(torso(x), there)


@compiled
def test_a_torso_that_somebody_has_changed_runs_as_its_twin():
    x, seen = frames(0, 3), []
    hooked = made(nature_2013).to(torch.bfloat16)
    handle = hooked.linear.register_forward_hook(lambda *call: seen.append(call))
    assert torch.equal(hooked(x), twin(hooked, x))
    assert len(seen) == 2
    handle.remove()
    assert "_Passes" in hooked(x).grad_fn.name()

    normed = made(nature_2013).to(torch.bfloat16)
    torch.nn.utils.parametrizations.weight_norm(normed.convolutions[1])
    assert torch.equal(normed(x), twin(normed, x))

    narrower = made(nature_2013).to(torch.bfloat16)
    narrower.linear = torch.nn.Linear(narrower.linear.in_features, 64, dtype=torch.bfloat16)
    assert narrower(x).shape == (3, 64)
    narrower.convolutions[0] = torch.nn.Conv2d(4, 16, 4, 4, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError):  # torch says what does not fit, and nothing is read that is not there
        narrower(x)

    dilated = made(nature_2015).to(torch.bfloat16)
    dilated.convolutions[2] = torch.nn.Conv2d(64, 64, 3, padding=1, dilation=2, dtype=torch.bfloat16)
    dilated.convolutions[2].to(memory_format=torch.channels_last)
    assert dilated(x).shape == (3, 512)
    assert torch.equal(dilated(x), twin(dilated, x))

    without = made(nature_2013).to(torch.bfloat16)
    without.linear.bias = None
    assert torch.equal(without(x), twin(without, x))

    for layer, name in (("linear", "weight"), ("linear", "bias"), ("convolutions.0", "weight")):
        plain = made(nature_2013).to(torch.bfloat16)
        changed = plain.get_submodule(layer)
        instead = 2 * getattr(changed, name).detach()
        delattr(changed, name)
        setattr(changed, name, instead)
        assert torch.equal(plain(x), twin(plain, x))

    stepped = made(nature_2013).to(torch.bfloat16)
    stepped.convolutions[1].stride = (1, 1)
    with pytest.raises(RuntimeError):
        stepped(x)

    wrapped = made(nature_2013).to(torch.bfloat16)
    wrapped.linear.forward = lambda features: torch.ones(3, 256, dtype=torch.bfloat16)
    assert torch.equal(wrapped(x), torch.ones(3, 256, dtype=torch.bfloat16))


@compiled
def test_saved_tensors_may_come_back_lying_otherwise():
    """As torch's own hooks that keep them elsewhere give them back."""
    torso, x = made(nature_2013).to(torch.bfloat16), frames(0, 3)
    torso(x).sum().backward()
    expected = [p.grad.clone() for p in torso.parameters()]
    torso.zero_grad()
    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        features = torso(x)
    assert "_Passes" in features.grad_fn.name()
    features.sum().backward()
    assert all(torch.equal(p.grad, e) for p, e in zip(torso.parameters(), expected, strict=True))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.float(), lambda t: t):
        features = torso(x)
    with pytest.raises(RuntimeError, match="hook on saved tensors"):
        features.sum().backward()


@pytest.mark.filterwarnings("ignore")  # torch's own, of old ways to record
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_what_torch_records_fakes_or_transforms_is_left_to_torch(kind, monkeypatch):
    """There is nothing at an address then. Against the same without kernels, and without a crash."""
    torso, x = made(nature_2013).to(kind), frames(0, 3)
    parameters = dict(torso.named_parameters())

    def loss(parameters, x):
        return torch.func.functional_call(torso, parameters, (x,)).float().square().sum()

    def all_of_it():
        gradients = torch.func.grad(loss)(parameters, x)
        each = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x[:, None])
        with forward_ad.dual_level():
            moved = {n: forward_ad.make_dual(p.detach(), torch.ones_like(p)) for n, p in parameters.items()}
            tangent = forward_ad.unpack_dual(torch.func.functional_call(torso, moved, (x,))).tangent
        recorded = make_fx(lambda x: torso(x).detach())(x)(frames(1, 3))
        with FlopCounterMode(display=False) as counter:
            torso(x)
        return [
            *gradients.values(),
            *each.values(),
            tangent,
            recorded,
            torch.tensor(counter.get_total_flops()),
        ]

    actual = all_of_it()
    monkeypatch.setattr(native, "kernels", None)
    for one, other in zip(actual, all_of_it(), strict=True):
        torch.testing.assert_close(one, other)
    monkeypatch.undo()
    with pytest.raises(RuntimeError):  # as without kernels: it views numbers as words
        torch.jit.trace(torso, (x,))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert torso(mode.from_tensor(x)).shape == (3, 256)


@pytest.mark.parametrize("which", ["off", "portable"])
def test_without_them_the_twin_runs(which, monkeypatch):
    torso, x = made(nature_2013).to(torch.bfloat16), frames(0, 3)
    if which == "off":
        monkeypatch.setattr(native, "kernels", None)
        assert torch.equal(torso(x), twin(torso, x))
        return
    if native.kernels is None:
        pytest.skip(f"no compiled kernels: {native.simd}")
    before = native.kernels.simd()
    native.kernels.use("portable")
    try:
        assert not _conv_kernels._kernel_names()
        assert torch.equal(torso(x), twin(torso, x))
    finally:
        native.kernels.use(before)


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
def test_frames_get_no_gradient_and_there_is_no_second_derivative():
    torso = made(nature_2013).to(torch.bfloat16)
    features = torso(frames(0, 2))
    (first,) = torch.autograd.grad(features.square().sum(), [torso.linear.bias], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()
    laid = torso.preprocess(frames(0, 2)).requires_grad_()  # who wants that gradient gets it from torch
    (gradient,) = torch.autograd.grad(torso(laid).sum(), [laid])
    assert gradient.abs().sum() > 0


@compiled
def test_frozen_parameters_are_left_alone():
    torso, x = made(nature_2015).to(torch.bfloat16), frames(0, 4)
    torso(x).sum().backward()
    expected = [p.grad.clone() for p in torso.parameters()]
    for frozen in range(len(expected)):
        torso.zero_grad()
        for number, p in enumerate(torso.parameters()):
            p.requires_grad_(number >= frozen)
        torso(x).sum().backward()
        for number, p in enumerate(torso.parameters()):
            assert (p.grad is None) == (number < frozen)
            assert p.grad is None or torch.equal(p.grad, expected[number])


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
