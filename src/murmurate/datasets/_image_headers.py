"""Reads the size of an image from its file's header, so that images that are too large are not decoded."""

from __future__ import annotations

import struct
from typing import NamedTuple

_JPEG, _PNG, _BMP = b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"BM"
# markers of JPEG
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # headers of frames, which have the size
_BARE = frozenset((0x01, *range(0xD0, 0xD8)))  # markers without a length after them
_SCAN, _END = 0xDA, b"\xff\xd9"  # beginning of the pixels, end of the image


class ImageError(ValueError):
    """An image that cannot be used. Arguments: the cause under which it is counted, and the detail for a
    message."""


class ImageHeader(NamedTuple):
    """height, width: in pixels. scalable: whether it can be decoded at 1/2, 1/4 and 1/8 of its size."""

    height: int
    width: int
    scalable: bool


def header_of(data: bytes) -> ImageHeader:
    """The header of a JPEG, PNG, WebP or BMP file. Raises ImageError for other files, and for truncated ones
    (of a BMP file, only if its header is)."""
    if not data:
        raise ImageError("empty file", "it is empty")
    try:
        if data.startswith(_JPEG):
            return _jpeg(data)
        if data.startswith(_PNG):
            if data.rfind(b"IEND") < 0:
                raise ImageError("truncated image", "its end is missing")
            width, height = struct.unpack_from(">II", data, 16)
            return ImageHeader(height, width, False)
        if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
            return _webp(data)
        if data.startswith(_BMP):
            return _bmp(data)
    except (struct.error, IndexError) as error:
        raise ImageError("truncated image", "it ends within its header") from error
    raise ImageError("not an image", f"it begins with {data[:8].hex()}: no JPEG, PNG, WebP or BMP file")


def _jpeg(data: bytes) -> ImageHeader:
    position, header = 2, None
    while True:
        if data[position] != 0xFF:
            raise ImageError("not an image", f"there is no marker of JPEG at byte {position}")
        marker = data[position + 1]
        if marker == 0xFF:  # padding
            position += 1
            continue
        if marker in _BARE:
            position += 2
            continue
        if marker in _FRAMES:
            height, width = struct.unpack_from(">HH", data, position + 5)
            header = ImageHeader(height, width, True)
        if marker == _SCAN:
            break
        position += 2 + struct.unpack_from(">H", data, position + 2)[0]
    if header is None:
        raise ImageError("not an image", "it is a JPEG file without a size")
    if data.rfind(_END, position) < 0:  # an end before the pixels may be that of a thumbnail
        raise ImageError("truncated image", "its end is missing")
    return header


def _webp(data: bytes) -> ImageHeader:
    if struct.unpack_from("<I", data, 4)[0] + 8 > len(data):
        raise ImageError("truncated image", "its end is missing")
    kind = data[12:16]
    if kind == b"VP8X":
        width, height = (int.from_bytes(data[i : i + 3], "little") + 1 for i in (24, 27))
    elif kind == b"VP8L":
        bits = struct.unpack_from("<I", data, 21)[0]
        width, height = (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    elif kind == b"VP8 ":
        width, height = (side & 0x3FFF for side in struct.unpack_from("<HH", data, 26))
    else:
        raise ImageError("not an image", f"a WebP file does not begin with {kind!r}")
    return ImageHeader(height, width, False)


def _bmp(data: bytes) -> ImageHeader:
    (header_bytes,) = struct.unpack_from("<I", data, 14)
    if header_bytes == 12:
        width, height = struct.unpack_from("<HH", data, 18)
    else:
        width, height = struct.unpack_from("<ii", data, 18)
    return ImageHeader(abs(height), width, False)
