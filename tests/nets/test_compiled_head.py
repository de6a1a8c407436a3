"""The compiled torso with a linear layer after it, and with given tensors as targets of gradients."""

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from covering import pairwise
from murmurate.nets.conv import ConvTorso, nature_2013, nature_2015
from murmurate.nets.q_network import q_network
from murmurate.replica import gradients
from murmurate.replica.gradients import GradientTargets
from murmurate.replica.vector import Replica
from murmurate.spec import EnvSpec
from nets.test_conv import frames, made
from nets.test_conv_kernels import compiled, compiled_for, off

__all__ = ["compiled_for"]  # a fixture

FRAMES = EnvSpec("frames", (4, 84, 84), torch.uint8, 6)


def headed(make=nature_2013, outputs=6, seed=0):
    """A torso in bfloat16, and a linear layer on it."""
    torso = made(make, seed=seed).to(torch.bfloat16)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return torso, nn.Linear(torso.out_features, outputs)


def apart(torso, head, x):
    """The layer as torch computes it, on the kernels' features."""
    return head(torso(x).float())


def slopes(batch, outputs):
    return torch.randn(batch, outputs, generator=torch.Generator().manual_seed(7))


def gradients_of(out, slope, *modules):
    parameters = [p for module in modules for p in module.parameters()]
    return torch.autograd.grad(out, parameters, slope, allow_unused=True)


@compiled
@pytest.mark.parametrize(
    ("make", "batch", "outputs"), pairwise([nature_2013, nature_2015], [1, 5, 32, 33], [1, 6, 18])
)
def test_the_layer_behind_is_torchs(make, batch, outputs):
    torso, head = headed(make, outputs)
    x, slope = frames(0, batch), slopes(batch, outputs)
    one, other = torso.headed(x, head), apart(torso, head, x)
    assert "_Passes" in one.grad_fn.name()
    assert "Addmm" in other.grad_fn.name()
    assert one.dtype == torch.float32
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        assert torch.equal(torso.headed(x, head), one)
    mine, theirs = gradients_of(one, slope, torso, head), gradients_of(other, slope, torso, head)
    for got, expected, p in zip(mine, theirs, [*torso.parameters(), *head.parameters()], strict=True):
        assert got.dtype == p.dtype
        assert got.stride() == p.stride()
        assert off(got, expected.double()) < (1e-5 if p.dtype == torch.float32 else 2**-8)


def a_net():
    net = q_network(FRAMES, generator=torch.Generator().manual_seed(0))
    net.torso.to(torch.bfloat16)
    return net


@compiled
def test_a_layer_or_torso_that_somebody_has_changed_is_called():
    net, x, seen = a_net(), frames(0, 3), []
    expected = net(x)
    assert "_Passes" in expected.grad_fn.name()
    for module, shape in ((net.head, (3, 6)), (net.torso, (3, 256))):
        handle = module.register_forward_hook(lambda module, given, out: seen.append(out.shape))
        torch.testing.assert_close(net(x), expected)
        assert seen.pop() == shape
        handle.remove()
    handle = net.torso.register_forward_pre_hook(lambda module, given: (given[0].flip(3),))
    torch.testing.assert_close(net(x), net.head(net.torso(x).float()))
    handle.remove()
    assert "_Passes" in net(x).grad_fn.name()
    net.torso.linear = nn.Linear(net.torso.linear.in_features, 64, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="shapes"):  # torch's own
        net(x)


def test_where_there_are_no_kernels_frames_are_laid_once(monkeypatch):
    net = q_network(FRAMES, generator=torch.Generator().manual_seed(0))  # float32
    times, lay = [], ConvTorso.preprocess
    monkeypatch.setattr(ConvTorso, "preprocess", lambda self, x: times.append(len(x)) or lay(self, x))
    net(frames(0, 3))
    assert times == [3]


class Wider(ConvTorso):
    def forward(self, observation):
        return 2 * super().forward(observation)


@compiled
def test_a_torso_of_ones_own_is_called():
    net, x = a_net(), frames(0, 3)
    before = net(x)
    net.torso.__class__ = Wider
    torch.testing.assert_close(net(x) - net.head.bias, 2 * (before - net.head.bias), rtol=1e-5, atol=1e-5)


