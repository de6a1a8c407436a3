"""Passes without autograd against autograd."""

from __future__ import annotations

import math

import pytest
import torch

from murmurate.nets import _mlp_kernels, passes
from murmurate.nets._mlp_kernels import add_and_rectify_
from murmurate.nets.batched_mlp import BatchedMLP
from murmurate.nets.passes import Passes, product


def made(members: int = 2) -> BatchedMLP:
    net = BatchedMLP(members, (5, 16, 16, 3), generator=torch.Generator().manual_seed(0))
    return net.double()


def drawn(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("rows", [7, 40])  # from 16 rows on, factors of few columns are the left ones
@pytest.mark.parametrize("members", [1, 2])
def test_gradients_are_those_of_autograd(members: int, rows: int) -> None:
    net = made(members)
    gradient = {name: torch.empty_like(p) for name, p in net.named_parameters()}
    passes, x, slope = Passes(net, gradient), drawn(rows, 5), drawn(members, rows, 3, seed=2)
    with torch.no_grad():
        seen = passes.forward(x.expand(members, rows, 5))
        passes.backward(seen, slope)
    out = net(x)
    torch.testing.assert_close(seen[-1], out.detach(), rtol=1e-12, atol=1e-12)
    out.backward(slope)
    for name, parameter in net.named_parameters():
        torch.testing.assert_close(gradient[name], parameter.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("rows", [7, 40])
@pytest.mark.parametrize("member", [slice(0, 1), slice(1, 2), slice(None)])
def test_the_input_s_gradient_is_that_of_the_chosen_members(member: slice, rows: int) -> None:
    net, x, size = made(), drawn(rows, 5).requires_grad_(), 2 if member == slice(None) else 1
    slope = drawn(size, rows, 3, seed=2)
    passes = Passes(net)
    with torch.no_grad():
        activations = passes.forward(x.expand(size, rows, 5), member)
        found = passes.input_slope(activations, slope, member)
        of_some = passes.input_slope(activations, slope, member, slice(1, 3))
    net(x)[member].backward(slope)
    torch.testing.assert_close(found.sum(0), x.grad, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(of_some.sum(0), x.grad[:, 1:3], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    "chosen", [[0, 1, 1, 0, 1, 0, 0], [1] * 7, [0, 1] * 20], ids=["both", "one alone", "many rows"]
)
def test_each_row_follows_the_mlp_chosen_for_it(chosen: list[int]) -> None:
    net = BatchedMLP(2, (5, 16, 16, 1), generator=torch.Generator().manual_seed(0)).double()
    passes, x, of_row = Passes(net), drawn(len(chosen), 5).requires_grad_(), torch.tensor(chosen)
    with torch.no_grad():
        found = passes.slope_of_chosen(passes.forward(x.expand(2, len(chosen), 5)), of_row, slice(3, None))
    net(x)[of_row, torch.arange(len(chosen)), 0].sum().backward()
    torch.testing.assert_close(found, x.grad[:, 3:], rtol=1e-10, atol=1e-12)


def test_moved_parameters_are_followed() -> None:
    """A replica gives the parameters other memory, for example a shared one."""
    net = made()
    passes = Passes(net)
    for parameter in net.parameters():
        parameter.data = 2 * parameter.data
    with torch.no_grad():
        found = passes.forward(drawn(2, 7, 5))[-1]
        torch.testing.assert_close(found, net(drawn(2, 7, 5)))


def test_hidden_layers_in_bfloat16_give_float32_gradients() -> None:
    net = made().float()
    exact = {name: torch.empty_like(p) for name, p in net.named_parameters()}
    rounded = {name: torch.empty_like(p) for name, p in net.named_parameters()}
    x, slope = drawn(2, 64, 5).float(), drawn(2, 64, 3, seed=2).float()
    with torch.no_grad():
        full = Passes(net, exact)
        full.backward(full.forward(x), slope)
        net.weights[1].data = net.weights[1].data.bfloat16()
        net.biases[1].data = net.biases[1].data.bfloat16()
        low = Passes(net, rounded)
        seen = low.forward(x)
        low.backward(seen, slope)
    assert seen[-1].dtype == torch.float32
    for name, gradient in exact.items():
        assert rounded[name].dtype == torch.float32
        difference = torch.linalg.vector_norm(rounded[name] - gradient) / torch.linalg.vector_norm(gradient)
        assert difference < 0.1, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 5, 19), (1, 1, 256), (3, 0, 8)])
def test_a_bias_and_a_relu_in_one_pass(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """To the bit, with NaN and infinities, whether or not the compiled kernel can do it."""
    x, bias = drawn(*shape).to(dtype), drawn(shape[0], 1, shape[2], seed=2).to(dtype)
    x.view(-1)[:3] = torch.tensor([math.nan, math.inf, -math.inf][: x.numel()]).to(dtype)
    expected = (x + bias).relu()
    for one in (x.clone(), x.transpose(1, 2).contiguous().transpose(1, 2)):  # the second is not contiguous
        found = add_and_rectify_(one, bias)
        assert found is one
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def test_a_bias_and_a_relu_whatever_torch_s_default_dtype_is() -> None:
    _mlp_kernels._ones.cache_clear()
    torch.set_default_dtype(torch.float64)
    try:
        found = add_and_rectify_(torch.ones(1, 1, 4, dtype=torch.float32), torch.ones(1, 1, 4).float())
    finally:
        torch.set_default_dtype(torch.float32)
    assert found.tolist() == [[[2.0] * 4]]


@pytest.mark.parametrize("amd", [True, False])
@pytest.mark.parametrize("columns", [1, 6, 16])
def test_products_with_few_columns(amd: bool, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal to torch's product on the processors of either maker, for views of both layouts."""
    monkeypatch.setattr(passes, "_is_amd", lambda: amd)
    one, other = drawn(2, 20, 30), drawn(2, 30, columns, seed=2)
    transposed = one.transpose(1, 2).contiguous().transpose(1, 2)
    for left in (one, transposed):
        torch.testing.assert_close(product(left, other), left @ other)


def test_gradients_of_biases_are_sums_of_float32_slopes() -> None:
    """Also of layers that compute in bfloat16, if what follows them is in float32."""
    net = made().float()
    slopes = {name: torch.empty_like(p) for name, p in net.named_parameters()}
    net.weights[1].data, net.biases[1].data = net.weights[1].data.bfloat16(), net.biases[1].data.bfloat16()
    x, slope = drawn(2, 64, 5).float(), drawn(2, 64, 3, seed=2).float()
    with torch.no_grad():
        both = Passes(net, slopes)
        activations = both.forward(x)
        both.backward(activations, slope)
        before_relu = (slope @ net.weights[2].transpose(1, 2)) * (activations[2] > 0)
    torch.testing.assert_close(slopes["biases.1"], before_relu.sum(1, keepdim=True))


def test_another_activation_is_refused() -> None:
    net = BatchedMLP(1, (2, 2), torch.tanh, generator=torch.Generator())
    with pytest.raises(ValueError, match="ReLU"):
        Passes(net)
