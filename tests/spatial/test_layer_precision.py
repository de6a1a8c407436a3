"""Layers in parts in low and mixed precision: sums, statistics, gradients and autocast."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from murmurate.bench._spatial_layers import in_parts
from murmurate.spatial import scatter, whole
from spatial.whole_and_parts import both, image


@pytest.mark.parametrize(
    "reduce",
    [
        lambda x: x.mean((2, 3)),
        lambda x: functional.mse_loss(x, torch.zeros_like(x)).sqrt()[None],
        lambda x: functional.avg_pool2d(1000 * x, 10) / 1000,
    ],
)
def test_sums_of_half_precision_do_not_overflow(reduce):
    expected, found = both((2, 1), reduce, torch.ones(1, 1, 300, 300, dtype=torch.float16))

    for one in found:
        assert one.dtype == torch.float16
        torch.testing.assert_close(one, expected)
        assert bool((one == 1).all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 3])
def test_adaptive_means_of_half_precision_are_as_exact_as_those_of_the_whole(dtype, size):
    ones = torch.ones(1, 2, 7, 7, dtype=dtype)

    expected, found = both((2, 1), lambda x: functional.adaptive_avg_pool2d(x, size), ones)

    for one in found:
        assert torch.equal(one, expected)


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_an_image_of_half_precision_is_resized_as_exactly_as_the_whole(mode):
    x = image(1, 2, 9, 7).bfloat16()

    expected, found = both((2, 1), lambda x: functional.interpolate(x, (11, 13), mode=mode), x)

    exact = functional.interpolate(x.double(), (11, 13), mode=mode)
    own_error = (expected - exact).abs().max()
    assert all((one - exact).abs().max() <= 1.01 * own_error for one in found)


def test_class_losses_of_half_precision_do_not_overflow():
    x, classes = image(1, 4, 300, 300), image(1, 4, 300, 300, seed=1).argmax(1)
    expected = functional.cross_entropy(x, classes)

    for one in in_parts((2, 1), lambda parts: functional.cross_entropy(scatter(x.half(), parts), classes)):
        assert one.dtype == torch.float16
        assert one.item() == pytest.approx(expected.item(), rel=1e-3)


def test_running_statistics_are_those_of_the_whole():
    norm = [torch.nn.BatchNorm2d(4).double() for _ in range(5)]
    x = image(3, 4, 11, 9)
    norm[4](x)

    in_parts((2, 2), lambda parts: norm[parts.rank](scatter(x, parts)))

    for one in norm[:4]:
        torch.testing.assert_close(one.state_dict(), norm[4].state_dict(), atol=1e-13, rtol=1e-13)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_single_precision_statistics_do_not_cancel(memory_format):
    x = (image(2, 3, 16, 16, dtype=torch.float32) + 1e4).contiguous(memory_format=memory_format)

    expected, found = both((2, 2), lambda x: functional.batch_norm(x, None, None, training=True), x)

    exact = functional.batch_norm(x.double(), None, None, training=True)
    own_error = (expected - exact).abs().max()
    assert all((one - exact).abs().max() < 2 * own_error + 1e-3 for one in found)


@pytest.mark.parametrize(
    "norm",
    [
        functional.instance_norm,
        lambda x: functional.group_norm(x, x.shape[1]),
        lambda x: functional.batch_norm(x[0].unsqueeze(0), None, None, training=True),
    ],
)
@pytest.mark.parametrize("shape", [(1, 4, 8, 6), (1, 4, 8, 1), (1, 1, 2, 1)])
def test_a_single_image_in_channels_last_has_the_gradient_of_a_contiguous_one(norm, shape):
    x, direction = image(*shape), image(*shape, seed=1)

    def gradient(x, to_operand):
        leaf = x.clone().requires_grad_()
        (norm(to_operand(leaf)).square() * direction).sum().backward()
        return leaf.grad

    expected = gradient(x, lambda leaf: leaf)
    last = x.contiguous(memory_format=torch.channels_last)
    found = in_parts((2, 1), lambda parts: gradient(last, lambda leaf: scatter(leaf, parts)))

    torch.testing.assert_close(sum(found) / 2, expected, atol=1e-12, rtol=1e-12)


CONVOLUTIONS = {
    "plain": lambda x, weight: functional.conv2d(x, weight, padding=1),
    "strided": lambda x, weight: functional.conv2d(x, weight, stride=2, padding=1),
    "dilated": lambda x, weight: functional.conv2d(x, weight, padding=2, dilation=2),
    "transposed": lambda x, weight: functional.conv_transpose2d(x, weight, stride=2, padding=1),
}


@pytest.mark.parametrize("grid", [(2, 1), (2, 2)], ids=["strips", "windows"])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions_in_bfloat16_are_exact_where_nothing_is_rounded(name, grid):
    """Whole numbers up to 256 are exact in bfloat16, and here no sum is larger: a halo that was lost, or
    added twice, would show in the output or in a gradient."""
    generator = torch.Generator().manual_seed(0)

    def signs(*shape):
        return torch.randint(-1, 2, shape, generator=generator).float()

    x, weight = signs(1, 4, 48, 5), signs(4, 4, 3, 3)
    direction = signs(*CONVOLUTIONS[name](x, weight).shape)

    def results(parts):
        own_x, own_weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            y = CONVOLUTIONS[name](own_x if parts.size == 1 else scatter(own_x, parts), own_weight)
        gradients = torch.autograd.grad((y * direction).sum(), (own_x, own_weight))
        return y.detach() if parts.size == 1 else whole(y).detach(), *gradients

    (expected,) = in_parts((1, 1), results)
    found = in_parts(grid, results)

    assert expected[0].dtype == torch.bfloat16
    assert all(torch.equal(one[0], expected[0]) for one in found)
    for k in (1, 2):
        assert torch.equal(torch.stack([one[k] for one in found]).mean(0), expected[k])


def test_autocast_leaves_double_precision():
    def convolve(x):
        with torch.autocast("cpu", torch.bfloat16):
            return functional.conv2d(x, image(8, 8, 3, 3), None, padding=1)

    expected, found = both((2, 1), convolve, image(2, 8, 12, 12))

    for one in found:
        torch.testing.assert_close(one, expected)


@pytest.mark.parametrize("size", [1, 5])
def test_autocast_leaves_adaptive_means_in_the_dtype_of_the_image(size):
    def pool(x):
        with torch.autocast("cpu", torch.bfloat16):
            return functional.adaptive_avg_pool2d(x, size)

    expected, found = both((2, 1), pool, image(2, 3, 12, 10, dtype=torch.float32))

    for one in found:
        torch.testing.assert_close(one, expected)