@compiled
def test_heads_of_other_kinds_are_none_of_the_kernels():
    torso, _ = headed()
    wrapped, crosswise = nn.Linear(256, 6), nn.Linear(256, 6)
    wrapped.forward = lambda features: features[:, :6] * 2
    crosswise.weight.data = crosswise.weight.data.t().contiguous().t()
    others = [
        nn.Linear(256, 6, bias=False),
        nn.Sequential(nn.Linear(256, 6)),
        nn.Linear(256, 6, dtype=torch.float64),
        nn.Linear(256, 6, dtype=torch.bfloat16),
        nn.Linear(128, 6),
        torch.nn.utils.parametrizations.weight_norm(nn.Linear(256, 6)),
        wrapped,
        crosswise,
    ]
    for other in others:
        assert torso.headed(frames(0, 3), other) is None


@compiled
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float64])
def test_a_hook_on_saved_tensors_may_not_change_the_heads_kind(kind):
    torso, head = headed()
    x = frames(0, 3)
    change = torch.float32
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: t.to(kind) if t.dtype == change else t, lambda t: t
    ):
        values = torso.headed(x, head)
    with pytest.raises(RuntimeError, match="hook on saved tensors"):
        values.sum().backward()


@compiled
@pytest.mark.parametrize("frozen", ["torso", "all but fully connected", "first", "head"])
def test_frozen_parts_are_left_alone(frozen):
    torso, head = headed()
    x, slope = frames(0, 4), slopes(4, 6)
    named = {f"torso.{n}": p for n, p in torso.named_parameters()} | {
        f"head.{n}": p for n, p in head.named_parameters()
    }
    expected = dict(zip(named, gradients_of(torso.headed(x, head), slope, torso, head), strict=True))
    still = {
        "torso": lambda n: n.startswith("torso"),
        "all but fully connected": lambda n: "linear" not in n,
        "first": lambda n: "convolutions.0" in n,
        "head": lambda n: n.startswith("head"),
    }[frozen]
    for name, p in named.items():
        p.requires_grad_(not still(name))
    torso.headed(x, head).backward(slope)
    for name, p in named.items():
        assert (p.grad is None) == still(name)
        assert p.grad is None or torch.equal(p.grad, expected[name])


def places_for(parameters):
    return {id(p): torch.full_like(p, float("nan"), dtype=torch.float32) for p in parameters}


@compiled
@pytest.mark.parametrize("batch", [1, 32, 33])
def test_gradients_are_written_where_they_are_wanted_before_they_are_rounded(batch):
    torso, head = headed()
    parameters = [*torso.parameters(), *head.parameters()]
    x, slope = frames(0, batch), slopes(batch, 6)
    rounded = gradients_of(torso.headed(x, head), slope, torso, head)
    places, out = places_for(parameters), torso.headed(x, head)
    with GradientTargets(out, places) as targets:
        handed = gradients_of(targets.root, slope, torso, head)
    assert targets.written == set(places)
    assert handed == (None,) * len(parameters)
    for parameter, expected in zip(parameters, rounded, strict=True):
        assert torch.equal(places[id(parameter)].to(parameter.dtype), expected)
    result = places[id(parameters[0])]
    assert not torch.equal(result.bfloat16().float(), result)


@compiled
def test_gradients_that_are_not_all_wanted_or_that_are_looked_at_go_through_autograd():
    torso, head = headed()
    parameters = [*torso.parameters(), *head.parameters()]
    x, slope = frames(0, 3), slopes(3, 6)
    first = id(parameters[0])

    def handed_by(places):
        out = torso.headed(x, head)
        with GradientTargets(out, places) as targets:
            result = gradients_of(targets.root, slope, torso, head)
        assert not targets.written
        assert all(g is not None for g in result)

    places = places_for(parameters)
    handed_by({key: place for key, place in places.items() if key != first})
    seen = []
    handle = parameters[3].register_hook(lambda gradient: seen.append(gradient))
    handed_by(places)
    assert len(seen) == 1
    handle.remove()
    handed_by({**places, first: places[first].contiguous()})  # it lies otherwise
    assert all(place.isnan().all() for place in places.values())
    out, other = torso.headed(x, head), torso.headed(x, head)
    with GradientTargets(out, places) as targets:
        assert all(g is not None for g in gradients_of(other, slope, torso, head))  # another pass
    assert all(g is not None for g in gradients_of(targets.root, slope, torso, head))  # no more


def learner(make=lambda net: None):
    """A replica of a net that ``make`` has changed, whose gradient was something else before."""
    net = q_network(FRAMES, generator=torch.Generator().manual_seed(0), torso="nature2015")
    make(net)
    replica = Replica(
        "net",
        net,
        lambda parameters: torch.optim.SGD(parameters, lr=0.0),
        compute_dtype=torch.bfloat16,
        in_compute=lambda name: name.startswith("torso."),
    )
    replica.descend(net(frames(2, 4)).sum())
    return replica


