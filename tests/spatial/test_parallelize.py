"""Whole nets in parts: one training step, names, refusals."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

import murmurate
from murmurate.bench._spatial_layers import in_parts
from murmurate.bench._spatial_nets import FCN, ResNet18, UNet, error_of_step
from murmurate.errors import Refusal
from murmurate.nets.batch_norm import BatchNorm
from murmurate.nets.resnet import ResNet
from murmurate.spatial import Parts, parallelize, scatter, whole, whole_again


def batch(size: tuple[int, int], classes: int, of_pixels: bool) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    images = torch.randn(2, 3, *size, dtype=torch.float64, generator=generator)
    return images, torch.randint(classes, (2, *size) if of_pixels else (2,), generator=generator)


def make(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return kind().double()


CASES = [
    (ResNet18, (67, 64), (2, 2)),
    (ResNet18, (64, 96), (1, 3)),
    (UNet, (37, 41), (2, 2)),
    (FCN, (33, 40), (3, 2)),
]


@pytest.mark.parametrize(("kind", "size", "grid"), CASES)
def test_a_training_step_equals_the_whole(kind, size, grid):
    assert error_of_step(kind, size, grid) < 1e-12


def step_of_our_net(
    name: str, precision: torch.dtype, grid: tuple[int, int]
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """The gradients of all parameters, and the state, after a step: all parts have the same state."""
    size = 32 if name == "resnet20" else 72
    images, labels = batch((size, size), 10, of_pixels=False)
    images = images.to(memory_format=torch.channels_last)

    def step(parts):
        net = ResNet(name, (3, size, size), 10, width=8, generator=torch.Generator().manual_seed(4))
        for norm in net.modules():
            if isinstance(norm, BatchNorm):  # some begin with 0, and then no gradient reaches their block
                nn.init.ones_(norm.weight)
        net = net.double() if precision == torch.float64 else net
        if parts.size > 1:
            parallelize(net, parts)
        with torch.autocast("cpu", precision, enabled=precision == torch.bfloat16):
            loss = functional.cross_entropy(net(images), labels)
        return torch.autograd.grad(loss, list(net.parameters())), net.state_dict()

    (gradients, state), *others = in_parts(grid, step)
    for _, other in others:
        assert all(torch.equal(value, state[key]) for key, value in other.items())
    of_all = [gradients, *(other for other, _ in others)]
    return [torch.stack(one).double().mean(0) for one in zip(*of_all, strict=True)], state


NETS = pytest.mark.parametrize("name", ["resnet20", "resnet18", "resnet50"])


@NETS
@pytest.mark.parametrize(("precision", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-3)])
def test_our_residual_nets_equal_the_whole(name, precision, tolerance):
    expected, whole_state = step_of_our_net(name, precision, (1, 1))
    found, state = step_of_our_net(name, precision, (2, 1))

    for gradient, whole_gradient in zip(found, expected, strict=True):
        assert (gradient - whole_gradient).norm() <= tolerance * (whole_gradient.norm() + 1e-3)
    torch.testing.assert_close(state, whole_state, atol=tolerance, rtol=tolerance)


@NETS
def test_our_residual_nets_in_bfloat16_are_rounded_no_more_than_the_whole(name):
    """Gradients in bfloat16 are some ten percent off, or more; in parts none may be twice as far off. Layers
    alone are exact: see ``test_convolutions_in_bfloat16_are_exact_where_nothing_is_rounded``."""
    exact, exact_state = step_of_our_net(name, torch.float64, (1, 1))
    of_whole, whole_state = step_of_our_net(name, torch.bfloat16, (1, 1))
    found, state = step_of_our_net(name, torch.bfloat16, (2, 1))

    for gradient, whole_gradient, exact_gradient in zip(found, of_whole, exact, strict=True):
        assert (gradient - exact_gradient).norm() <= 2 * (whole_gradient - exact_gradient).norm()
    for key, value in exact_state.items():
        assert (state[key] - value).norm() <= 2 * (whole_state[key] - value).norm() + 1e-3


@pytest.mark.parametrize("with_residual", [False, True])
def test_our_normalisation_of_images_in_any_format_where_a_part_has_one_pixel(with_residual):
    images, direction = torch.randn(2, 4, 3, 3), torch.randn(2, 4, 3, 3)

    def gradients(parts):
        norm = BatchNorm(4)
        parallelize(nn.Sequential(norm), parts)
        x = images.clone().requires_grad_()
        y = scatter(x, parts) * 2  # a dense tensor
        (norm(y, y * 0.5 if with_residual else None) * direction).sum().backward()
        return [x.grad, norm.weight.grad, norm.bias.grad]

    (expected,) = in_parts((1, 1), gradients)
    found = in_parts((2, 2), gradients)

    mean = [torch.stack(each).mean(0) for each in zip(*found, strict=True)]
    torch.testing.assert_close(mean, expected, atol=1e-5, rtol=1e-4)


def test_ghost_batches_are_refused_with_their_layer():
    net = ResNet("resnet20", (3, 32, 32), 10, norm=lambda channels: BatchNorm(channels, ghost=2))

    with pytest.raises(Refusal, match="'norm' takes statistics of ghost batches"):
        parallelize(net, Parts(None, (1, 1)))
    assert not any(module._forward_pre_hooks for module in net.modules()), "the net is as it was"


def test_evaluation_and_the_way_back():
    images, _ = batch((40, 48), 3, of_pixels=True)
    net = make(UNet).eval()

    def evaluate(parts):
        own = parallelize(copy.deepcopy(net), parts)
        with torch.no_grad():
            found = whole(own(images))
            return found, whole_again(own)(images)

    for found, again in in_parts((2, 1), evaluate):
        torch.testing.assert_close(found, net(images), atol=1e-12, rtol=1e-12)
        assert torch.equal(again, net(images))


def test_a_copy_is_divided_as_well():
    """As of a moving average of parameters (``AveragedModel``), or to evaluate later."""
    images, labels = batch((9, 8), 3, of_pixels=False)
    net = nn.Sequential(nn.Conv2d(3, 3, 3), BatchNorm(3), nn.AdaptiveAvgPool2d(1), nn.Flatten()).double()

    def gradients(parts):
        own = parallelize(copy.deepcopy(net), parts)
        copied = torch.optim.swa_utils.AveragedModel(own).module
        for module in (own, copied):
            functional.cross_entropy(module(images), labels).backward()
        return [p.grad for p in own.parameters()], [p.grad for p in copied.parameters()]

    for of_module, of_copy in in_parts((2, 1), gradients):
        assert all(map(torch.equal, of_module, of_copy))


class Attentive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 1)
        self.mixer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mixer(self.stem(x))


def test_a_layer_that_cannot_is_named():
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Sequential(nn.LPPool2d(2, 2), nn.FractionalMaxPool2d(2, 3)))

    with pytest.raises(Refusal, match=r"'1.0' \(LPPool2d; use AvgPool2d\), '1.1' \(FractionalMaxPool2d"):
        parallelize(net, Parts(None, (1, 1)))

    with pytest.raises(Refusal, match=r"linear has no form for images .* layer 'mixer'"):
        in_parts((2, 1), lambda parts: parallelize(Attentive(), parts)(torch.zeros(1, 3, 8, 8)))


def test_more_parts_than_rows_deep_in_a_net_are_refused_with_the_layer():
    with pytest.raises(Refusal, match=r"4 parts cannot share 2 rows \(of 2 x 2\).*layer 'layers.6.conv1'"):
        in_parts((4, 1), lambda parts: parallelize(make(ResNet18), parts)(batch((64, 64), 3, False)[0]))


def grid_in_a_script(loop):
    with pytest.raises(Refusal, match=r"connects 2 x 2 parts: .* \(this one has 2 x 1\) .* parts=\(2, 2\)\)"):
        parallelize(FCN(), parts=(2, 2))
    net = parallelize(FCN(), parts=(2, 1))
    return net(torch.zeros(1, 3, 8, 8)).local.shape[-2]


def test_a_grid_means_the_parts_of_the_script():
    assert murmurate.run(grid_in_a_script, parts=2, strategy="solo", launcher="inline") == [4]

    with pytest.raises(
        Refusal, match=r"connects 2 x 2 parts: in a script they .* parts=\(2, 2\)\); elsewhere"
    ):
        parallelize(FCN(), parts=(2, 2))
