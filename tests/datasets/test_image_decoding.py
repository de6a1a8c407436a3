"""Image files of all kinds, whole and broken; crops against a plain oracle."""

from __future__ import annotations

import struct
import sys
import zlib

import numpy as np
import pytest

from murmurate.datasets._image_decoding import (
    Crop,
    Place,
    centre_crop,
    checked_header,
    decode,
    decode_crop,
    opencv,
    read_encoded,
)
from murmurate.datasets._image_headers import ImageError
from murmurate.datasets.image_files import ImageFiles
from murmurate.datasets.image_folder import FolderWorld
from murmurate.errors import MissingExtra, Refusal
from pictures import encoded, picture, write_folder

cv2 = pytest.importorskip("cv2")
PICTURE = picture(37, 45, 60)


def png(kind, depth, rows, palette=b""):
    """A PNG file made by hand. kind: of colour. rows: bytes of each row."""

    def chunk(name, data):
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    head = struct.pack(">IIBBBBB", 2, len(rows), depth, kind, 0, 0, 0)
    body = chunk(b"PLTE", palette) * bool(palette)
    pixels = zlib.compress(b"".join(b"\0" + row for row in rows))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + body + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


# two rows of two pixels: red (200, 30, 10), then grey 90
WIDE = struct.pack(">6H", *(257 * x for x in (200, 30, 10, 90, 90, 90)))
MODES = {
    "colours": (png(2, 8, [bytes([200, 30, 10, 90, 90, 90])] * 2), (200, 30, 10)),
    "16 bits": (png(2, 16, [WIDE] * 2), (200, 30, 10)),
    "grey": (png(0, 8, [bytes([70, 90])] * 2), (70, 70, 70)),
    "grey, 16 bits": (png(0, 16, [struct.pack(">2H", 70 * 257, 90 * 257)] * 2), (70, 70, 70)),
    "grey, transparent": (png(4, 8, [bytes([70, 0, 90, 255])] * 2), (70, 70, 70)),
    "colours, transparent": (png(6, 8, [bytes([200, 30, 10, 0, 90, 90, 90, 255])] * 2), (200, 30, 10)),
    "palette": (png(3, 8, [bytes([1, 0])] * 2, bytes([90, 90, 90, 200, 30, 10])), (200, 30, 10)),
}  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_becomes_eight_bits_of_red_green_and_blue(mode):
    data, first = MODES[mode]
    pixels = decode(data)
    assert pixels.shape == (2, 2, 3)
    assert pixels[0, 0].tolist() == list(first)
    assert pixels[1, 1].tolist() == [90, 90, 90]


def test_cmyk_and_grey_jpeg_files_are_as_pillow_has_them():
    image = pytest.importorskip("PIL.Image")
    io = pytest.importorskip("io")
    for mode in ("CMYK", "L", "RGB"):
        file = io.BytesIO()
        image.fromarray(PICTURE).convert(mode).save(file, "JPEG", quality=95)
        expected = np.asarray(image.open(file).convert("RGB")).astype(int)
        assert np.abs(decode(file.getvalue()) - expected).max() <= 2


@pytest.mark.parametrize("suffix", [".jpg", ".png", ".webp", ".bmp"])
def test_headers_give_the_size(suffix):
    header = checked_header(encoded(PICTURE, suffix))
    assert header[:2] == (45, 60)
    assert np.abs(decode(encoded(PICTURE, suffix)).astype(int) - PICTURE).mean() < 4


def bomb(kind):
    size = struct.pack(">II", 60_000, 60_000)
    if kind == "png":
        return png(2, 8, [b"\0" * 6])[:16] + size + png(2, 8, [b"\0" * 6])[24:]
    data = encoded(PICTURE)
    frame = data.index(b"\xff\xc0")
    return data[: frame + 5] + struct.pack(">HH", 60_000, 60_000) + data[frame + 9 :]


JPEG, PNG = encoded(PICTURE), encoded(PICTURE, ".png")


def bmp_of_width(width: int) -> bytes:
    data = bytearray(encoded(PICTURE, ".bmp"))
    data[18:26] = struct.pack("<ii", width, 4)
    return bytes(data)


