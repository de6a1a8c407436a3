"""CIFAR-100 (Krizhevsky 2009): 32 x 32 colour images in 100 classes, or in their 20 superclasses."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from murmurate.datasets._archives import refuse_special
from murmurate.datasets._files import state_of
from murmurate.datasets._image_world import ImageWorld
from murmurate.datasets._record_errors import refuse_unreadable
from murmurate.datasets.image_cifar10 import read_records
from murmurate.datasets.image_set import ImageData, ImageSet, checked_labels
from murmurate.errors import Refusal
from murmurate.ranges import NonNegativeFloat, Seed

_FILES = ("train.bin", "test.bin")
_LEVELS = (("coarse_label_names.txt", 20), ("fine_label_names.txt", 100))  # in the order of an image's labels
_WANTED = (
    f"CIFAR-100's binary version: the folder with {', '.join((*_FILES, *(name for name, _ in _LEVELS)))}"
)


@dataclass(frozen=True)
class Cifar100World(ImageWorld):
    """CIFAR-100: 50,000 images to train on and 10,000 to test on.

    path: folder of CIFAR-100's binary version (train.bin, ...).
    coarse: learn the 20 superclasses, such as "fish", in place of the 100 classes.
    validation: training images held out, as a number or, below 1, as a share. split_seed: seed of their
        random choice.
    """

    path: str = field(default="", metadata={"place": True})
    coarse: bool = False
    validation: NonNegativeFloat = 0.02
    split_seed: Seed = 0

    name: ClassVar[str] = "cifar100"

    def load(self) -> ImageData:
        """All images. Raises Refusal for files that are missing or damaged, or of CIFAR-100's python
        version."""
        if not self.path:
            raise Refusal(f"say where CIFAR-100 is: --world.path FOLDER of {_WANTED}.")
        return _read(Path(self.path), self.coarse, state_of(self.path))


@functools.lru_cache(maxsize=2)
def _read(folder: Path, coarse: bool, state: str) -> ImageData:
    """state: of the files, for the cache."""
    refuse_special(folder)
    names_file, count = _LEVELS[0 if coarse else 1]
    missing = next((name for name in (*_FILES, names_file) if not (folder / name).is_file()), None)
    if missing is not None:
        is_pickled = folder.name.startswith("cifar-100-python") or (folder / "meta").exists()
        remedy = "Python pickles may run code and are not read: unpack" if is_pickled else "Unpack"
        raise Refusal(
            f"There is no {missing} in {folder}, which should be {_WANTED}. {remedy} "
            f"cifar-100-binary.tar.gz{' instead' if is_pickled else ', and name the folder'}."
        )
    try:
        with refuse_unreadable(folder):
            classes = tuple((folder / names_file).read_text().split())
            train, test = (_part(folder / name, coarse, count) for name in _FILES)
    except (ValueError, MemoryError) as error:
        raise Refusal(f"{folder} does not hold CIFAR-100: {error}. Restore the files.") from error
    if len(classes) != count:
        raise Refusal(f"{folder / names_file} has {len(classes)} names, not {count}. Restore the file.")
    return ImageData(train, classes, test=test)


def _part(path: Path, coarse: bool, classes: int) -> ImageSet:
    labels, pixels = read_records(path, len(_LEVELS))
    return ImageSet(pixels, checked_labels(labels[:, 0 if coarse else 1], classes, path))
