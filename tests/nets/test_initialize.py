"""Orthogonal initialisation: orthogonality, gain, and that a generator decides everything."""

import pytest
import torch
from torch import nn

from murmurate.nets.initialize import orthogonal_


def seeded(module, gain=1.0, seed=0):
    orthogonal_(module, gain, torch.Generator().manual_seed(seed))
    return module


@pytest.mark.parametrize(
    "layer", [nn.Linear(7, 5), nn.Linear(5, 7), nn.Conv2d(4, 6, 3), nn.Conv2d(1, 9, 2)], ids=str
)
@pytest.mark.parametrize("gain", [1.0, 2**0.5, 0.01])
def test_rows_or_columns_are_orthogonal(layer, gain):
    matrix = seeded(layer, gain).weight.flatten(1)
    gram = matrix @ matrix.T if matrix.shape[0] <= matrix.shape[1] else matrix.T @ matrix
    torch.testing.assert_close(gram, gain**2 * torch.eye(len(gram)), rtol=0, atol=1e-5 * gain**2)
    assert layer.bias.abs().max() == 0


def test_each_gate_of_an_lstm_is_orthogonal():
    cell = seeded(nn.LSTMCell(6, 4), 1.0)
    for weight in (cell.weight_ih, cell.weight_hh):
        for gate in weight.chunk(4):
            torch.testing.assert_close(gate @ gate.T, torch.eye(4), rtol=0, atol=1e-5)
    assert cell.bias_ih.abs().max() == cell.bias_hh.abs().max() == 0
    gates = cell.weight_hh.chunk(4)
    assert not torch.allclose(gates[0], gates[1])


def test_the_generator_decides_and_nothing_else():
    state = torch.get_rng_state()
    nets = [nn.Sequential(nn.Conv2d(3, 8, 3), nn.Linear(5, 5), nn.LSTMCell(3, 2)) for _ in range(3)]
    torch.set_rng_state(state)
    a, b, c = (seeded(net, seed=seed) for net, seed in zip(nets, (1, 1, 2), strict=True))
    assert torch.equal(torch.get_rng_state(), state)
    for p, q, r in zip(a.parameters(), b.parameters(), c.parameters(), strict=True):
        assert torch.equal(p, q)
        assert p.dim() == 1 or not torch.allclose(p, r)


def test_dtype_and_memory_format_change_no_draw():
    plain, last, small = (nn.Conv2d(4, 6, 3) for _ in range(3))
    last.to(memory_format=torch.channels_last)
    for layer in (plain, last, small.to(torch.bfloat16)):
        seeded(layer)
    assert torch.equal(plain.weight, last.weight)
    assert last.weight.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(plain.weight.to(torch.bfloat16), small.weight)


def test_weights_that_are_views_of_a_flat_vector_are_written_in_place():
    flat, layer = torch.zeros(20), nn.Linear(4, 5)
    layer.weight = nn.Parameter(flat.view(5, 4))
    seeded(layer)
    torch.testing.assert_close(flat.view(5, 4).T @ flat.view(5, 4), torch.eye(4), rtol=0, atol=1e-5)


def test_nothing_to_initialise_is_refused():
    with pytest.raises(ValueError, match="ReLU"):
        seeded(nn.ReLU())
