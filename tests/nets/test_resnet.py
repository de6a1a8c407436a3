"""Residual nets: their sizes are the papers', and they compute what torch's layers do in that order."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from murmurate.nets.batch_norm import BatchNorm
from murmurate.nets.resnet import ARCHITECTURES, Block, PaddedShortcut, ResNet


@pytest.mark.parametrize(
    ("name", "parameters"),
    # torchvision's documentation for 1,000 classes; He et al., Table 6, to two digits for 10
    [
        ("resnet18", 11_689_512),
        ("resnet34", 21_797_672),
        ("resnet50", 25_557_032),
        ("resnet20", 269_722),
        ("resnet32", 464_154),
        ("resnet56", 853_018),
    ],
)
def test_sizes(name: str, parameters: int) -> None:
    with torch.device("meta"):
        large = ARCHITECTURES[name].projects
        net = ResNet(name, (3, 224, 224) if large else (3, 32, 32), 1000 if large else 10)
    assert sum(p.numel() for p in net.parameters()) == parameters


@pytest.mark.parametrize(("name", "shape"), [("resnet20", (3, 16, 20)), ("resnet18", (1, 64, 70))])
@pytest.mark.parametrize("bottleneck", [False, True])
def test_it_is_the_net_of_the_paper(name: str, shape: tuple[int, int, int], bottleneck: bool) -> None:
    net = ResNet("resnet50" if bottleneck else name, shape, 7, width=4)
    perturb(net)
    images = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(net(images), written_out(net, images), rtol=1e-3, atol=1e-4)


def test_the_first_weights_follow_from_the_generator() -> None:
    one, same, other = (
        ResNet("resnet20", (3, 8, 8), 10, width=4, generator=torch.Generator().manual_seed(seed))
        for seed in (1, 1, 2)
    )
    assert torch.equal(one.conv.weight, same.conv.weight)
    assert not torch.equal(one.conv.weight, other.conv.weight)


def test_blocks_with_projections_begin_as_their_shortcuts() -> None:
    net = ResNet("resnet18", (3, 32, 32), 10, width=4)
    block = net.blocks[0]
    x = torch.rand(2, 4, 8, 8)
    torch.testing.assert_close(block(x), x)


def test_another_shape_of_images_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\[3, 9, 8\].*\[3, 8, 8\]"):
        ResNet("resnet20", (3, 8, 8), 10)(torch.zeros(1, 3, 9, 8))
    with pytest.raises(ValueError, match="resnet18"):
        ResNet("resnet19", (3, 8, 8), 10)


def perturb(net: nn.Module) -> None:
    """So that no normalisation multiplies by 0 or 1."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, BatchNorm):
                module.weight.uniform_(0.5, 1.5, generator=generator)
                module.bias.uniform_(-0.5, 0.5, generator=generator)


def normalised(norm: BatchNorm, x: Tensor) -> Tensor:
    return F.batch_norm(x, None, None, norm.weight, norm.bias, training=True)


def written_out(net: ResNet, x: Tensor) -> Tensor:
    x = F.relu(normalised(net.norm, net.conv(x)))
    x = F.max_pool2d(x, 3, 2, 1) if isinstance(net.pool, nn.MaxPool2d) else x
    for block in net.blocks:
        assert isinstance(block, Block)
        y = x
        for k, (conv, norm) in enumerate(zip(block.convs, block.norms, strict=True)):
            y = normalised(norm, conv(y))  # type: ignore[arg-type]
            y = F.relu(y) if k + 1 < len(block.convs) else y
        shortcut = block.shortcut
        if isinstance(shortcut, PaddedShortcut):
            x = x[:, :, ::2, ::2]
            missing = y.shape[1] - x.shape[1]
            x = torch.cat([x.new_zeros(len(x), missing // 2, *x.shape[2:]), x], 1)
            x = torch.cat([x, x.new_zeros(len(x), missing - missing // 2, *x.shape[2:])], 1)
        elif not isinstance(shortcut, nn.Identity):
            step = -(-x.shape[-1] // y.shape[-1])
            x = normalised(shortcut.norm, F.conv2d(x, shortcut.conv.weight, stride=step))  # type: ignore[arg-type, union-attr]
        x = F.relu(y + x)
    return net.head(x.mean((2, 3)))  # type: ignore[no-any-return]
