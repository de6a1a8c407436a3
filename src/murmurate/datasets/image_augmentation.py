"""Random changes of training images, which leave their labels true."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from murmurate.datasets.image_draws import ImageDraws
from murmurate.ranges import NonNegativeInt


@dataclass(frozen=True)
class Augmentation:
    """What is drawn anew for each image in each pass.

    padding: pixels of zeros on each side, from which a crop of the image's size is taken (He et al. 2016: 4).
    flip: mirror half of the images, left to right.
    """

    padding: NonNegativeInt = 0
    flip: bool = False

    def apply(self, pixels: NDArray[np.uint8], draws: ImageDraws) -> NDArray[np.uint8]:
        """New images [G, H, W, C] from ``pixels`` [G, H, W, C]."""
        if self.padding:
            count = 2 * self.padding + 1
            pixels = shifted(pixels, self.padding, draws.integers(count), draws.integers(count))
        if self.flip:
            pixels = mirrored(pixels, draws.uniform() < 0.5)
        return pixels


def shifted(
    pixels: NDArray[np.uint8], padding: int, top: NDArray[np.int64], left: NDArray[np.int64]
) -> NDArray[np.uint8]:
    """Crops of the images' own size [G, H, W, C] out of the images with ``padding`` zeros around them.

    top, left: [G], where the crop begins in the padded image, from 0 to 2 * padding.
    """
    count, height, width, channels = pixels.shape
    wide = np.zeros((count, height + 2 * padding, width + 2 * padding, channels), np.uint8)
    wide[:, padding : padding + height, padding : padding + width] = pixels
    image, row, column, _ = wide.strides
    places = 2 * padding + 1
    crops = np.lib.stride_tricks.as_strided(
        wide,
        (count, places, places, height, width * channels),
        (image, row, column, row, 1),
        writeable=False,
    )
    return crops[np.arange(count), top, left].reshape(pixels.shape)


def mirrored(pixels: NDArray[np.uint8], chosen: NDArray[np.bool_]) -> NDArray[np.uint8]:
    """The images [G, H, W, C], those ``chosen`` [G] mirrored left to right."""
    mirror = pixels.copy()
    mirror[chosen] = torch.from_numpy(pixels[chosen]).flip(2).numpy()  # four times as fast as numpy's
    return mirror
