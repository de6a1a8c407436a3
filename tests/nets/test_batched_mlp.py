import pytest
import torch
from torch.nn import functional

from murmurate.nets.batched_mlp import BatchedMLP, truncated_normal_, uniform_fan_in_

SIZES = (5, 16, 16, 3)


def build(activation, seed=0, members=4, **options) -> BatchedMLP:
    generator = torch.Generator().manual_seed(seed)
    return BatchedMLP(members, SIZES, activation, generator=generator, **options).double()


def one_member(net: BatchedMLP, e: int, x: torch.Tensor) -> torch.Tensor:
    """Member ``e`` of the ensemble, layer by layer."""
    layers = list(zip(net.weights, net.biases, strict=True))
    for i, (weight, bias) in enumerate(layers):
        x = functional.linear(x, weight[e].T, bias[e, 0])
        x = net.activation(x) if i < len(layers) - 1 else x
    return x


@pytest.mark.parametrize("activation", [torch.relu, functional.silu])
@pytest.mark.parametrize("shared", [True, False])
def test_the_ensemble_is_its_members_one_by_one(activation, shared):
    net = build(activation)
    shape = (7, SIZES[0]) if shared else (net.members, 7, SIZES[0])
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    together = net(x)
    one_by_one = torch.stack([one_member(net, e, x if shared else x[e]) for e in range(net.members)])
    assert together.shape == (net.members, 7, SIZES[-1])
    torch.testing.assert_close(together, one_by_one, rtol=0, atol=1e-12)
    coefficients = torch.randn(together.shape, dtype=torch.float64)
    inputs = [x, *net.parameters()]
    own = torch.autograd.grad((together * coefficients).sum(), inputs)
    oracle = torch.autograd.grad((one_by_one * coefficients).sum(), inputs)
    for ours, theirs in zip(own, oracle, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_a_members_loss_leaves_the_others_alone():
    net = build(torch.relu)
    x = torch.randn(6, SIZES[0], dtype=torch.float64)
    for gradient in torch.autograd.grad(net(x)[2].square().sum(), list(net.parameters())):
        assert gradient[2].abs().sum() > 0
        assert gradient[[0, 1, 3]].abs().sum() == 0


def test_members_begin_different_and_repeatable():
    net, again = build(torch.relu), build(torch.relu)
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), again.parameters(), strict=True))
    assert not torch.equal(net.weights[1][0], net.weights[1][1])


@pytest.mark.parametrize(
    ("initialize", "bound", "std"), [(uniform_fan_in_, 1.0, 3**-0.5), (truncated_normal_, 1.0, 0.8796 / 2)]
)
def test_initial_weights(initialize, bound, std):
    """std: in units of 1/sqrt(in); that of a normal cut off at two deviations is 0.8796 of its own."""
    net = BatchedMLP(3, (400, 100), initialize=initialize, generator=torch.Generator().manual_seed(3))
    scaled = net.weights[0].detach() * 20
    assert scaled.abs().max() <= bound + 1e-6
    assert abs(scaled.std() - std) < 0.01 * std
    assert (net.biases[0].abs().max() == 0) == (initialize is truncated_normal_)


def test_bad_shapes_are_refused():
    net = build(torch.relu)
    for shape in ((2, 6), (5,), (1, 4, 2, 5), (3, 2, 5), ()):
        with pytest.raises(ValueError, match="must be"):
            net(torch.zeros(shape))
    for members, sizes in ((0, SIZES), (2, (5,)), (2, (5, 0))):
        with pytest.raises(ValueError, match="two widths"):
            BatchedMLP(members, sizes, generator=torch.Generator())
