"""The residual nets of SN-GAN: a class-conditional generator, and a discriminator with projection."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from murmurate.nets.conditional_norm import ConditionalBatchNorm, Gather
from murmurate.nets.spectral_norm import SpectralNorm, normalized

_LEAST_SIDE = 4  # least side of the smallest feature maps, in pixels
_SMALL_IMAGE_LEVELS = 3  # with at most so many doublings of the sides, all maps have equally many channels
_CLASS_DEVIATION = 0.4  # standard deviation of the initial gains and shifts over the classes


class NetSizes(NamedTuple):
    """Sizes of both nets for one size of images.

    first: (height, width) of the smallest feature maps. generator: channels of the generator's first map,
    then of each of its blocks, which double the sides. discriminator: channels of each block of the
    discriminator; the first ``halvings`` blocks halve the sides.
    """

    first: tuple[int, int]
    generator: tuple[int, ...]
    discriminator: tuple[int, ...]
    halvings: int


def layout(height: int, width: int, channels: int) -> NetSizes:
    """The layout for images [C, height, width].

    channels: 256 gives the papers' nets. Below 64 pixels: Miyato et al. 2018, Table 4 (28 x 28 is 7 x 7,
    doubled twice). From 64 pixels: after Miyato and Koyama 2018, Figure 9 (docs/algorithms/sn-gan.md says
    what differs), where channels halve with each doubling of the sides, down to ``channels`` / 4.

    Raises:
        ValueError: for sides that are not 4 to 7 times the same one of 2, 4, 8, ...
    """
    doublings, sides = 0, (height, width)
    while not any(side % 2 or side // 2 < _LEAST_SIDE for side in sides):
        doublings, sides = doublings + 1, (sides[0] // 2, sides[1] // 2)
    if not doublings or max(sides) >= 2 * _LEAST_SIDE:
        raise ValueError(
            f"images are {height} x {width} pixels, and both sides must be 4 to 7 times the same power of "
            "two (2, 4, 8, ...), such as 28, 32, 48, 64 or 128: resize or crop them"
        )
    if doublings <= _SMALL_IMAGE_LEVELS:
        # the discriminator for 32 x 32 pixels: two blocks that halve the sides, then two on 8 x 8 pixels
        return NetSizes(sides, (channels,) * (doublings + 1), (max(channels // 2, 1),) * 4, 2)
    last_channels = max(channels // 4, 1)
    generator = (16 * last_channels, *(last_channels * 2**level for level in reversed(range(doublings))))
    discriminator = (*(last_channels * 2**level for level in range(doublings)), 16 * last_channels)
    return NetSizes(sides, generator, discriminator, doublings)


class GeneratorBlock(nn.Module):
    """A residual block that doubles the sides (Miyato et al. 2018, Figure 8)."""

    def __init__(self, inputs: int, outputs: int, classes: int, spectral: bool) -> None:
        super().__init__()
        self.first_norm = ConditionalBatchNorm(inputs, classes)
        self.first = _convolution(inputs, outputs, 3, spectral)
        self.second_norm = ConditionalBatchNorm(outputs, classes)
        self.second = _convolution(outputs, outputs, 3, spectral)
        self.shortcut = _convolution(inputs, outputs, 1, spectral)

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        out = self.first(_doubled(torch.relu_(self.first_norm(x, label))))
        out = self.second(torch.relu_(self.second_norm(out, label)))
        # 1 x 1 filters commute with the doubling, and are cheaper before it
        block: Tensor = out + _doubled(self.shortcut(x))
        return block


class Generator(nn.Module):
    """Images from noise and classes.

    shape: (C, H, W) of an image. channels: see ``layout``. latent: size of the noise. spectral: whether its
    convolutions are spectrally normalised too (Zhang et al. 2018, section 3.2, where all its weights are).
    generator: draws the weights.

    Raises ValueError for sizes that do not fit (see ``layout``).
    """

    def __init__(
        self,
        shape: Sequence[int],
        classes: int,
        *,
        channels: int,
        latent: int,
        spectral: bool,
        generator: torch.Generator,
    ) -> None:
        super().__init__()
        image_channels, height, width = shape
        sizes = layout(height, width, channels)
        self.latent, self.classes, self.first_shape = latent, classes, (sizes.generator[0], *sizes.first)
        # never spectrally normalised: one direction of the noise would soon have by far the largest singular
        # value; the others would then count for little beside the bias, and all samples of a class be alike
        self.linear = nn.Linear(latent, sizes.generator[0] * sizes.first[0] * sizes.first[1])
        pairs = zip(sizes.generator, sizes.generator[1:], strict=False)
        self.blocks = nn.ModuleList(GeneratorBlock(a, b, classes, spectral) for a, b in pairs)
        self.norm = ConditionalBatchNorm(sizes.generator[-1], classes)
        self.last = _convolution(sizes.generator[-1], image_channels, 3, spectral)
        _initialise(self, generator)

    @property
    def norms(self) -> list[ConditionalBatchNorm]:
        return [part for part in self.modules() if isinstance(part, ConditionalBatchNorm)]

    def normalize_over(self, gather: Gather | None) -> None:
        """Take the statistics of batch normalisation over all replicas (see ``ConditionalBatchNorm``)."""
        for norm in self.norms:
            norm.gather = gather

    def forward(self, noise: Tensor, label: Tensor) -> Tensor:
        """noise [B, latent] and label [B] int64 to images [B, C, H, W] in (-1, 1)."""
        x = self.linear(noise).view(len(noise), *self.first_shape)
        x = x.contiguous(memory_format=torch.channels_last)
        for block in self.blocks:
            x = block(x, label)
        return torch.tanh(self.last(torch.relu_(self.norm(x, label))))

    @torch.no_grad()
    def frozen(self, batches: Sequence[tuple[Tensor, Tensor]]) -> Generator:
        """A copy for sampling: plain layers with normalised weights, and batch normalisation by the mean
        statistics over these batches (noise, labels; at least one), so that a sample does not depend on
        others.

        Source: the standing statistics of Brock et al. 2019.
        """
        # None in place of ``gather``, as a group of replicas cannot be copied
        net = copy.deepcopy(self, {id(self.norm.gather): None})
        normalized(net)
        sums = {norm: torch.zeros(2, norm.gain.shape[1], dtype=torch.float64) for norm in net.norms}

        def record(norm: nn.Module, inputs: tuple[Tensor, Tensor]) -> None:
            if isinstance(norm, ConditionalBatchNorm):
                mean, variance = norm.statistics(inputs[0].double())
                sums[norm] += torch.stack([mean, variance]).cpu() / len(batches)

        hooks = [norm.register_forward_pre_hook(record) for norm in net.norms]
        for noise, label in batches:
            net(noise, label)
        for hook in hooks:
            hook.remove()
        for norm, (mean, variance) in sums.items():
            norm.fix(mean.to(norm.gain), variance.to(norm.gain))
        return net.requires_grad_(False)


class DiscriminatorBlock(nn.Module):
    """A residual block without batch normalisation. halves: whether it ends with the means of 2 x 2 pixels.
    first: whether its input is an image; then no ReLU comes before the first convolution."""

    def __init__(self, inputs: int, outputs: int, halves: bool, first: bool = False) -> None:
        super().__init__()
        self.halves, self.is_first = halves, first
        self.first = _convolution(inputs, outputs, 3)
        self.second = _convolution(outputs, outputs, 3)
        self.shortcut = _convolution(inputs, outputs, 1) if halves or inputs != outputs else None

    def forward(self, x: Tensor) -> Tensor:
        out = self.second(torch.relu_(self.first(x if self.is_first else torch.relu(x))))
        if self.halves:  # 1 x 1 filters commute with the mean, and are cheaper after it
            out, x = F.avg_pool2d(out, 2), F.avg_pool2d(x, 2)
        block: Tensor = out + (x if self.shortcut is None else self.shortcut(x))
        return block


class Discriminator(nn.Module):
    """A score of images and classes: psi(h(x)) + V_y . h(x), where h sums over the pixels of the last feature
    map (Miyato and Koyama 2018, eq. 3). All weights are spectrally normalised.

    shape, channels, generator: as for ``Generator``. Raises ValueError for sizes that do not fit.
    """

    def __init__(
        self, shape: Sequence[int], classes: int, *, channels: int, generator: torch.Generator
    ) -> None:
        super().__init__()
        inputs, height, width = shape
        sizes = layout(height, width, channels)
        self.blocks = nn.ModuleList()
        for number, outputs in enumerate(sizes.discriminator):
            self.blocks.append(DiscriminatorBlock(inputs, outputs, number < sizes.halvings, number == 0))
            inputs = outputs
        self.score = SpectralNorm(nn.Linear(inputs, 1))
        self.classes = SpectralNorm(nn.Embedding(classes, inputs))
        _initialise(self, generator)

    def forward(self, image: Tensor, label: Tensor) -> Tensor:
        """image [B, C, H, W] of values in (-1, 1) and label [B] int64 to scores [B]."""
        x = image.contiguous(memory_format=torch.channels_last)
        for block in self.blocks:
            x = block(x)
        with torch.autocast(x.device.type, enabled=False):  # sums over pixels and features
            features = torch.relu(x).to(self.classes.u.dtype).sum((2, 3))
            score: Tensor = self.score(features)[:, 0] + (self.classes(label) * features).sum(1)
        return score


def _convolution(inputs: int, outputs: int, kernel: int, spectral: bool = True) -> nn.Module:
    convolution = nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2)
    convolution.weight.data = convolution.weight.data.contiguous(memory_format=torch.channels_last)
    return SpectralNorm(convolution) if spectral else convolution


def _doubled(x: Tensor) -> Tensor:
    return F.interpolate(x, scale_factor=2.0, mode="nearest")


def _initialise(net: nn.Module, generator: torch.Generator) -> None:
    """Draw Glorot's uniform weights, as Miyato et al.; biases are 0. Differs: gains and shifts of classes are
    drawn around 1 and 0. If all began equal, an update would separate classes by no more than the learning
    rate."""
    for part in net.modules():
        if isinstance(part, nn.Conv2d | nn.Linear | nn.Embedding):
            _draw(part.weight, generator)
            if not isinstance(part, nn.Embedding) and part.bias is not None:
                nn.init.zeros_(part.bias)
    for part in net.modules():
        if isinstance(part, SpectralNorm):
            part.start_(generator)
        elif isinstance(part, ConditionalBatchNorm):
            _draw_normal(part.gain, 1.0, generator)
            _draw_normal(part.shift, 0.0, generator)


def _draw(weight: Tensor, generator: torch.Generator) -> None:
    if weight.is_meta:  # a net that is built for its sizes alone
        return
    drawn = torch.empty(weight.shape, device=generator.device)
    nn.init.xavier_uniform_(drawn, generator=generator)
    with torch.no_grad():
        weight.copy_(drawn)


def _draw_normal(rows: Tensor, mean: float, generator: torch.Generator) -> None:
    if rows.is_meta:
        return
    with torch.no_grad():
        drawn = torch.empty(rows.shape, device=generator.device)
        rows.copy_(drawn.normal_(mean, _CLASS_DEVIATION, generator=generator))
