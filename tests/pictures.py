"""Small files of images, as the data sets have them."""

from __future__ import annotations

import gzip
import io
import struct
import tarfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray


def drawn(count: int, *shape: int, seed: int = 0) -> NDArray[np.uint8]:
    """[count, *shape] random bytes."""
    return np.random.default_rng(seed).integers(0, 256, (count, *shape), dtype=np.uint8)


def write_idx(path: Path, values: NDArray[np.uint8]) -> None:
    """gzip where the name says so."""
    data = struct.pack(f">HBB{values.ndim}I", 0, 8, values.ndim, *values.shape) + values.tobytes()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


def write_fashion(folder: Path, train: int = 40, test: int = 10, suffix: str = "") -> str:
    """Fashion-MNIST's four files; image k has the label k % 10."""
    for part, count in (("train", train), ("t10k", test)):
        write_idx(folder / f"{part}-images-idx3-ubyte{suffix}", drawn(count, 28, 28, seed=count))
        write_idx(folder / f"{part}-labels-idx1-ubyte{suffix}", (np.arange(count) % 10).astype(np.uint8))
    return str(folder)


def write_cifar10(folder: Path, of_each: int = 8) -> str:
    """CIFAR-10's six binary files; image k of a file has the label k % 10."""
    names = [*(f"data_batch_{k}.bin" for k in range(1, 6)), "test_batch.bin"]
    for number, name in enumerate(names):
        labels = (np.arange(of_each) % 10).astype(np.uint8)
        records = np.concatenate([labels[:, None], drawn(of_each, 3 * 32 * 32, seed=number)], 1)
        records.tofile(folder / name)
    return str(folder)


def write_cifar100(folder: Path, train: int = 40, test: int = 8) -> str:
    """CIFAR-100's binary files; image k of a file has the coarse label k % 20, and the fine one 99 - k."""
    for name, count in (("train.bin", train), ("test.bin", test)):
        k = np.arange(count, dtype=np.uint8)
        records = np.concatenate([np.stack([k % 20, 99 - k], 1), drawn(count, 3 * 32 * 32, seed=count)], 1)
        records.tofile(folder / name)
    for level, count in (("coarse", 20), ("fine", 100)):
        names = "".join(f"{level}_{k}\n" for k in range(count))
        (folder / f"{level}_label_names.txt").write_text(f"{names}\n")
    return str(folder)


def picture(number: int, height: int = 40, width: int = 48) -> NDArray[np.uint8]:
    """[height, width, 3], of one colour that tells the number, with a gradient in blue."""
    image = np.empty((height, width, 3), np.uint8)
    image[..., 0], image[..., 1] = number % 16 * 16 + 8, number // 16 * 16 + 8
    image[..., 2] = np.linspace(0, 255, width, dtype=np.uint8)
    return image


def number_of(image: NDArray[np.uint8]) -> int:
    """The number of a ``picture`` [H, W, 3], or a crop of it."""
    red, green = np.median(image[..., :2].reshape(-1, 2), 0)
    return int(red // 16 + 16 * (green // 16))


def encoded(image: NDArray[np.uint8], suffix: str = ".jpg") -> bytes:
    """The file of an image [H, W, 3], red first."""
    import cv2

    quality = [cv2.IMWRITE_JPEG_QUALITY, 98] if suffix == ".jpg" else []
    return bytes(cv2.imencode(suffix, image[..., ::-1], quality)[1])


def write_folder(folder: Path, train: int = 24, test: int = 6, classes: int = 3, suffix: str = ".jpg") -> str:
    """A folder of images; image k of a part is of class k % classes."""
    for part, count in (("train", train), ("val", test)):
        for k in range(count):
            path = folder / part / f"class{k % classes}" / f"{k:05}{suffix}"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(encoded(picture(k), suffix))
    return str(folder)


def tar_of(path: Path, files: Iterable[tuple[str, bytes]], form: int = tarfile.PAX_FORMAT) -> None:
    """A tar file with these (name, content) in it."""
    with tarfile.open(path, "w", format=form) as archive:
        for name, content in files:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def write_shards(folder: Path, count: int = 24, shards: int = 3, classes: int = 3) -> str:
    """Tar files with image k in shard k % shards; returns their pattern."""
    for shard in range(shards):
        tar_of(
            folder / f"{shard:06}.tar",
            [
                (f"image{k:05}.{suffix}", content)
                for k in range(shard, count, shards)
                for suffix, content in (("jpg", encoded(picture(k))), ("cls", str(k % classes).encode()))
            ],
        )
    return str(folder / f"{{{0:06}..{shards - 1:06}}}.tar")
