"""Fashion-MNIST (Xiao, Rasul and Vollgraf 2017): 28 x 28 grey images of clothes, in idx files."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from murmurate.datasets._files import state_of
from murmurate.datasets._idx_files import read_idx
from murmurate.datasets._image_world import ImageWorld
from murmurate.datasets.image_set import ImageData, ImageSet, checked_labels
from murmurate.errors import Refusal
from murmurate.ranges import NonNegativeFloat, Seed

_DEBIAN = Path("/usr/share/datasets/fashion-mnist")
_CLASSES = (
    *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
    *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
)
_INSTALL = (
    "On Debian and Ubuntu run: apt-get install dataset-fashion-mnist. Elsewhere take the four files in "
    "data/fashion of https://github.com/zalandoresearch/fashion-mnist, and name their folder: "
    "--world.path FOLDER."
)


@dataclass(frozen=True)
class FashionWorld(ImageWorld):
    """Fashion-MNIST: 60,000 images to train on and 10,000 to test on, in 10 classes.

    path: folder with its four idx files, gzip or not (MNIST's files have the same names and format); empty:
        the folder of Debian's package dataset-fashion-mnist.
    validation: training images held out, as a number or, below 1, as a share. split_seed: seed of their
        random choice.
    """

    path: str = field(default="", metadata={"place": True})
    validation: NonNegativeFloat = 0.02
    split_seed: Seed = 0

    name: ClassVar[str] = "fashion"

    def load(self) -> ImageData:
        """All images. Raises Refusal for files that are missing or damaged."""
        folder = self._folder()
        return _read(folder, state_of(folder))

    def check_fingerprint(self, fingerprint: Mapping[str, Any], thorough: bool = True) -> None:
        """Raise Refusal if these are other images. thorough: compare the digest too (0.1 s)."""
        self.load().check(str(self._folder()), fingerprint, thorough)

    def _folder(self) -> Path:
        if self.path:
            return Path(self.path)
        if _DEBIAN.is_dir():
            return _DEBIAN
        raise Refusal(f"Fashion-MNIST is not installed: there is no {_DEBIAN}. {_INSTALL}")


@functools.lru_cache(maxsize=2)
def _read(folder: Path, state: str) -> ImageData:
    """state: of the files, for the cache."""
    return ImageData(_part(folder, "train"), _CLASSES, test=_part(folder, "t10k"))


def _part(folder: Path, part: str) -> ImageSet:
    images_path = _file(folder, f"{part}-images", "idx3-ubyte")
    labels_path = _file(folder, f"{part}-labels", "idx1-ubyte")
    images, labels = read_idx(images_path, 3), read_idx(labels_path, 1)
    if len(images) != len(labels) or not images.size:
        raise Refusal(
            f"{images_path} has {len(images):,} images of {images.shape[1]} x {images.shape[2]} and "
            f"{labels_path} has {len(labels):,} labels: they do not belong together. Restore the files."
        )
    return ImageSet(images[..., None], checked_labels(labels, len(_CLASSES), labels_path))


def _file(folder: Path, name: str, kind: str) -> Path:
    """The file of that name, under any of its usual spellings."""
    for spelling in (f"{name}-{kind}", f"{name}.{kind}"):
        for suffix in ("", ".gz"):
            if (path := folder / f"{spelling}{suffix}").is_file():
                return path
    raise Refusal(f"There is no {name}-{kind}, nor {name}-{kind}.gz, in {folder}. {_INSTALL}")
