"""Spectral normalisation against the singular values of torch.linalg, and against torch's parametrization."""

import pytest
import torch
from torch import nn

from murmurate.nets.spectral_norm import SpectralNorm, iterate_, normalized
from murmurate.replica.vector import Replica


def made(seed=0, dtype=torch.float64, layer=None):
    generator = torch.Generator().manual_seed(seed)
    layer = nn.Conv2d(5, 7, 3, padding=1) if layer is None else layer
    for parameter in layer.parameters():
        nn.init.uniform_(parameter, -1, 1, generator=generator)
    if layer.weight.dim() == 4:
        layer.weight.data = layer.weight.data.contiguous(memory_format=torch.channels_last)
    spectral = SpectralNorm(layer.to(dtype))
    spectral.start_(generator)
    return spectral


LAYERS = [lambda: nn.Conv2d(5, 7, 3, padding=1), lambda: nn.Linear(6, 9), lambda: nn.Embedding(10, 6)]


@pytest.mark.parametrize("make", LAYERS)
@pytest.mark.parametrize("seed", range(3))
def test_the_estimate_becomes_the_largest_singular_value(make, seed):
    spectral = made(seed, layer=make())
    for _ in range(500):
        spectral.iterate_()
    exact = torch.linalg.svdvals(spectral.layer.weight.flatten(1))[0]
    assert spectral.sigma().item() == pytest.approx(exact.item(), rel=1e-9)


@pytest.mark.parametrize("make", LAYERS[:2])
def test_each_iteration_is_that_of_torchs_parametrization(make):
    spectral = made(3, layer=make())
    peer = make().double()
    peer.load_state_dict(spectral.layer.state_dict())
    nn.utils.parametrizations.spectral_norm(peer)
    state = peer.parametrizations.weight[0]
    w = spectral.layer.weight.detach().flatten(1)
    with torch.no_grad():
        state._u.copy_(spectral.u)
        state._v.copy_(nn.functional.normalize(w.T @ spectral.u, dim=0))
    for _ in range(5):
        theirs = peer.weight  # an iteration, and the normalised weight
        spectral.iterate_()
        torch.testing.assert_close(spectral.layer.weight / spectral.sigma(), theirs, rtol=1e-12, atol=1e-14)


def test_the_gradient_is_the_papers():
    """Miyato et al. 2018, eq. 9: of sigma it is u v', with u constant."""
    spectral = made(1, layer=nn.Linear(4, 3))
    w, u = spectral.layer.weight, spectral.u
    (gradient,) = torch.autograd.grad(spectral.sigma(), w)
    v = nn.functional.normalize(w.T @ u, dim=0)
    torch.testing.assert_close(gradient, torch.outer(u, v.detach()))
    x = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def output(weight):
        return torch.func.functional_call(spectral, {"layer.weight": weight}, (x,)).sin().sum()

    assert torch.autograd.gradcheck(output, (w.detach().requires_grad_(),))


def test_plain_layers_have_singular_value_one():
    net = nn.Sequential(made(0), nn.ReLU(), made(1, layer=nn.Conv2d(7, 2, 1)))
    x = torch.randn(2, 5, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for _ in range(500):
        iterate_(net)
    expected = net(x)
    plain = normalized(net)
    assert [type(part).__name__ for part in plain] == ["Conv2d", "ReLU", "Conv2d"]
    torch.testing.assert_close(plain(x), expected, rtol=1e-8, atol=1e-10)
    assert torch.linalg.svdvals(plain[0].weight.flatten(1))[0].item() == pytest.approx(1)
    assert isinstance(normalized(made(2, layer=nn.Linear(3, 3))), nn.Linear)


def test_the_weight_stays_a_view_into_the_vector():
    spectral = made(0, torch.float32, nn.Conv2d(3, 8, 3))
    replica = Replica("net", spectral, lambda p: torch.optim.Adam(p, lr=0.01))
    x = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    before = spectral.layer.weight.detach().clone()
    for _ in range(3):
        iterate_(spectral)
        replica.descend(spectral(x).square().mean())
    replica.check()
    assert not torch.equal(before, spectral.layer.weight)
    assert "u" in replica.state()["buffers"]


def test_a_weight_of_zeros_gives_zeros():
    spectral = made(0, layer=nn.Linear(3, 2))
    nn.init.zeros_(spectral.layer.weight)
    spectral.iterate_()
    out = spectral(torch.ones(1, 3, dtype=torch.float64))
    torch.testing.assert_close(out[0], spectral.layer.bias)
