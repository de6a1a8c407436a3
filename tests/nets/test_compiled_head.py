"""The compiled torso with a linear layer behind it, and with gradients that are wanted at a place."""

import pytest
import torch
from torch import nn

from murmurate import gradients
from murmurate.nets import _conv_kernels
from murmurate.nets.conv import nature_2013, nature_2015
from murmurate.nets.q_network import q_network
from murmurate.spec import EnvSpec
from murmurate.vector import Replica
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
@pytest.mark.parametrize("outputs", [1, 6, 18])
@pytest.mark.parametrize("batch", [1, 5, 32, 33])
@pytest.mark.parametrize("make", [nature_2013, nature_2015])
def test_the_layer_behind_is_torchs(make, batch, outputs):
    torso, head = headed(make, outputs)
    x, slope = frames(0, batch), slopes(batch, outputs)
    one, other = torso(x, head), apart(torso, head, x)
    assert "_Passes" in one.grad_fn.name()
    assert "Addmm" in other.grad_fn.name()
    assert one.dtype == torch.float32
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        assert torch.equal(torso(x, head), one)
    mine, theirs = gradients_of(one, slope, torso, head), gradients_of(other, slope, torso, head)
    for got, expected, p in zip(mine, theirs, [*torso.parameters(), *head.parameters()], strict=True):
        assert got.dtype == p.dtype
        assert got.stride() == p.stride()
        assert off(got, expected.double()) < (1e-5 if p.dtype == torch.float32 else 2**-8)


@compiled
def test_a_layer_that_somebody_has_changed_is_called():
    torso, head = headed()
    x, seen = frames(0, 3), []
    handle = head.register_forward_hook(lambda *call: seen.append(call))
    assert torch.equal(torso(x, head), apart(torso, head, x))
    assert len(seen) == 2
    handle.remove()
    assert "_Passes" in torso(x, head).grad_fn.name()
    others = [
        nn.Linear(256, 6, bias=False),
        nn.Sequential(nn.Linear(256, 6)),
        nn.Linear(256, 6, dtype=torch.float64),
        nn.Linear(256, 6, dtype=torch.bfloat16),
        torch.nn.utils.parametrizations.weight_norm(nn.Linear(256, 6)),
    ]
    wrapped = nn.Linear(256, 6)
    wrapped.forward = lambda features: features[:, :6] * 2
    crosswise = nn.Linear(256, 6)
    crosswise.weight.data = crosswise.weight.data.t().contiguous().t()
    for other in (*others, wrapped, crosswise):
        found = torso(x, other)
        assert "_Passes" not in found.grad_fn.name()
        assert torch.equal(found, other(torso(x).to(next(other.parameters()).dtype)))


@compiled
@pytest.mark.parametrize("frozen", ["torso", "all but fully connected", "first", "head"])
def test_frozen_parts_are_left_alone(frozen):
    torso, head = headed()
    x, slope = frames(0, 4), slopes(4, 6)
    named = {f"torso.{n}": p for n, p in torso.named_parameters()} | {
        f"head.{n}": p for n, p in head.named_parameters()
    }
    expected = dict(zip(named, gradients_of(torso(x, head), slope, torso, head), strict=True))
    still = {
        "torso": lambda n: n.startswith("torso"),
        "all but fully connected": lambda n: "linear" not in n,
        "first": lambda n: "convolutions.0" in n,
        "head": lambda n: n.startswith("head"),
    }[frozen]
    for name, p in named.items():
        p.requires_grad_(not still(name))
    torso(x, head).backward(slope)
    for name, p in named.items():
        assert (p.grad is None) == still(name)
        assert p.grad is None or torch.equal(p.grad, expected[name])


def places_for(parameters):
    return {p.data_ptr(): torch.full_like(p, float("nan"), dtype=torch.float32) for p in parameters}


@compiled
@pytest.mark.parametrize("batch", [1, 32, 33])
def test_gradients_are_written_where_they_are_wanted_before_they_are_rounded(batch):
    torso, head = headed()
    parameters = [*torso.parameters(), *head.parameters()]
    x, slope = frames(0, batch), slopes(batch, 6)
    rounded = gradients_of(torso(x, head), slope, torso, head)
    places = places_for(parameters)
    gradients.want(places)
    handed = gradients_of(torso(x, head), slope, torso, head)
    assert gradients.written() == set(places)
    assert handed == (None,) * len(parameters)
    for parameter, expected in zip(parameters, rounded, strict=True):
        assert torch.equal(places[parameter.data_ptr()].to(parameter.dtype), expected)
    assert any(
        not torch.equal(places[p.data_ptr()].bfloat16().float(), places[p.data_ptr()]) for p in parameters
    )


@compiled
def test_gradients_that_are_not_all_wanted_or_that_are_looked_at_go_through_autograd():
    torso, head = headed()
    parameters = [*torso.parameters(), *head.parameters()]
    x, slope = frames(0, 3), slopes(3, 6)

    def handed_by(places):
        gradients.want(places)
        found = gradients_of(torso(x, head), slope, torso, head)
        assert not gradients.written()
        assert all(g is not None for g in found)

    places = places_for(parameters)
    handed_by({address: place for address, place in places.items() if address != parameters[0].data_ptr()})
    seen = []
    handle = parameters[3].register_hook(lambda gradient: seen.append(gradient))
    handed_by(places)
    assert len(seen) == 1
    handle.remove()
    other = places[parameters[0].data_ptr()]
    handed_by({**places, parameters[0].data_ptr(): other.contiguous()})  # it lies otherwise
    assert all(place.isnan().all() for place in places.values())
    gradients.want(places)
    gradients.written()
    assert all(g is not None for g in gradients_of(torso(x, head), slope, torso, head))  # no more


def learner(through):
    """A replica whose vector's gradient was made by one descent along ``through(net, x)``."""
    net = q_network(FRAMES, generator=torch.Generator().manual_seed(0))
    replica = Replica(
        "net",
        net,
        lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        compute_dtype=torch.bfloat16,
        in_compute=lambda name: name.startswith("torso."),
    )
    replica.descend(through(net, frames(0, 8)))
    return replica


@compiled
@pytest.mark.parametrize(
    "loss",
    [
        lambda net, x: net(x).square().mean(),
        lambda net, x: net(x[:4]).square().mean() + net(x[4:]).sum(),  # the second use is added
        lambda net, x: net.head.weight.square().sum(),  # most is not used at all
    ],
)
def test_a_replica_has_the_gradient_that_torch_would_give_it(loss, monkeypatch):
    mine = learner(loss).grad.clone()
    assert mine.abs().sum() > 0
    monkeypatch.setattr(gradients, "take", lambda parameters: None)
    assert off(mine, learner(loss).grad.double()) < 2**-8
    monkeypatch.setattr(_conv_kernels, "_which", list)
    assert off(mine, learner(loss).grad.double()) < 0.05


@compiled
def test_a_descent_through_an_output_is_that_of_its_loss():
    def closed(net, x):
        values = net(x)
        return (values.square().sum() / 2).detach(), values, values.detach()

    def descend(through):
        replica = learner(lambda net, x: net(x).sum())
        loss, values, slope = closed(replica.module, frames(1, 8))
        if through:
            replica.descend(loss, through=(values, slope))
        else:
            replica.descend(values.square().sum() / 2)
        return replica

    assert torch.equal(descend(True).params, descend(False).params)
