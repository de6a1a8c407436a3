"""Pictures made smaller, pixel by pixel."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def area_mean(image: npt.NDArray[np.uint8], height: int, width: int) -> npt.NDArray[np.float64]:
    """[H, W] or [H, W, C] to [height, width(, C)]: the mean over each pixel's area, of which border pixels of
    the large picture have a share."""
    rows, columns = image.shape[:2]
    small = np.zeros((height, width, *image.shape[2:]))
    for i in range(height):
        for j in range(width):
            top, bottom = i * rows / height, (i + 1) * rows / height
            left, right = j * columns / width, (j + 1) * columns / width
            total = 0.0
            for y in range(int(top), min(rows, int(np.ceil(bottom)))):
                for x in range(int(left), min(columns, int(np.ceil(right)))):
                    share = (min(bottom, y + 1) - max(top, y)) * (min(right, x + 1) - max(left, x))
                    small[i, j] += share * image[y, x]
                    total += share
            small[i, j] /= total
    return small
