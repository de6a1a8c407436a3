"""Images with labels: mini-batches, sets in memory, and data sets of several parts.

Letters: ``G`` images of a mini-batch, each of ``C`` channels, ``H`` rows and ``W`` columns.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from murmurate.datasets.interface import Split, Subset, other_data, split_indices
from murmurate.errors import Refusal

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
        """A batch that shares the memory of ``pixels`` [G, H, W, C]."""
        return ImageBatch(torch.from_numpy(pixels).permute(0, 3, 1, 2), torch.from_numpy(labels))

    @property
    def pixels(self) -> NDArray[np.uint8]:
        """The images as [G, H, W, C], a view of the same memory."""
        view: NDArray[np.uint8] = self.images.permute(0, 2, 3, 1).numpy()
        return view


@dataclass(frozen=True, eq=False)
class ImageSet:
    """n images of one size in memory. pixels: [n, H, W, C] uint8. labels: [n] int64.

    Raises ValueError for arrays of other types or shapes.
    """

    pixels: NDArray[np.uint8]
    labels: NDArray[np.int64]

    encoded: ClassVar[None] = None  # unlike ``ImageFiles``, it has no encoded images

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
    """The images of a data set, in the parts that its files have.

    classes: names, in the order of labels. validation, test: None if that part is to be drawn from ``train``.
    content: computes the digest; None computes it from all pixels and labels in memory.
    skipped: numbers of images that were left out, by cause.
    """

    train: Any  # an ImageSet, or ImageFiles
    classes: tuple[str, ...]
    validation: Any = None
    test: Any = None
    content: Callable[[], str] | None = None
    skipped: Mapping[str, int] = field(default_factory=dict)

    @cached_property
    def digest(self) -> str:
        """A hash of all images and labels."""
        return digest_of(self._arrays(), self.classes) if self.content is None else self.content()

    def _arrays(self) -> Iterator[NDArray[Any]]:
        for part in (self.train, self.validation, self.test):
            if part is not None:
                yield part.pixels
                yield part.labels

    def split(self, validation: float, seed: int, test: float = 0) -> Split:
        """The three parts; those that the files do not have are drawn at random from the training part.

        validation, test: number of images to draw or, below 1, share of the training part.
        """
        train_indices, validation_indices, test_indices = part_indices(self.counts(), validation, test, seed)
        return Split(
            Subset(self.train, train_indices),
            Subset(self.train, validation_indices) if self.validation is None else self.validation,
            Subset(self.train, test_indices) if self.test is None else self.test,
        )

    def with_test(self, test: float) -> ImageData:
        """This data set. Raises Refusal if its test part is to be drawn, and ``test``, a share of the
        training part above 0, rounds to no image."""
        count = len(self.train)
        if self.test is None and 0 < test < 1 and not round(test * count):
            raise Refusal(
                f"--world.test {test:g} of {count:,} images is no image, so that there is no test part. Give "
                "a number, such as --world.test 1, or --world.test 0 for a run without a test."
            )
        return self

    def fingerprint(self) -> dict[str, Any]:
        """digest: digest of the images. train, validation, test: numbers of images in the files; None where a
        part is drawn from the training part. shape: [C, H, W]. classes: names."""
        return {"digest": self.digest, **self.counts()}

    def counts(self) -> dict[str, Any]:
        """The fingerprint without the digest."""
        parts = {"train": self.train, "validation": self.validation, "test": self.test}
        return {
            **{name: None if part is None else len(part) for name, part in parts.items()},
            "shape": list(self.train.shape),
            "classes": list(self.classes),
        }

    def class_counts(self, chosen: NDArray[np.int64]) -> tuple[int, ...]:
        """How many of the training images with these numbers each class has."""
        return tuple(np.bincount(self.train.labels[chosen], minlength=len(self.classes)).tolist())

    def check(self, path: str, fingerprint: Mapping[str, Any], thorough: bool) -> None:
        """Raise Refusal if the fingerprint is of other images; thorough: compare the digest too."""
        now = self.counts()
        then = {name: fingerprint[name] for name in now}
        if then != now or (thorough and self.digest != fingerprint["digest"]):
            problem = other_data(path, _in_words(then), _in_words(now))
            files = self.train.encoded is not None
            other = "murmurate eval DIR --images FOLDER" if files else "predict in Python"
            raise Refusal(f"{problem} To classify other images, use {other} (docs/images.md).")

    def skipped_images(self) -> tuple[str, dict[str, int]] | None:
        """See ``World.skipped``."""
        if not self.skipped:
            return None
        causes = ", ".join(f"{count:,} x {cause}" for cause, count in sorted(self.skipped.items()))
        return f"skipped: {causes}", dict(self.skipped)


def digest_of(arrays: Iterable[NDArray[Any]], words: Iterable[str]) -> str:
    """A hash of arrays and words."""
    digest = hashlib.blake2b(" ".join(words).encode("utf-8", "surrogateescape"), digest_size=16)
    for array in arrays:
        digest.update(f"{array.dtype.str} {array.shape}".encode())
        for first in range(0, len(array), _BLOCK):
            digest.update(np.ascontiguousarray(array[first : first + _BLOCK]).data)
    return digest.hexdigest()


def part_indices(
    counts: Mapping[str, Any], validation: float, test: float, seed: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Indices in the training part: (images to train on, images for validation, images for the test)."""
    return split_indices(
        int(counts["train"]),
        validation if counts["validation"] is None else 0,
        test if counts["test"] is None else 0,
        seed,
    )


def checked_labels(
    labels: NDArray[Any], classes: int, path: object, explain: Callable[[int], str] | None = None
) -> NDArray[np.int64]:
    """The labels as [n] int64. Raises Refusal that names the first label outside 0 to ``classes`` - 1.

    explain: a function of such a label that returns why it is wrong, and the remedy, for the message.
    """
    wrong = (labels < 0) | (labels >= classes)
    if wrong.any():
        first = int(wrong.argmax())
        label = int(labels[first])
        why = f"there are {classes} classes, from 0 to {classes - 1}. Restore the file."
        if explain is not None:
            why = explain(label)
        raise Refusal(f"{path}: image {first} (from 0) has the label {label:,}, and {why}")
    return labels.astype(np.int64)


def refuse_unlearned(
    title: str, learned: NDArray[np.int64], labels: NDArray[np.int64], classes: Sequence[str] = ()
) -> None:
    """Raise Refusal if some ``labels`` of the test or validation part are not among ``learned``, those of the
    training part: no class can be recognised without an image to learn it from. title: names the part, for
    the message. classes: names that the labels number, where the user has not numbered them."""
    unlearned = ~np.isin(labels, learned)
    if unlearned.any() and classes:
        raise Refusal(
            f"{title}: {int(unlearned.sum()):,} of {len(labels):,} images are of classes without a training "
            f"image that can be read, such as {classes[labels[unlearned.argmax()]]}. Add one, or leave these "
            "images out."
        )
    if unlearned.any():
        raise Refusal(
            f"{title}: {int(unlearned.sum()):,} of {len(labels):,} images have labels that no training image "
            f"has, such as {int(labels[unlearned.argmax()]):,}. Number the classes alike in all parts, or "
            "leave these images out."
        )


def _in_words(counts: Mapping[str, Any]) -> str:
    channels, height, width = counts["shape"]
    parts = " + ".join(f"{counts[name]:,}" for name in ("train", "validation", "test") if counts[name])
    return f"{parts} images of {height} x {width} x {channels} in {len(counts['classes']):,} classes"
