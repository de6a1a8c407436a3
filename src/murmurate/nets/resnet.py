"""Residual nets (He et al. 2016): ResNet-18, 34 and 50, and those for small images, ResNet-20, 32 and 56."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from murmurate.nets.batch_norm import BatchNorm
from murmurate.nets.torso import seeded_by

Norm = Callable[[int], BatchNorm]  # makes the normalisation of so many channels

_ONEDNN_BLOCK = 16  # channels of a vector block
_SMALL = 64  # pixels; images with a shorter side are not reduced by the first convolution
_EXPANSION = 4  # output channels of a bottleneck block for each channel of its width


class Architecture(NamedTuple):
    """blocks: number of blocks of each stage. width: channels of the first stage, which double from stage to
    stage.

    bottleneck: whether a block has convolutions of 1 x 1, 3 x 3 and 1 x 1 filters; otherwise two of 3 x 3.
    projects: whether a shortcut that changes the shape is a convolution of 1 x 1 filters (option B of He et
    al.); otherwise it has no parameters, but takes every second pixel and adds channels of zeros (option A).
    """

    blocks: tuple[int, ...]
    width: int
    bottleneck: bool = False
    projects: bool = True


ARCHITECTURES = {
    "resnet18": Architecture((2, 2, 2, 2), 64),
    "resnet34": Architecture((3, 4, 6, 3), 64),
    "resnet50": Architecture((3, 4, 6, 3), 64, bottleneck=True),
    "resnet20": Architecture((3, 3, 3), 16, projects=False),
    "resnet32": Architecture((5, 5, 5), 16, projects=False),
    "resnet56": Architecture((9, 9, 9), 16, projects=False),
}


class PaddedShortcut(nn.Module):
    """Every ``stride``-th pixel, with channels of zeros on both sides up to ``outputs`` (option A)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.before = (outputs - inputs) // 2
        self.after = outputs - inputs - self.before
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, :, :: self.stride, :: self.stride]
        padded = F.pad(x, (0, 0, 0, 0, self.before, self.after))
        return padded.contiguous(memory_format=torch.channels_last)


