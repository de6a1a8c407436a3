"""Random changes of training images that keep their labels valid.

They are computed from uniform random numbers [G, DRAWS] (``image_draws``), one row for each image. Each kind
of change has its own columns, so switching one on does not alter the others. Changes of sizes and colours
need OpenCV. Nothing here needs torch, because the processes that decode images import this module.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray

from murmurate.datasets._image_decoding import Crop, centre_crop, opencv, resized_crop
from murmurate.errors import Refusal
from murmurate.ranges import NonNegativeFloat, NonNegativeInt, PositiveInt, PositiveShare, Range

DRAWS = 33
_TRIES = 10  # rectangles tried for a random resized crop; each uses 2 of the first 20 columns
# first column of each kind of change
_TOP, _LEFT, _PAD, _FLIP, _FACTORS, _ORDER, _LIGHTING = 20, 21, 22, 24, 25, 28, 29

_GREY = np.array([0.299, 0.587, 0.114])  # shares of red, green and blue (ITU-R 601)
# principal components of the colours of ImageNet's pixels (Krizhevsky et al. 2012), as in fb.resnet.torch
_DEVIATIONS = np.array([0.2175, 0.0188, 0.0045])
_COMPONENTS = np.array([[-0.5675, 0.7192, 0.4009], [-0.5808, -0.0045, -0.8140], [-0.5836, -0.6948, 0.4203]])
_ORDERS = tuple(itertools.permutations(range(3)))  # of brightness, contrast and saturation


@dataclass(frozen=True)
class Augmentation:
    """Random changes, which are drawn anew for each image in each pass.

    crop: ``centre`` takes the same crop as evaluation (from a set in memory, the whole image).
        ``multi-scale`` scales the shorter side to a random length from the range ``shortest``, and cuts at a
        random place (Jin 3.4). ``resized`` takes a random rectangle, whose share of the image's area is in
        the range ``area`` and whose sides have a ratio of at most ``ratio``, and scales it (Szegedy et al.
        2015).
    shortest: least and greatest length of the shorter side, in pixels, for ``multi-scale``.
    area: least and greatest share of the image's area, for ``resized``.
    ratio: greatest ratio of the longer to the shorter side of a rectangle, for ``resized``.
    padding: pixels of zeros added on each side, before a random crop of the image's own size is taken (He et
        al. 2016: 4).
    flip: mirror each image, left to right, with probability 1/2.
    brightness: pixels are multiplied by a random factor, which differs from 1 by at most this much.
    contrast: pixels' differences from the image's mean grey are multiplied by such a factor.
    saturation: pixels' differences from their own grey are multiplied by such a factor. Brightness, contrast
        and saturation are changed in a random order.
    lighting: standard deviation of the multiples of the colours' principal components that are added to all
        pixels of an image (Krizhevsky et al. 2012: 0.1).
    """

    crop: Literal["centre", "multi-scale", "resized"] = "centre"
    shortest: tuple[PositiveInt, PositiveInt] = (256, 480)
    area: tuple[PositiveShare, PositiveShare] = (0.08, 1.0)
    ratio: Annotated[float, Range(1, 100)] = 4 / 3
    padding: NonNegativeInt = 0
    flip: bool = False
    brightness: NonNegativeFloat = 0.0
    contrast: NonNegativeFloat = 0.0
    saturation: NonNegativeFloat = 0.0
    lighting: NonNegativeFloat = 0.0

    def check(self, shape: tuple[int, ...]) -> None:
        """Raise Refusal for values that make no sense for images of ``shape`` (C, H, W)."""
        channels, *sides = shape
        for name in ("shortest", "area"):
            least, most = getattr(self, name)
            if least > most:
                raise Refusal(f"augment.{name} is {least} {most}; the first is the least. Swap them.")
        if self.crop == "multi-scale" and self.shortest[0] < max(sides):
            raise Refusal(
                f"augment.shortest begins at {self.shortest[0]}, and crops of {max(sides)} pixels do not fit "
                f"in. Use --augment.shortest {max(sides)} {max(self.shortest[1], max(sides))}, or a smaller "
                "--world.size."
            )
        if self.padding > 4 * max(sides):
            raise Refusal(
                f"augment.padding is {self.padding}, and images have {max(sides)} pixels: most crops would "
                "be empty. Use --augment.padding 4."
            )
        if channels != 3 and (self.saturation or self.lighting):
            raise Refusal(
                f"these images have {channels} channel(s), and augment.saturation and augment.lighting are "
                "of colours. Leave them 0."
            )

    @property
    def changes_colours(self) -> bool:
        return bool(self.brightness or self.contrast or self.saturation or self.lighting)

    @property
    def has_finish(self) -> bool:
        """Whether ``finish`` does anything."""
        return bool(self.padding or self.changes_colours)

    def mirrors(self, draws: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Whether each image is mirrored. draws: [..., DRAWS]."""
        return (draws[..., _FLIP] < 0.5) & self.flip

    def crop_of(
        self, height: int, width: int, into: tuple[int, int], shortest: int, draws: NDArray[np.float64]
    ) -> Crop:
        """The rectangle that is cut from an image of this height and width, to be scaled to ``into`` (height,
        width).

        shortest: of ``centre_crop``; the other crops do not use it. draws: [DRAWS].
        """
        if self.crop == "resized":
            return self._resized(height, width, draws)
        if self.crop == "centre":
            return centre_crop(height, width, max(into), shortest)
        least, most = self.shortest
        side = least + math.floor(draws[0] * (most - least + 1))
        scale = min(height, width) / side
        tall, wide = into[0] * scale, into[1] * scale
        return Crop(draws[_TOP] * (height - tall), draws[_LEFT] * (width - wide), tall, wide)

    def _resized(self, height: int, width: int, draws: NDArray[np.float64]) -> Crop:
        least, most = self.area
        stretch = math.log(self.ratio)
        for k in range(_TRIES):
            area = height * width * (least + draws[2 * k] * (most - least))
            ratio = math.exp(stretch * (2 * draws[2 * k + 1] - 1))
            wide, tall = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < wide <= width and 0 < tall <= height:
                top = math.floor(draws[_TOP] * (height - tall + 1))
                left = math.floor(draws[_LEFT] * (width - wide + 1))
                return Crop(top, left, tall, wide)
        # no rectangle fitted: the largest one in the middle whose sides have an allowed ratio
        wide = min(width, round(height * self.ratio))
        tall = min(height, round(width * self.ratio))
        return Crop((height - tall) // 2, (width - wide) // 2, tall, wide)

    def apply(self, pixels: NDArray[np.uint8], draws: NDArray[np.float64]) -> NDArray[np.uint8]:
        """New images [G, H, W, C] from images of a set in memory. draws: [G, DRAWS]."""
        if self.crop != "centre":
            height, width = pixels.shape[1:3]
            crops = (self.crop_of(height, width, (height, width), height, row) for row in draws)
            pixels = np.stack([resized_crop(image, crop) for image, crop in zip(pixels, crops, strict=True)])
        if self.flip:
            pixels = mirrored(pixels, self.mirrors(draws))
        return self.finish(pixels, draws)

    def finish(self, pixels: NDArray[np.uint8], draws: NDArray[np.float64]) -> NDArray[np.uint8]:
        """Make the changes that follow the crop and the mirror, in images [G, H, W, C]. draws: [G, DRAWS]."""
        if self.padding:
            offsets = (draws[:, _PAD : _PAD + 2] * (2 * self.padding + 1)).astype(np.int64)
            pixels = shifted(pixels, self.padding, offsets[:, 0], offsets[:, 1])
        if self.changes_colours:
            pixels = np.stack(
                [self._recoloured(image, row) for image, row in zip(pixels, draws, strict=True)]
            )
        return pixels

    def _recoloured(self, image: NDArray[np.uint8], draws: NDArray[np.float64]) -> NDArray[np.uint8]:
        """Change an image's colours: all changes are affine maps of a pixel's channels, which are composed to
        one map, so that pixels are rounded once."""
        cv2, channels = opencv(), image.shape[2]
        matrix, offset = self._colour_map(np.array(cv2.mean(image)[:channels]), draws)
        if self.lighting:
            multiples = self.lighting * _DEVIATIONS * _normal(draws[_LIGHTING : _LIGHTING + 4])
            offset = offset + 255 * _COMPONENTS @ multiples
        changed = cv2.transform(image, np.column_stack([matrix, offset]).astype(np.float32))
        return np.asarray(changed).reshape(image.shape)

    def _colour_map(
        self, mean: NDArray[np.float64], draws: NDArray[np.float64]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """The matrix [C, C] and offset [C] of brightness, contrast and saturation. mean: [C], mean of the
        image's pixels."""
        channels = len(mean)
        weights = _GREY if channels == 3 else np.ones(channels) / channels
        grey = np.tile(weights, (channels, 1))
        matrix, offset = np.eye(channels), np.zeros(channels)
        strengths = (self.brightness, self.contrast, self.saturation)
        for change in _ORDERS[math.floor(draws[_ORDER] * len(_ORDERS))]:
            strength = strengths[change]
            least = max(0.0, 1 - strength)
            factor = least + draws[_FACTORS + change] * (1 + strength - least)
            before, shift = matrix, offset
            matrix, offset = factor * before, factor * shift
            if change == 1:  # towards the image's mean grey after the previous changes
                offset = offset + (1 - factor) * (weights @ (before @ mean + shift))
            elif change == 2:  # towards each pixel's own grey
                matrix, offset = matrix + (1 - factor) * grey @ before, offset + (1 - factor) * grey @ shift
        return matrix, offset


def shifted(
    pixels: NDArray[np.uint8], padding: int, top: NDArray[np.int64], left: NDArray[np.int64]
) -> NDArray[np.uint8]:
    """Crops of the images' own size [G, H, W, C] out of the images with ``padding`` zeros around them.

    top, left: [G], where the crop begins in the padded image, from 0 to 2 * padding.
    """
    count, height, width, channels = pixels.shape
    padded = np.zeros((count, height + 2 * padding, width + 2 * padding, channels), np.uint8)
    padded[:, padding : padding + height, padding : padding + width] = pixels
    image, row, column, _ = padded.strides
    offsets = 2 * padding + 1
    crops = np.lib.stride_tricks.as_strided(
        padded,
        (count, offsets, offsets, height, width * channels),
        (image, row, column, row, 1),
        writeable=False,
    )
    return crops[np.arange(count), top, left].reshape(pixels.shape)


def mirrored(pixels: NDArray[np.uint8], mask: NDArray[np.bool_]) -> NDArray[np.uint8]:
    """The images [G, H, W, C], of which those where ``mask`` [G] is true are mirrored left to right."""
    channels = pixels.shape[3]
    elements = np.ascontiguousarray(pixels).view(f"V{channels}")[..., 0]  # one for each pixel: faster
    mirror = elements.copy()
    mirror[mask] = elements[mask][:, :, ::-1]
    return mirror.view(np.uint8).reshape(pixels.shape)


def _normal(uniform: NDArray[np.float64]) -> NDArray[np.float64]:
    """[3] standard normal numbers from [4] uniform ones, by Box and Muller's method."""
    radius = np.sqrt(-2 * np.log1p(-uniform[:2]))
    angle = 2 * np.pi * uniform[2:]
    return np.array(
        [radius[0] * np.cos(angle[0]), radius[0] * np.sin(angle[0]), radius[1] * np.cos(angle[1])]
    )
