"""Layers in parts: forward passes, losses, what only some tensors meet, and refusals."""

from __future__ import annotations

import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from murmurate.bench._spatial_layers import in_parts
from murmurate.errors import Refusal
from murmurate.spatial import Parts, SpatialTensor, scatter
from spatial.whole_and_parts import both, image

ON_IMAGES = {
    "arithmetic": lambda x: (2 - x * x.sigmoid()) / (1 + x.abs()) + x**2,
    "operators of Python": lambda x: (
        ((x // 0.5 == 1) ^ (x > 0)) + (7 % x.abs().ceil().add(1)) + 9 // (1 + x**2)
    ),
    "in place": lambda x: functional.relu(x.clone(), inplace=True).add_(1).mul_(x),
    "with a whole image": lambda x: x + image(3, 4, 11, 9, seed=2),
    "with channels": lambda x: x * image(1, 4, 1, 1, seed=3),
    "cat and chunk": lambda x: torch.cat([x, 2 * x], 1).chunk(4, 1)[3],
    "softmax of channels": lambda x: x.softmax(1).max(1).values,
    "sums and means of all": lambda x: x.sum(()) + x.mean([]) + x.sum() + x.mean(),
    "sums of channels of whole numbers": lambda x: (x > 0).sum(1, keepdim=True),
    "no images": lambda x: functional.conv2d(x[:0], image(2, 4, 3, 3), padding=1),
    "mean of pixels": lambda x: x.mean((2, 3)) @ image(4, 4, seed=4),
    "squeeze and excite": lambda x: x * functional.adaptive_avg_pool2d(x, 1).sigmoid(),
    "flatten": lambda x: x.flatten(1) @ image(396, 2, seed=5),
    "view": lambda x: x.view(x.size(0), -1).cumsum(1),
    "a cut": lambda x: x[:, 1:, 2:-3, ::2],
    "some channels": lambda x: x[:, :2] + x[..., :, :][:, 2:],
    "shuffle": lambda x: functional.pixel_shuffle(x, 2),
    "prelu": lambda x: functional.prelu(x, image(4, seed=6)),
    "reflecting convolution": lambda x: functional.conv2d(
        functional.pad(x, (2, 2, 2, 2), mode="reflect"), image(2, 4, 5, 5, seed=7)
    ),
    "groups with a shift alone": lambda x: functional.group_norm(x, 2, None, image(4, seed=10)),
    "factors that round to whole ones": lambda x: functional.interpolate(
        functional.interpolate(x, scale_factor=(1.05, 2.1)), scale_factor=1.05, mode="bilinear"
    ),
    "circular pad": lambda x: functional.pad(x, (2, 1, 0, 3), mode="circular"),
    "stack": lambda x: torch.stack([x, x.neg()], 1)[:, 1],
    "the larger of an image and a whole tensor": lambda x: torch.max(x, image(3, 4, 11, 9, seed=2)),
    "the smaller of an image and a number": lambda x: x.min(torch.tensor(0.5, dtype=torch.float64)),
    "where": lambda x: torch.where(x > 0, x, torch.zeros_like(x)),
    "gather of channels": lambda x: x.log_softmax(1).gather(1, image(3, 2, 11, 9, seed=8).gt(0).long()),
    "cosine of channels": lambda x: functional.cosine_similarity(x, image(3, 4, 11, 9, seed=9)),
    "arguments by name, also by those of NumPy": lambda x: (
        functional.interpolate(
            input=x.mean(axis=1, keepdims=True).max(axis=0, keepdims=True)[0], scale_factor=2
        )
        + torch.softmax(functional.conv2d(input=x[:1], weight=image(2, 4, 1, 1)), axis=1).mean(axis=(2, 3))[
            ..., None, None
        ]
    ),
    "all activations": lambda x: functional.threshold(functional.logsigmoid(x), -0.5, 2.0),
    "dtypes of and for tensors of any shape": lambda x: (
        x.type_as(torch.ones(3, dtype=torch.float32)) * torch.ones(4, 1, 1, dtype=torch.int32).to(x)
    ).to(torch.ones(2, 5, dtype=torch.float64)),
    "images by an array": lambda x: x[np.array([2, 0])],
    "images and channels by a mask": lambda x: x[torch.tensor([True, False, True])][
        torch.tensor([[True, False, True, True]] * 2)
    ],
}


@pytest.mark.parametrize("name", ON_IMAGES)
def test_what_a_forward_pass_may_do(name):
    expected, found = both((2, 2), ON_IMAGES[name], image(3, 4, 11, 9))

    for one in found:
        torch.testing.assert_close(one, expected, atol=1e-12, rtol=1e-12)


LOSSES = {
    "mse": lambda x, y: functional.mse_loss(x, y),
    "l1 sum": lambda x, y: functional.l1_loss(x, y, reduction="sum"),
    "huber": lambda x, y: functional.huber_loss(x, y, delta=0.5),
    "logits": lambda x, y: functional.binary_cross_entropy_with_logits(
        x, y.sigmoid(), pos_weight=image(4, 1, 1, seed=1).exp()
    ),
    "none": lambda x, y: functional.smooth_l1_loss(x, y, reduction="none").mean(),
    "weighted mse": lambda x, y: functional.mse_loss(x, y, weight=y.exp()),
    "weighted huber": lambda x, y: functional.huber_loss(x, y, weight=y.exp()),
    "broadcast": lambda x, y: functional.mse_loss(x[:, :1], y),
    "classes": lambda x, y: functional.cross_entropy(x, y.argmax(1), image(4, seed=8).exp()),
    "probabilities": lambda x, y: functional.cross_entropy(x, y.softmax(1)),
    "ignored": lambda x, y: functional.nll_loss(x.log_softmax(1), y.argmax(1), ignore_index=2),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_that_of_all_pixels(name):
    expected, found = both((3, 1), LOSSES[name], image(2, 4, 7, 5), image(2, 4, 7, 5, seed=1))

    assert all(one.item() == pytest.approx(expected.item(), rel=1e-12) for one in found)


def test_a_convolution_of_a_single_image_has_the_gradient_of_the_whole():
    def gradient(x):
        weight = image(2, 4, 3, 3).requires_grad_()
        return torch.autograd.grad(functional.conv2d(x, weight, padding=1).square().sum(), weight)[0]

    expected, found = both((2, 1), gradient, image(4, 7, 5))

    torch.testing.assert_close(torch.stack(found).mean(0), expected, rtol=1e-12, atol=1e-12)


def test_dropout_differs_between_parts_and_keeps_the_mean():
    x = torch.ones(4, 8, 32, 32)

    one, other = in_parts((2, 1), lambda parts: functional.dropout(scatter(x, parts), 0.25).local)

    assert not torch.equal(one, other)
    assert one.unique().tolist() == pytest.approx([0, 4 / 3])
    assert (one.mean() + other.mean()).item() / 2 == pytest.approx(1, abs=0.05)


def test_dropout_is_refused_where_a_checkpoint_computes_it_again():
    def part(parts):
        x = scatter(torch.ones(4, 8, 32, 32, requires_grad=True), parts)
        checkpoint(functional.dropout, x.exp(), use_reentrant=False).square().sum().backward()

    with pytest.raises(Refusal, match="dropout that is computed again"):
        in_parts((2, 1), part)


def test_dropout_of_channels_is_the_same_on_all_parts():
    x = torch.ones(4, 8, 6, 6)

    found = in_parts((2, 1), lambda parts: functional.dropout2d(scatter(x, parts), 0.5).whole())

    assert torch.equal(found[0], found[1])
    assert set(found[0].mean((2, 3)).unique().tolist()) == {0.0, 2.0}


class FirstOfTwo(Parts):
    """The first of two parts; the other one's messages are zeros, in host memory like those of a fabric."""

    def __init__(self):
        super().__init__(SimpleNamespace(rank=0, size=2), (2, 1))

    def send(self, messages):
        return 0

    def receive(self, number, expected):
        return [torch.zeros(message.shape, dtype=message.dtype) for message in expected]


class OneDevice(TorchDispatchMode):
    """Refuses operations on tensors of two devices, which meta tensors allow and those of a GPU do not."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        devices = {t.device for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        assert len(devices) < 2 or func is torch.ops.aten.copy_.default, func
        return func(*args, **(kwargs or {}))


def test_what_arrives_is_moved_to_the_device_of_the_image():
    x = torch.zeros(1, 2, 8, 8, device="meta", requires_grad=True)

    with OneDevice():
        y = functional.max_pool2d(scatter(x, FirstOfTwo()), 3, padding=1)
        y.mean().backward()

    assert y.whole().device == x.grad.device == x.device


# -- refusals -------------------------------------------------------------------------------------------

REFUSED = {
    "4 parts cannot share 3 rows (of 3 x 9)": lambda x: x[:, :, :3],
    "reaches over 15 x 15 pixels does not fit an image of 11 x 9": lambda x: functional.conv2d(
        x, image(2, 4, 15, 15)
    ),
    "linear has no form": lambda x: functional.linear(x, image(3, 9)),
    "fft_fft2 has no form": lambda x: torch.fft.fft2(x),
    "images of 6 x 9 and 11 x 9 pixels": lambda x: x + x[:, :, ::2],
    "a tensor of [11, 8]": lambda x: x + torch.zeros(11, 8),
    "mean over rows or columns alone, on a grid of (2, 2) parts,": lambda x: x.mean(2),
    "softmax over rows, columns": lambda x: x.softmax(-1),
    "indexing of rows and columns by anything but slices": lambda x: x[image(3, 4, 11, 9) > 0],
    "add_ that writes to a whole tensor": lambda x: torch.zeros(3, 4, 11, 9, dtype=x.dtype).add_(x),
    "mul that writes to a whole tensor": lambda x: torch.mul(x, 2, out=torch.zeros(3, 4, 11, 9)),
    "cat along rows or columns": lambda x: torch.cat([x, x], 2),
    "interpolate with mode bilinear and antialias": lambda x: functional.interpolate(
        x, (5, 5), mode="bilinear", antialias=True
    ),
    "interpolate with mode bilinear of torch.uint8": lambda x: functional.interpolate(
        x.to(torch.uint8), (5, 5), mode="bilinear"
    ),
    "adaptive_avg_pool2d of torch.int64": lambda x: functional.interpolate(
        x.to(torch.int64), (5, 5), mode="area"
    ),
    "pad with mode circular that crops one side": lambda x: functional.pad(x, (2, -1), mode="circular"),
    "a loss with size_average has no form": lambda x: functional.cross_entropy(
        x, image(3, 11, 9).gt(0).long(), size_average=False
    ),
    "a loss with reduce has no form": lambda x: functional.mse_loss(x, x, reduce=False),
    "max_pool2d_with_indices has no form": lambda x: functional.max_pool2d(x, 2, return_indices=True),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_done_is_named(message):
    grid = (4, 1) if message.startswith("4 parts") else (2, 2)

    with pytest.raises(Refusal, match=re.escape(message)):
        in_parts(grid, lambda parts: REFUSED[message](scatter(image(3, 4, 11, 9), parts)))


def test_shapes_that_normalisation_cannot_have_are_named():
    x = image(2, 3, 8, 6)

    with pytest.raises(ValueError, match="2 groups of 3 channels"):
        in_parts((2, 1), lambda parts: functional.group_norm(scatter(x, parts), 2))
    with pytest.raises(ValueError, match=re.escape("over [6] of an image of [2, 3, 8, 6]: give its last")):
        in_parts((2, 1), lambda parts: functional.layer_norm(scatter(x, parts), (6,)))


@pytest.mark.parametrize("loss", [functional.mse_loss, functional.cross_entropy])
def test_an_unknown_reduction_is_refused_as_by_torch(loss):
    with pytest.raises(ValueError, match="sun is not a valid value for reduction"):
        in_parts(
            (2, 1),
            lambda parts: loss(scatter(image(3, 4, 11, 9), parts), image(3, 4, 11, 9), reduction="sun"),
        )


class Doubled(torch.autograd.Function):
    """A function of one's own."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


@pytest.mark.parametrize(
    "function",
    [Doubled.apply, lambda x: checkpoint(functional.relu, x, use_reentrant=True)],
    ids=["own function", "reentrant checkpoint"],
)
def test_a_function_that_would_lose_the_gradient_is_refused(function):
    def part(parts):
        x = scatter(image(1, 1, 8, 8).requires_grad_(), parts)
        return (x + function(x)).mean()

    with pytest.raises(Refusal, match=re.escape("torch.utils.checkpoint needs use_reentrant=False")):
        in_parts((2, 1), part)


def test_a_grid_needs_its_members():
    with pytest.raises(Refusal, match=re.escape("parts is (0, 2)")):
        in_parts((1, 1), lambda parts: Parts.open(parts, (0, 2)))


def test_a_part_alone_is_the_whole():
    x = image(1, 2, 5, 5)

    y = functional.conv2d(scatter(x, Parts(None, (1, 1))), image(2, 2, 3, 3), padding=1)

    assert isinstance(y, SpatialTensor)
    torch.testing.assert_close(y.local, functional.conv2d(x, image(2, 2, 3, 3), padding=1))


@pytest.mark.parametrize("grid", [(1, 1), (3, 1)])
def test_an_image_of_one_column_is_broadcast(grid):
    """As in coordinate attention, and, with one part, in squeeze and excite."""

    def attended(x):
        columns = functional.adaptive_avg_pool2d(x, (None, 1))
        gate = functional.adaptive_max_pool2d(x, 1).sigmoid()
        return columns * x + x.clamp(max=columns) * gate

    expected, found = both(grid, attended, image(2, 3, 7, 5))

    for one in found:
        torch.testing.assert_close(one, expected, rtol=1e-12, atol=1e-12)