BROKEN = {
    "empty": (b"", "empty file", "it is empty"),
    "text": (b"<html>", "not an image", "begins with 3c68746d6c3e"),
    "gif": (b"GIF89a" + bytes(40), "not an image", "no JPEG, PNG"),
    "jpeg cut in its header": (JPEG[:30], "truncated image", "within its header"),
    "jpeg cut in its pixels": (JPEG[:-40], "truncated image", "its end is missing"),
    "jpeg cut, with a thumbnail": (
        JPEG[:2] + b"\xff\xe1\x00\x06" + b"..\xff\xd9" + JPEG[2:-20], "truncated image", "end is missing",
    ),
    "png cut": (PNG[: len(PNG) // 2], "truncated image", "its end is missing"),
    "png with a wrong sum": (PNG[:60] + bytes([PNG[60] ^ 255]) + PNG[61:], "damaged image", "cannot decode"),
    "webp cut": (encoded(PICTURE, ".webp")[:-40], "truncated image", "its end is missing"),
    "bmp cut": (encoded(PICTURE, ".bmp")[:400], "damaged image", "cannot decode"),
    "only a magic number": (b"\xff\xd8\xff", "truncated image", "within its header"),
    "jpeg bomb": (bomb("jpeg"), "image too large", "60,000 x 60,000 pixels, and 67,108,864 is the most"),
    "png bomb": (bomb("png"), "image too large", "60,000 x 60,000 pixels"),
    "bmp of negative width": (bmp_of_width(-5), "not an image", "it has 4 x -5 pixels"),
    "no pixels": (png(2, 8, []), "not an image", "it has 0 x 2 pixels"),
}  # fmt: skip


@pytest.mark.parametrize("what", BROKEN)
def test_broken_images_are_named_and_counted(what, tmp_path):
    data, cause, detail = BROKEN[what]
    with pytest.raises(ImageError) as error:
        decode(data)
    assert error.value.args[0] == cause
    assert detail in error.value.args[1]
    if not data:
        return
    path = write_folder(tmp_path, train=3, test=3)
    broken = next((tmp_path / "val" / "class1").glob("*.jpg"))
    broken.write_bytes(data)
    world = FolderWorld(path, size=16, shortest=20)
    with pytest.raises(Refusal, match=rf"{broken}: .*--world.skip-bad true"):
        world.divided().test.select(range(3))
    test: ImageFiles = FolderWorld(path, size=16, shortest=20, skip_bad=True).divided().test
    batch = test.select(range(3))
    assert batch.labels.tolist() == [0, 2]


@pytest.mark.parametrize("length", range(0, len(PNG), 97))
def test_no_cut_of_a_file_is_taken_for_an_image(length):
    for data in (JPEG, PNG, encoded(PICTURE, ".webp")):
        with pytest.raises(ImageError):
            decode(data[: min(length, len(data) - 3)])


def test_files_that_cannot_be_read_are_refused(tmp_path):
    with pytest.raises(ImageError, match="cannot be read"):
        read_encoded(Place(str(tmp_path / "none.jpg"), 0, 5))
    (tmp_path / "short.jpg").write_bytes(b"12345")
    assert read_encoded(Place(str(tmp_path / "short.jpg"), 1, 3)) == b"234"
    with pytest.raises(ImageError, match="should have 9 bytes, and has 5"):
        read_encoded(Place(str(tmp_path / "short.jpg"), 0, 9))
    with pytest.raises(ImageError, match="is the most"):
        read_encoded(Place(str(tmp_path / "short.jpg"), 0, 2**40))


def smooth(height, width):
    y, x = np.mgrid[:height, :width]
    waves = [128 + 100 * np.sin(x / (37 + 9 * c) + c) * np.cos(y / (51 - 7 * c)) for c in range(3)]
    return np.stack(waves, -1).round().astype(np.uint8)


def bilinear(image, crop, size):
    """Every pixel of the crop by itself, from the four around it."""
    found = np.zeros((size, size, 3))
    for i in range(size):
        for j in range(size):
            y = crop.top + (i + 0.5) * crop.height / size - 0.5
            x = crop.left + (j + 0.5) * crop.width / size - 0.5
            y, x = min(max(y, 0), image.shape[0] - 1.001), min(max(x, 0), image.shape[1] - 1.001)
            a, b = int(y), int(x)
            v, u = y - a, x - b
            found[i, j] = (1 - v) * ((1 - u) * image[a, b] + u * image[a, b + 1]) + v * (
                (1 - u) * image[a + 1, b] + u * image[a + 1, b + 1]
            )
    return found


@pytest.mark.parametrize(
    ("height", "width", "crop"),
    [
        (64, 90, Crop(0, 0, 64, 90)),
        (64, 90, Crop(10, 20, 30, 40)),
        (30, 40, Crop(5, 5, 12, 12)),  # enlarged
        (400, 300, Crop(40, 30, 200, 160)),  # decoded at a quarter
        (330, 500, Crop(0, 100, 330, 330)),  # at an eighth
    ],
)
@pytest.mark.parametrize("suffix", [".jpg", ".png"])
def test_crops_are_those_of_the_whole_image_scaled(height, width, crop, suffix):
    image, into = smooth(height, width), np.empty((24, 24, 3), np.uint8)
    data = encoded(image, suffix)
    decode_crop(data, checked_header(data), crop, into)
    assert np.abs(into - bilinear(image.astype(float), crop, 24)).max() < 12
    mirrored = np.empty_like(into)
    decode_crop(data, checked_header(data), crop, mirrored, mirror=True)
    np.testing.assert_array_equal(mirrored, into[:, ::-1])


def test_a_crop_of_the_same_size_is_exact():
    data, into = encoded(PICTURE, ".png"), np.empty((20, 30, 3), np.uint8)
    decode_crop(data, checked_header(data), Crop(7, 11, 20, 30), into)
    np.testing.assert_array_equal(into, PICTURE[7:27, 11:41])


@pytest.mark.parametrize(
    ("height", "width", "size", "shortest", "crop"),
    [
        (256, 256, 224, 256, (16, 16, 224, 224)),
        (512, 1024, 224, 256, (32, 288, 448, 448)),
        (100, 80, 64, 64, (10, 0, 80, 80)),
    ],
)
def test_centre_crops(height, width, size, shortest, crop):
    assert centre_crop(height, width, size, shortest) == crop


def test_without_opencv_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "cv2", None)
    opencv.cache_clear()
    try:
        with pytest.raises(MissingExtra, match=r"opencv-python-headless.*murmurate\[images\]"):
            decode(JPEG)
    finally:
        opencv.cache_clear()
