"""Whole nets in parts: how far is a training step from that of the undivided net? The nets are ordinary
modules that know nothing of parts: a ResNet-18, a U-Net with skips, an FCN for segmentation."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from murmurate.bench._spatial_layers import distance, in_parts
from murmurate.spatial import Parts, parallelize

Norm = Callable[[int], nn.Module]  # makes the normalisation of so many channels


class PlainBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = norm(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = norm(outputs)
        self.shortcut: nn.Module | None = None
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), norm(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(functional.relu(self.bn1(self.conv1(x)), inplace=True)))
        y += x if self.shortcut is None else self.shortcut(x)
        return functional.relu(y, inplace=True)


class ResNet18(nn.Module):
    """He et al. 2016, of any width (64 in the paper)."""

    def __init__(self, width: int = 8, classes: int = 10, norm: Norm = nn.BatchNorm2d) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, 3, bias=False), norm(width), nn.ReLU(inplace=True)
        )
        self.pool = nn.MaxPool2d(3, 2, 1)
        layers: list[nn.Module] = []
        channels = width
        for stage in range(4):
            outputs = width << stage
            for index in range(2):
                layers.append(PlainBlock(channels, outputs, 2 if stage and not index else 1, norm))
                channels = outputs
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(self.pool(self.stem(x)))
        y: Tensor = self.head(torch.flatten(functional.adaptive_avg_pool2d(x, 1), 1))
        return y


def twice(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1),
        nn.GroupNorm(2, outputs),
        nn.GELU(),
        nn.Conv2d(outputs, outputs, 3, padding=1),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    )


class UNet(nn.Module):
    """Ronneberger et al. 2015, of any width; the second way up is resized."""

    def __init__(self, width: int = 4, classes: int = 3) -> None:
        super().__init__()
        self.down1, self.down2, self.bottom = (
            twice(3, width),
            twice(width, 2 * width),
            twice(2 * width, 4 * width),
        )
        self.up1 = nn.ConvTranspose2d(4 * width, 2 * width, 2, 2)
        self.join1 = twice(4 * width, 2 * width)
        self.join2 = twice(3 * width, width)
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = self.down1(x)
        second = self.down2(functional.max_pool2d(first, 2))
        bottom = self.bottom(functional.avg_pool2d(second, 2))
        up = self.up1(bottom)
        if up.shape[-2:] != second.shape[-2:]:
            up = functional.interpolate(up, size=second.shape[-2:])
        x = self.join1(torch.cat([second, up], 1))
        x = functional.interpolate(x, size=first.shape[-2:], mode="bilinear", align_corners=False)
        y: Tensor = self.head(self.join2(torch.cat([first, x], dim=1)))
        return y


class FCN(nn.Module):
    """Long et al. 2015: dilated convolutions, classes of pixels, enlarged to the image."""

    def __init__(self, width: int = 4, classes: int = 3) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, width, 5, 2, 2),
            nn.InstanceNorm2d(width, affine=True),
            nn.LeakyReLU(0.1),
            nn.Conv2d(width, 2 * width, 3, padding=2, dilation=2, groups=2, padding_mode="replicate"),
            nn.BatchNorm2d(2 * width),
            nn.SiLU(),
            nn.Conv2d(2 * width, 2 * width, 3, padding=4, dilation=4),
            nn.Dropout2d(0.0),
        )
        self.head = nn.Conv2d(2 * width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.head(self.body(x))
        return functional.interpolate(y, x.shape[-2:], mode="bilinear", align_corners=True)


def batch_for(net: nn.Module, size: tuple[int, int], count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Images [N, 3, H, W], and their labels: of images [N] for a ResNet, else of pixels [N, H, W]."""
    generator = torch.Generator().manual_seed(5)
    images = torch.randn(count, 3, *size, dtype=dtype, generator=generator)
    shape = (count,) if isinstance(net, ResNet18) else (count, *size)
    return images, torch.randint(3, shape, generator=generator)


def error_of_step(make: Callable[[], nn.Module], size: tuple[int, int], grid: tuple[int, int]) -> float:
    """The largest difference of a training step in parts from that of the whole net, in float64: of the loss,
    the gradients of all parameters and the running statistics, each relative to its largest number or 1."""

    def step(parts: Parts) -> tuple[list[Tensor], list[Tensor]]:
        torch.manual_seed(3)
        net = make().double()
        images, labels = batch_for(net, size, 2, torch.float64)
        if parts.size > 1:
            parallelize(net, parts)
        loss = functional.cross_entropy(net(images), labels)
        gradients = torch.autograd.grad(loss, list(net.parameters()))
        return [loss.detach(), *net.buffers()], list(gradients)

    ((whole, whole_gradients),) = in_parts((1, 1), step)
    found = in_parts(grid, step)
    # the gradient of the whole is the mean of the parts' gradients
    means = [torch.stack(of_parts).mean(0) for of_parts in zip(*(g for _, g in found), strict=True)]
    pairs = [(one, other) for part, _ in found for one, other in zip(part, whole, strict=True)]
    return max(distance(*pair) for pair in [*pairs, *zip(means, whole_gradients, strict=True)])
