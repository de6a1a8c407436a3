"""The compiled torso among torch's other parts: where its kernels run, and where torch takes over."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

from murmurate import native
from murmurate.nets import _conv_kernels
from murmurate.nets.conv import Convolution, ConvTorso
from nets.compiled_torsos import compiled, twin
from nets.test_conv import frames, made, nature_2013, nature_2015


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
