"""Small files of images, as the data sets have them."""

from __future__ import annotations

import gzip
import struct
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
