"""Reads image files, and decodes crops of them with OpenCV, at the smallest scale that is large enough.

Grey images, palettes, CMYK and 16 bits become 8 bits of red, green and blue, and transparency is dropped, as
Pillow's ``convert("RGB")`` does, except that grey PNG files of 16 bits are scaled, and Pillow clips them. A
camera's orientation is ignored, as usual for ImageNet.
"""

from __future__ import annotations

import functools
import os
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from murmurate.datasets._image_headers import ImageError, ImageHeader, header_of
from murmurate.errors import MissingExtra, cause_of

_MOST_BYTES = 1 << 28  # largest size of an encoded image
LARGEST_PIXELS = 1 << 26  # most pixels of an image, which take 200 MB when it is decoded


class Place(NamedTuple):
    """Where an encoded image is: ``size`` bytes at ``offset`` of a file."""

    path: str
    offset: int
    size: int


class Crop(NamedTuple):
    """A rectangle of an image, in pixels."""

    top: float
    left: float
    height: float
    width: float


def read_encoded(place: Place) -> bytes:
    """The bytes of an encoded image. Raises ImageError."""
    if place.size > _MOST_BYTES:
        raise ImageError("image too large", f"it has {place.size:,} bytes, and {_MOST_BYTES:,} is the most")
    try:
        descriptor = os.open(place.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            data = os.pread(descriptor, place.size, place.offset)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise ImageError("unreadable file", f"it cannot be read ({cause_of(error)})") from error
    if len(data) != place.size:
        raise ImageError("truncated image", f"it should have {place.size:,} bytes, and has {len(data):,}")
    return data


def checked_header(data: bytes) -> ImageHeader:
    """The header of an image file. Raises ImageError for data that are no image, are truncated, or are too
    large to be decoded."""
    header = header_of(data)
    if header.height <= 0 or header.width <= 0:
        raise ImageError("not an image", f"it has {header.height} x {header.width} pixels")
    if header.height * header.width > LARGEST_PIXELS:
        raise ImageError(
            "image too large",
            f"it has {header.height:,} x {header.width:,} pixels, and {LARGEST_PIXELS:,} is the most",
        )
    return header


def decode(data: bytes) -> NDArray[np.uint8]:
    """The pixels [H, W, 3] of an image file, red first. Raises ImageError; MissingExtra without OpenCV."""
    checked_header(data)
    cv2 = opencv()
    decoded: NDArray[np.uint8] = cv2.cvtColor(_decoded(data, 1), cv2.COLOR_BGR2RGB)
    return decoded


def decode_crop(
    data: bytes, header: ImageHeader, crop: Crop, into: NDArray[np.uint8], mirror: bool = False
) -> None:
    """Decode an image file as ``decode`` does, scale its ``crop``, and write it to ``into`` [H, W, 3].
    mirror: whether to mirror it left to right. Raises ImageError; MissingExtra without OpenCV."""
    cv2, (height, width) = opencv(), into.shape[:2]
    reduction = 1  # JPEG files can be decoded at 1/2, 1/4 and 1/8 of their size, which is faster
    while (
        header.scalable
        and reduction < 8
        and crop.height >= 2 * reduction * height
        and crop.width >= 2 * reduction * width
    ):
        reduction *= 2
    part = _part(_decoded(data, reduction), crop, 1 / reduction)
    if part.shape != into.shape:
        part = _resized(part, height, width)
    if mirror:
        part = cv2.flip(part, 1)
    cv2.cvtColor(part, cv2.COLOR_BGR2RGB, dst=into)


def resized_crop(pixels: NDArray[np.uint8], crop: Crop) -> NDArray[np.uint8]:
    """``crop`` of an image [H, W, C], scaled to the image's own size."""
    height, width, _ = pixels.shape
    return np.asarray(_resized(_part(pixels, crop, 1), height, width)).reshape(pixels.shape)


def centre_crop(height: int, width: int, size: int, shortest: int) -> Crop:
    """The crop, in pixels of the original image, that remains if its shorter side is scaled to ``shortest``
    and ``size`` x ``size`` pixels are cut from the middle."""
    side = size * min(height, width) / shortest
    return Crop((height - side) / 2, (width - side) / 2, side, side)


def _part(image: NDArray[np.uint8], crop: Crop, scale: float) -> NDArray[np.uint8]:
    """The part of a decoded image that ``crop`` covers, rounded to whole pixels; at least one pixel. scale:
    scale at which the image was decoded."""
    height, width = image.shape[:2]
    top = min(max(round(crop.top * scale), 0), height - 1)
    left = min(max(round(crop.left * scale), 0), width - 1)
    bottom = min(max(round((crop.top + crop.height) * scale), top + 1), height)
    right = min(max(round((crop.left + crop.width) * scale), left + 1), width)
    return image[top:bottom, left:right]


def _resized(image: NDArray[np.uint8], height: int, width: int) -> Any:
    cv2 = opencv()
    # bilinear interpolation leaves out pixels where the image shrinks to less than a half
    shrinks = image.shape[0] > 2 * height or image.shape[1] > 2 * width
    return cv2.resize(image, (width, height), interpolation=cv2.INTER_AREA if shrinks else cv2.INTER_LINEAR)


def _decoded(data: bytes, reduction: int) -> Any:
    """The pixels [H, W, 3], blue first, decoded at 1 / ``reduction`` of the size."""
    cv2 = opencv()
    flag = cv2.IMREAD_COLOR if reduction == 1 else getattr(cv2, f"IMREAD_REDUCED_COLOR_{reduction}")
    try:
        image = cv2.imdecode(np.frombuffer(data, np.uint8), flag | cv2.IMREAD_IGNORE_ORIENTATION)
    except cv2.error as error:
        raise ImageError("damaged image", f"OpenCV cannot decode it ({error.err})") from error
    if image is None:
        raise ImageError("damaged image", "OpenCV cannot decode it")
    return image


@functools.cache
def opencv() -> Any:
    """The module ``cv2``. Raises MissingExtra."""
    try:
        import cv2
    except ImportError as error:
        raise MissingExtra(
            "opencv-python-headless", "images", "Decoding images, or changing their sizes and colours,"
        ) from error
    cv2.setNumThreads(1)  # images are small, and several threads in each process slow one another down
    return cv2