class Tenth(torch.autograd.Function):
    """The same values, and a tenth of the gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return 0.1 * gradient


def tie(net):
    one, two = net.torso.convolutions[1], net.torso.convolutions[2]
    two.bias = one.bias


def shrink(net):
    net.torso.convolutions[1].weight.register_hook(lambda gradient: 0 * gradient)


def look(net, x):
    """A loss whose backward pass makes another one through the same parameters."""

    @torch.enable_grad()
    def listen(gradient):
        torch.autograd.grad(10 * net(x).sum(), list(net.parameters()))

    values = net(x)
    values.register_hook(listen)
    return values.square().mean()


@torch.enable_grad()
def look_through(net, x):
    """The same from the very output that the pass began at."""
    values, passes = net(x).sum(), []

    @torch.enable_grad()
    def listen(gradient):
        if not passes:
            passes.append(gradient)
            torch.autograd.grad(10 * values, list(net.parameters()), retain_graph=True)

    values.register_hook(listen)
    return values


def checkpointed(net, x):
    return torch.utils.checkpoint.checkpoint(net, x, use_reentrant=False).square().mean()


def a_tenth(net, x):
    parameters = {name: Tenth.apply(p) for name, p in net.named_parameters()}
    return torch.func.functional_call(net, parameters, (x,)).square().mean()


def square(net, x):
    return net(x).square().mean()


LOSSES = {
    "plain": (square, None),
    "two passes": (lambda net, x: net(x[:4]).square().mean() + net(x[4:]).sum(), None),
    "another use": (lambda net, x: net(x).square().mean() + net.head.weight.square().sum(), None),
    "most is not used": (lambda net, x: net.head.weight.square().sum(), None),
    "tied": (square, tie),
    "a hook": (square, shrink),
    "a pass within": (look, None),
    "a pass within, from the same output": (look_through, None),
    "checkpointed": (checkpointed, None),
    "checkpointed, with a hook": (checkpointed, shrink),
    "parameters computed from others": (a_tenth, None),
}


@compiled
@pytest.mark.parametrize("name", LOSSES)
def test_a_replica_has_the_gradient_that_autograd_would_give_it(name, monkeypatch):
    loss, make = LOSSES[name]

    def gradient():
        replica = learner(make or (lambda net: None))
        replica.descend(loss(replica.module, frames(0, 8)))
        return {part: x.clone() for part, x in replica.named_views(replica.grad)}

    mine = gradient()
    monkeypatch.setattr(gradients, "claim", lambda parameters: None)
    for part, expected in gradient().items():
        if expected.any():
            assert off(mine[part], expected.double()) < 2**-7, part
        else:
            assert not mine[part].any(), part
    assert any(x.any() for x in mine.values())


@compiled
def test_a_descent_takes_what_was_not_rounded():
    replica = learner()
    replica.descend(square(replica.module, frames(0, 8)))
    first = next(x for _, x in replica.named_views(replica.grad))
    assert not torch.equal(first.bfloat16().float(), first)


@compiled
def test_a_descent_goes_on_after_one_that_failed():
    replica = learner()

    def fail(gradient):
        raise KeyError("on purpose")

    values = replica.module(frames(0, 8))
    values.register_hook(fail)
    with pytest.raises(KeyError):
        replica.descend(values.sum())
    replica.descend(square(replica.module, frames(0, 8)))
    expected = learner()
    expected.descend(square(expected.module, frames(0, 8)))
    assert torch.equal(replica.grad, expected.grad)


@compiled
def test_a_descent_within_another_leaves_it_alone():
    """Of another replica, in a hook."""
    replica, other = learner(), learner()
    values = replica.module(frames(0, 8))

    @torch.enable_grad()
    def step(gradient):
        other.descend(other.module(frames(1, 3)).sum())

    values.register_hook(step)
    replica.descend(values.square().mean())
    expected, alone = learner(), learner()
    expected.descend(square(expected.module, frames(0, 8)))
    alone.descend(alone.module(frames(1, 3)).sum())
    assert torch.equal(replica.grad, expected.grad)
    assert torch.equal(other.grad, alone.grad)


@compiled
def test_a_descent_through_an_output_is_that_of_its_loss():
    one, other = learner(), learner()
    values = one.module(frames(1, 8))
    one.descend((values.square().sum() / 2).detach(), through=(values, values.detach()))
    other.descend(other.module(frames(1, 8)).square().sum() / 2)
    assert one.grad.any()
    assert torch.equal(one.grad, other.grad)