class ProjectedShortcut(nn.Module):
    """A convolution with 1 x 1 filters and batch normalisation (option B).

    Images of few channels are subsampled before the convolution: the backward pass of oneDNN's strided 1 x 1
    convolution writes out of bounds where channels-last images have fewer channels than a vector block
    (uxlfoundation/oneDNN#6035).
    """

    def __init__(self, inputs: int, outputs: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.pre_stride = stride if inputs < _ONEDNN_BLOCK else 1  # of the subsampling before the convolution
        self.conv = _conv(inputs, outputs, 1, stride // self.pre_stride)
        self.norm = norm(outputs)

    def forward(self, x: Tensor) -> Tensor:
        if self.pre_stride > 1:
            x = x[:, :, :: self.pre_stride, :: self.pre_stride].contiguous(memory_format=torch.channels_last)
        return self.norm(self.conv(x))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Convolutions, each with batch normalisation and a ReLU; the shortcut is added before the last ReLU. The
    first convolution has the stride; in a bottleneck it is the one with 3 x 3 filters that has it
    (torchvision's ResNet v1.5, and Goyal et al. 2017)."""

    def __init__(self, architecture: Architecture, inputs: int, width: int, stride: int, norm: Norm) -> None:
        super().__init__()
        if architecture.bottleneck:
            self.outputs = _EXPANSION * width
            sizes = [(inputs, width, 1, 1), (width, width, 3, stride), (width, self.outputs, 1, 1)]
        else:
            self.outputs = width
            sizes = [(inputs, width, 3, stride), (width, width, 3, 1)]
        self.convs = nn.ModuleList(_conv(*size) for size in sizes)
        self.norms = nn.ModuleList(norm(size[1]) for size in sizes)
        self.shortcut: nn.Module = nn.Identity()
        if architecture.projects and (stride != 1 or inputs != self.outputs):
            self.shortcut = ProjectedShortcut(inputs, self.outputs, stride, norm)
        elif stride != 1 or inputs != self.outputs:
            self.shortcut = PaddedShortcut(inputs, self.outputs, stride)

    @property
    def last_norm(self) -> BatchNorm:
        return cast(BatchNorm, self.norms[-1])

    def forward(self, x: Tensor) -> Tensor:
        y = x
        last = len(self.convs) - 1
        for i, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            residual = self.shortcut(x) if i == last else None
            y = norm(conv(y), residual, rectify=True)
        return y


class GlobalAverage(nn.Module):
    """Feature maps [B, C, H, W] to their means over all pixels [B, C], in float32 or more."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean((2, 3), dtype=torch.promote_types(x.dtype, torch.float32))


class ResNet(nn.Module):
    """A residual net that classifies images.

    For images with a side of fewer than 64 pixels, the first convolution has 3 x 3 filters (He et al.,
    section 4.2); for larger ones it has 7 x 7 filters and stride 2, and max-pooling follows. Filters are
    drawn from N(0, 2 / fan out), the head's weights from N(0, 0.01^2), and its bias is 0; with projections,
    the last normalisation of each block begins with weight 0 (Goyal et al. 2017, section 5.1).

    Args:
        name: one of ``ARCHITECTURES``. shape: (C, H, W) of an image. classes: K.
        width: channels of the first stage; 0: the architecture's own. norm: makes a normalisation.
        generator: seeds the initial weights.

    Raises:
        ValueError: for an unknown name.
    """

    def __init__(
        self,
        name: str,
        shape: tuple[int, int, int],
        classes: int,
        *,
        width: int = 0,
        norm: Norm = BatchNorm,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        if name not in ARCHITECTURES:
            raise ValueError(f"there is no net called '{name}': use {', '.join(ARCHITECTURES)}")
        architecture = ARCHITECTURES[name]
        channels = width or architecture.width
        self.shape = torch.Size(shape)
        small = min(shape[1:]) < _SMALL
        with seeded_by(torch.Generator() if generator is None else generator):
            self.conv = _conv(shape[0], channels, 3 if small else 7, 1 if small else 2)
            self.norm = norm(channels)
            self.pool = nn.Identity() if small else nn.MaxPool2d(3, 2, padding=1)
            blocks, inputs = [], channels
            for stage, count in enumerate(architecture.blocks):
                for block in range(count):
                    stride = 2 if stage and not block else 1
                    blocks.append(Block(architecture, inputs, channels << stage, stride, norm))
                    inputs = blocks[-1].outputs
            self.blocks = nn.Sequential(*blocks)
            self.average = GlobalAverage()
            self.head = nn.Linear(inputs, classes)
            self._initialize(architecture)

    def _initialize(self, architecture: Architecture) -> None:
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
                module.weight.data = module.weight.data.contiguous(memory_format=torch.channels_last)
        nn.init.normal_(self.head.weight, std=0.01)
        nn.init.zeros_(self.head.bias)
        if architecture.projects:
            for block in self.blocks:
                nn.init.zeros_(cast(Block, block).last_norm.weight)

    def forward(self, images: Tensor) -> Tensor:
        """Normalised images [B, C, H, W] in floating point to logits [B, K] of the head's dtype.

        Raises:
            ValueError: for images of another shape.
        """
        return self.head(self.embed(images).to(self.head.weight.dtype))  # type: ignore[no-any-return]

    def embed(self, images: Tensor) -> Tensor:
        """Normalised images [B, C, H, W] to the features [B, F] that the head reads: means over all pixels,
        in float32 or more. Raises ValueError for images of another shape."""
        if images.shape[1:] != self.shape:
            raise ValueError(f"images are {list(images.shape[1:])}, and the net is for {list(self.shape)}")
        x = images.to(self.conv.weight.dtype).contiguous(memory_format=torch.channels_last)
        x = self.pool(self.norm(self.conv(x), rectify=True))
        return self.average(self.blocks(x))  # type: ignore[no-any-return]


def _conv(inputs: int, outputs: int, kernel: int, stride: int) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
