"""What data sets of images have in common."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from murmurate.datasets.image_set import ImageData, image_spec
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
        counts = self.load().counts() if fingerprint is None else fingerprint
        return image_spec(self.name, counts, self.validation, self.split_seed, self.test)

    def fingerprint(self) -> dict[str, Any]:
        """See ``ImageData.fingerprint``."""
        return self.load().fingerprint()

    def check_fingerprint(self, fingerprint: Mapping[str, Any], thorough: bool = True) -> None:
        self.load().check(self.path, fingerprint, thorough)
