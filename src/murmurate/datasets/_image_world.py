"""What data sets of images have in common."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from murmurate.datasets.image_files import read_images
from murmurate.datasets.image_set import ImageData, part_indices
from murmurate.datasets.interface import Split
from murmurate.spec import EnvSpec, World


class ImageWorld(World):
    """A data set of images: subclasses are dataclasses with these fields, and load the images.

    test: training images held out to evaluate after a run, a number or a share; for a data set that always
    has a test part it is no field.
    """

    path: str
    validation: float
    split_seed: int
    test: float = 0

    unit: ClassVar[str] = "images"

    def __post_init__(self) -> None:
        if self.path:  # a run may be resumed from another folder
            object.__setattr__(self, "path", os.path.abspath(self.path))

    @abstractmethod
    def load(self) -> ImageData:
        """All images, or their index. Raises Refusal for files that are missing or damaged."""

    def divided(self) -> Split:
        return self.load().split(self.validation, self.split_seed, self.test)

    def spec(self, fingerprint: Mapping[str, Any] | None = None) -> EnvSpec:
        """An observation is an image [C, H, W] in uint8; ``actions`` is the number of classes."""
        data = None
        if fingerprint is None:
            data = self.load()
            fingerprint = data.counts()
        train, _, _ = part_indices(fingerprint, self.validation, self.test, self.split_seed)
        channels, height, width = (int(size) for size in fingerprint["shape"])
        return EnvSpec(
            self.name,
            (channels, height, width),
            torch.uint8,
            actions=len(fingerprint["classes"]),
            channels=channels,
            examples=len(train),
            class_counts=None if data is None else data.class_counts(train),
        )

    def fingerprint(self) -> dict[str, Any]:
        """See ``ImageData.fingerprint``."""
        return self.load().fingerprint()

    def check_fingerprint(self, fingerprint: Mapping[str, Any], thorough: bool = True) -> None:
        self.load().check(self.path, fingerprint, thorough)


class ImageFilesWorld(ImageWorld):
    """Images in files that are decoded when they are read."""

    size: int
    shortest: int
    skip_bad: bool

    has_image_files: ClassVar[bool] = True

    def skipped(self) -> tuple[str, dict[str, int]] | None:
        """What was left out of the index; other damaged images are found only when they are decoded."""
        return self.load().skipped_images()

    def images(self, files: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> NDArray[np.uint8]:
        """Other image files as the learner sees images in evaluation: uint8 [n, 3, size, size], for
        ``predict`` (see ``read_images``, also for what is raised)."""
        return read_images(files, self.size, self.shortest)
