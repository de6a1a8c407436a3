"""Decodes image files to pixels, with OpenCV."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from murmurate.errors import MissingExtra


class ImageError(ValueError):
    """An image that cannot be used. Arguments: the cause under which it is counted, and the detail."""


def decode(data: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The pixels [H, W, 3] of an image file in memory, red first. Raises ImageError, and MissingExtra without
    OpenCV."""
    cv2 = _opencv()
    try:
        pixels = cv2.imdecode(data, cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION)
    except cv2.error as error:
        raise ImageError("not an image", str(error.err)) from error
    if pixels is None:
        raise ImageError("not an image", "it is no image that OpenCV can decode")
    return np.ascontiguousarray(pixels[:, :, ::-1])


def _opencv() -> Any:
    try:
        import cv2
    except ImportError as error:
        raise MissingExtra("opencv-python-headless", "images", "Decoding images") from error
    return cv2
