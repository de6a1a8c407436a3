"""Images with labels: mini-batches, sets in memory, and the files of a data set with a test part of its own.

Letters: ``G`` images of a mini-batch, each of ``C`` channels, ``H`` rows and ``W`` columns.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from murmurate.datasets.interface import Split, Subset, other_data, split_indices
from murmurate.errors import Refusal
from murmurate.spec import EnvSpec

_BLOCK = 1 << 12  # images that are hashed at a time


@dataclass(frozen=True)
class ImageBatch:
    """images: [G, C, H, W] uint8, in ``torch.channels_last``. labels: [G] int64, the numbers of classes."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def nbytes(self) -> int:
        return self.images.nbytes + self.labels.nbytes

    @staticmethod
    def of(pixels: NDArray[np.uint8], labels: NDArray[np.int64]) -> ImageBatch:
        """From pixels [G, H, W, C]; shares their memory."""
        return ImageBatch(torch.from_numpy(pixels).permute(0, 3, 1, 2), torch.from_numpy(labels))

    @property
    def pixels(self) -> NDArray[np.uint8]:
        """The images as [G, H, W, C], on the same memory."""
        view: NDArray[np.uint8] = self.images.permute(0, 2, 3, 1).numpy()
        return view


@dataclass(frozen=True, eq=False)
class ImageSet:
    """n images of one size in memory. pixels: [n, H, W, C] uint8. labels: [n] int64.

    Raises ValueError for arrays of other types or shapes.
    """

    pixels: NDArray[np.uint8]
    labels: NDArray[np.int64]

    def __post_init__(self) -> None:
        if self.pixels.dtype != np.uint8 or self.pixels.ndim != 4:
            raise ValueError(f"pixels are {self.pixels.dtype} {self.pixels.shape}, not uint8 [n, H, W, C]")
        if self.labels.dtype != np.int64 or self.labels.shape != self.pixels.shape[:1]:
            raise ValueError(f"labels are {self.labels.dtype} {self.labels.shape}, not int64 [n]")

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(C, H, W)."""
        height, width, channels = self.pixels.shape[1:]
        return channels, height, width

    @property
    def nbytes(self) -> int:
        return self.pixels.nbytes + self.labels.nbytes

    def select(self, examples: ArrayLike) -> ImageBatch:
        """A copy of the images with these numbers [G]."""
        chosen = np.asarray(examples)
        return ImageBatch.of(self.pixels[chosen], self.labels[chosen])


@dataclass(frozen=True, eq=False)
class ImageData:
    """The images of a data set that comes with a test part, all in memory.

    classes: names, in the order of labels. encoded: the arrays that the digest is computed from, where these
    are not the pixels: decoders differ in rounding.
    """

    train: ImageSet
    test: ImageSet
    classes: tuple[str, ...]
    encoded: tuple[NDArray[Any], ...] = ()

    @property
    def nbytes(self) -> int:
        return self.train.nbytes + self.test.nbytes

    @cached_property
    def digest(self) -> str:
        """A hash of all images and labels."""
        digest = hashlib.blake2b(" ".join(self.classes).encode(), digest_size=16)
        whole = self.encoded or (self.train.pixels, self.train.labels, self.test.pixels, self.test.labels)
        for array in whole:
            digest.update(f"{array.dtype.str} {array.shape}".encode())
            for first in range(0, len(array), _BLOCK):
                digest.update(np.ascontiguousarray(array[first : first + _BLOCK]).data)
        return digest.hexdigest()

    def split(self, validation: float, seed: int) -> Split:
        """validation: images, or a share of them, held out of the training part at random."""
        train, kept = training_indices(len(self.train), validation, seed)
        return Split(Subset(self.train, train), Subset(self.train, kept), self.test)

    def fingerprint(self) -> dict[str, Any]:
        """digest: of images and labels. train, test: numbers of images. shape: [C, H, W]. classes: names."""
        return {"digest": self.digest, **self._counts()}

    def _counts(self) -> dict[str, Any]:
        return {
            "train": len(self.train),
            "test": len(self.test),
            "shape": list(self.train.shape),
            "classes": list(self.classes),
        }

    def check(self, path: str, fingerprint: Mapping[str, Any], thorough: bool) -> None:
        """Raise Refusal if the fingerprint is of other images; thorough: compare the digest too."""
        now = self._counts()
        then = {name: fingerprint[name] for name in now}
        if then != now or (thorough and self.digest != fingerprint["digest"]):
            raise other_data(path, _in_words(then), _in_words(now))

    def spec(self, name: str, validation: float, seed: int) -> EnvSpec:
        return image_spec(name, self._counts(), validation, seed)


def training_indices(count: int, validation: float, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Divide the numbers of the ``count`` images of a training part: (to train on, for validation)."""
    train, kept, _ = split_indices(count, validation, 0, seed)
    return train, kept


def image_spec(name: str, fingerprint: Mapping[str, Any], validation: float, seed: int) -> EnvSpec:
    """The spec of a data set with this fingerprint: observations are images [C, H, W] in uint8, ``actions``
    is the number of classes."""
    train, _ = training_indices(int(fingerprint["train"]), validation, seed)
    channels, height, width = (int(size) for size in fingerprint["shape"])
    return EnvSpec(
        name,
        (channels, height, width),
        torch.uint8,
        actions=len(fingerprint["classes"]),
        channels=channels,
        examples=len(train),
    )


def checked_labels(labels: NDArray[Any], classes: int, path: object) -> NDArray[np.int64]:
    """[n] int64. Raises Refusal that names the first label that is none of ``classes`` classes."""
    wrong = (labels < 0) | (labels >= classes)
    if wrong.any():
        first = int(wrong.argmax())
        raise Refusal(
            f"{path}: image {first} (from 0) has the label {int(labels[first])}, and there are {classes} "
            f"classes, from 0 to {classes - 1}. Restore the file."
        )
    return labels.astype(np.int64)


def _in_words(counts: Mapping[str, Any]) -> str:
    channels, height, width = counts["shape"]
    classes: Sequence[str] = counts["classes"]
    return (
        f"{counts['train']:,} + {counts['test']:,} images of {height} x {width} x {channels} in "
        f"{len(classes):,} classes"
    )
