"""CIFAR-10 (Krizhevsky 2009): 32 x 32 colour images in 10 classes, in its binary files or as JPEG files."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from murmurate.datasets._archives import load_arrays, refuse_special
from murmurate.datasets._files import state_of
from murmurate.datasets._image_decoding import decode
from murmurate.datasets._image_headers import ImageError
from murmurate.datasets._image_world import ImageWorld
from murmurate.datasets._record_errors import refuse_unreadable
from murmurate.datasets.image_set import ImageData, ImageSet, checked_labels, digest_of
from murmurate.errors import Refusal
from murmurate.ranges import NonNegativeFloat, Seed

_SIDE, _CHANNELS = 32, 3
_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_TRAIN_FILES = tuple(f"data_batch_{k}.bin" for k in range(1, 6))
_WANTED = "CIFAR-10's binary version: the folder with data_batch_1.bin to data_batch_5.bin and test_batch.bin"


@dataclass(frozen=True)
class Cifar10World(ImageWorld):
    """CIFAR-10: 50,000 images to train on and 10,000 to test on.

    path: folder of CIFAR-10's binary version (data_batch_1.bin, ...), or an ``.npz`` file of JPEG files
        (docs/images.md).
    validation: training images held out, as a number or, below 1, as a share. split_seed: seed of their
        random choice.
    """

    path: str = field(default="", metadata={"place": True})
    validation: NonNegativeFloat = 0.02
    split_seed: Seed = 0

    name: ClassVar[str] = "cifar10"

    def load(self) -> ImageData:
        """All images. Raises Refusal for files that are missing, damaged, or of CIFAR-10's python version."""
        if not self.path:
            raise Refusal(f"say where CIFAR-10 is: --world.path FOLDER of {_WANTED}.")
        return _read(Path(self.path), state_of(self.path))


@functools.lru_cache(maxsize=2)
def _read(path: Path, state: str) -> ImageData:
    """state: of the files, for the cache."""
    refuse_special(path)
    try:
        with refuse_unreadable(path):
            if path.is_dir():
                return _read_binary(path)
            if path.suffix == ".npz":
                return _read_jpegs(path)
    except (ValueError, MemoryError) as error:
        raise Refusal(f"{path} does not hold CIFAR-10: {error}. Restore the file.") from error
    raise Refusal(f"{path} is not {_WANTED}. {_remedy(path)}")


def _remedy(path: Path) -> str:
    if path.name.startswith(("data_batch", "test_batch", "cifar-10-python")):
        return "Python pickles may run code and are not read: unpack cifar-10-binary.tar.gz instead."
    return "Unpack cifar-10-binary.tar.gz, and name the folder."


# -- the binary version -----------------------------------------------------------------------------


def _read_binary(folder: Path) -> ImageData:
    missing = [name for name in (*_TRAIN_FILES, "test_batch.bin") if not (folder / name).is_file()]
    if missing:
        pickled = folder / "data_batch_1"
        raise Refusal(
            f"There is no {missing[0]} in {folder}, which should be {_WANTED}. "
            f"{_remedy(pickled if pickled.exists() else folder)}"
        )
    train = [_read_batch(folder / name) for name in _TRAIN_FILES]
    pixels = np.concatenate([images for images, _ in train])
    labels = np.concatenate([labels for _, labels in train])
    test = ImageSet(*_read_batch(folder / "test_batch.bin"))
    return ImageData(ImageSet(pixels, labels), _CLASSES, test=test)


def _read_batch(path: Path) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    labels, pixels = read_records(path, 1)
    return pixels, checked_labels(labels[:, 0], len(_CLASSES), path)


def read_records(path: Path, label_bytes: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """(labels [n, label_bytes], pixels [n, 32, 32, 3]) of a binary file of CIFAR-10 or CIFAR-100, in which
    the bytes of each image's labels are before its channels. Raises Refusal for a file of another size."""
    values = np.fromfile(path, np.uint8)
    record = label_bytes + _CHANNELS * _SIDE * _SIDE
    if not len(values) or len(values) % record:
        raise Refusal(
            f"{path} has {len(values):,} bytes, which is no multiple of the {record:,} of an image with its "
            "label. Restore the file."
        )
    records = values.reshape(-1, record)
    planes = records[:, label_bytes:].reshape(-1, _CHANNELS, _SIDE, _SIDE)
    return records[:, :label_bytes], np.ascontiguousarray(planes.transpose(0, 2, 3, 1))


# -- JPEG files in an .npz file ---------------------------------------------------------------------


def _read_jpegs(path: Path) -> ImageData:
    arrays = load_arrays(path)
    names = [f"{part}_{kind}" for part in ("train", "test") for kind in ("jpeg", "offset", "label")]
    missing = [name for name in ("classes", *names) if name not in arrays]
    if missing:
        raise Refusal(
            f"{path} has no array {missing[0]}, only {', '.join(arrays)}. It should hold classes and, for "
            "train and test, JPEG files one after the other, their offsets, and labels: train_jpeg, "
            "train_offset, train_label."
        )
    classes = tuple(str(name) for name in arrays["classes"])
    train, test = (_decoded(path, part, arrays, len(classes)) for part in ("train", "test"))
    # the digest is of the encoded files, because decoders differ in rounding
    digest = digest_of((arrays[name] for name in names), classes)
    return ImageData(train, classes, test=test, content=lambda: digest)


def _decoded(path: Path, part: str, arrays: Mapping[str, NDArray[Any]], classes: int) -> ImageSet:
    files, offsets = arrays[f"{part}_jpeg"], arrays[f"{part}_offset"]
    labels = arrays[f"{part}_label"]
    if labels.dtype.kind not in "iu" or labels.ndim != 1:
        raise ValueError(f"{part}_label is {labels.dtype} {list(labels.shape)}, and not integers [n]")
    labels = checked_labels(labels, classes, path)
    are_offsets = offsets.dtype.kind in "iu" and offsets.shape == (len(labels) + 1,)
    if files.dtype != np.uint8 or files.ndim != 1 or not are_offsets or (np.diff(offsets) < 0).any():
        raise ValueError(f"{part}_offset is not the offsets of {len(labels):,} files in {part}_jpeg")
    if not len(labels) or offsets[0] < 0 or offsets[-1] > len(files):
        raise ValueError(f"{part}_offset points outside {part}_jpeg, which has {len(files):,} bytes")
    pixels = np.empty((len(labels), _SIDE, _SIDE, _CHANNELS), np.uint8)
    for k in range(len(labels)):
        try:
            image = decode(files[offsets[k] : offsets[k + 1]].tobytes())
        except ImageError as error:
            raise Refusal(f"{path}, {part} image {k} (from 0): {error.args[1]}. Restore the file.") from error
        if image.shape != pixels.shape[1:]:
            raise Refusal(f"{path}, {part} image {k} (from 0) is {image.shape}, not {pixels.shape[1:]}.")
        pixels[k] = image
    return ImageSet(pixels, labels)
