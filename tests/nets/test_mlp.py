"""The MLP is a chain of affine maps and activations."""

import copy
import pickle

import pytest
import torch

from murmurate.nets.mlp import MLP


def test_parameter_count_and_shapes():
    net = MLP((4, 64, 64))
    assert sum(p.numel() for p in net.parameters()) == 4 * 64 + 64 + 64 * 64 + 64
    assert net(torch.zeros(7, 4)).shape == (7, 64)
    assert (net.in_features, net.out_features) == (4, 64)


@pytest.mark.parametrize("activation", [torch.tanh, torch.relu])
def test_equals_its_definition(activation):
    net = MLP((3, 5, 2), activation)
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    (w1, b1), (w2, b2) = ((layer.weight, layer.bias) for layer in net.layers)
    expected = activation(activation(x @ w1.T + b1) @ w2.T + b2)
    torch.testing.assert_close(net(x), expected, rtol=1e-5, atol=1e-6)


def test_any_dtype_and_shape_of_observation():
    net = MLP((6, 5))
    x = torch.arange(24).view(4, 2, 3)
    assert torch.equal(net(x), net(x.double().flatten(1)))
    assert net.to(torch.bfloat16)(x).dtype == torch.bfloat16


@pytest.mark.parametrize("again", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))])
def test_travels_to_other_processes(again):
    net = MLP((3, 4))
    assert torch.equal(again(net)(torch.ones(1, 3)), net(torch.ones(1, 3)))


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="sizes"):
        MLP((3,))
    with pytest.raises(ValueError, match="sizes"):
        MLP((3, 0))
    with pytest.raises(ValueError, match="6 numbers"):
        MLP((6, 5))(torch.zeros(2, 5))
