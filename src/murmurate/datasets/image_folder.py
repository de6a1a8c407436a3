"""Image files in one folder for each class, as ImageNet is usually stored."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
from numpy.typing import NDArray

from murmurate.datasets._archives import refuse_special
from murmurate.datasets._files import is_clutter
from murmurate.datasets._image_decoding import Place
from murmurate.datasets._image_world import ImageFilesWorld
from murmurate.datasets.image_files import ImageFiles, bad_image
from murmurate.datasets.image_set import ImageData, digest_of, refuse_unlearned
from murmurate.datasets.interface import Split, Subset
from murmurate.errors import Refusal, cause_of
from murmurate.ranges import NonNegativeFloat, PositiveInt, Seed
from murmurate.spec import EnvSpec, World

SUFFIXES = (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".bmp")
_IMAGES = tuple(suffix.encode() for suffix in SUFFIXES)
# images that are not decoded; to pass over them in silence would change the data set
_OTHER_IMAGES = (".gif", ".tif", ".tiff", ".ppm", ".pgm", ".jp2", ".heic", ".avif")
_ALL_IMAGES = SUFFIXES + _OTHER_IMAGES
_NO_ENDING = "file without an image's ending"  # a cause
_VALIDATION = ("val", "valid", "validation")
_PARTS = ("train", *_VALIDATION, "test")
_OTHER_PARTS = {"training": "train", "testing": "test"}  # names that are refused, and the right ones


@dataclass(frozen=True)
class FolderWorld(ImageFilesWorld):
    """Image files (JPEG, PNG, WebP or BMP) in one folder for each class.

    path: folder with ``train`` and ``val``, and optionally ``test``, each with one folder for each class; or
        directly with the folders of the classes. Without ``test``, ``val`` is the test part.
    size: side of the square images that the learner sees, in pixels. shortest: for evaluation an image's
        shorter side is scaled to so many pixels, and the square is cut from the middle.
    validation: training images held out to validate during a run, if there is no validation part: a number
        or, below 1, a share.
    test: training images held out to evaluate after a run, if there is no test part: a number or share.
    split_seed: seed of the random choice of images that are held out.
    skip_bad: leave out images that cannot be decoded, and count them.
    """

    path: str = field(default="", metadata={"place": True})
    size: PositiveInt = 224
    shortest: PositiveInt = 256
    validation: NonNegativeFloat = 0.02
    test: NonNegativeFloat = 0.05
    split_seed: Seed = 0
    skip_bad: bool = field(default=False, metadata={"place": True})

    name: ClassVar[str] = "folder"

    def load(self) -> ImageData:
        """The index of all images; its digest is of the names, sizes and labels of files. Raises Refusal for
        folders or files that are missing, empty or cannot be read, and for classes that ``train`` lacks."""
        check_sizes(self.size, self.shortest)
        if not self.path:
            raise Refusal("say where the images are: --world.path FOLDER, with a folder of each class.")
        return _read(Path(self.path), self.size, self.shortest, self.skip_bad).with_test(self.test)


def check_sizes(size: int, shortest: int) -> None:
    """Raise Refusal if a square of ``size`` pixels does not fit into an image scaled to ``shortest``."""
    if shortest < size:
        raise Refusal(
            f"world.shortest is {shortest}, and a square of world.size {size} does not fit in. Use "
            f"--world.shortest {size * 8 // 7}."
        )


@dataclass(frozen=True, eq=False)
class FolderIndex:
    """The image files below the folder ``root`` (``EncodedImages``).

    names: concatenated relative paths. starts: [n + 1], where each path begins in ``names``. sizes: [n], the
    files' sizes in bytes.
    """

    root: str
    names: bytes
    starts: NDArray[np.int64]
    sizes: NDArray[np.int64]
    labels: NDArray[np.int64]

    @property
    def nbytes(self) -> int:
        return len(self.names) + self.starts.nbytes + self.sizes.nbytes + self.labels.nbytes

    def place(self, number: int) -> Place:
        return Place(self.title(number), 0, int(self.sizes[number]))

    def title(self, number: int) -> str:
        name = self.names[self.starts[number] : self.starts[number + 1]]
        return os.path.join(self.root, os.fsdecode(name))


# once in a process: whether files have changed would take as long to find out as reading them again
@functools.lru_cache(maxsize=2)
def _read(path: Path, size: int, shortest: int, skip_bad: bool) -> ImageData:
    with _refusing_unreadable(path):
        return _read_parts(path, size, shortest, skip_bad)


@contextlib.contextmanager
def _refusing_unreadable(path: Path) -> Iterator[None]:
    """Raise Refusal if ``path`` is no folder, and for what cannot be read within this context."""
    refuse_special(path)
    if not path.is_dir():
        raise Refusal(f"{path} is no folder. Name the one with a folder of each class.")
    try:
        yield
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _loop(str(error.filename), "itself") from error
        raise Refusal(f"{error.filename or path} cannot be read: {cause_of(error)}.") from error


def _read_parts(path: Path, size: int, shortest: int, skip_bad: bool) -> ImageData:
    _check_parts(path)
    train = path / "train"
    parts = {"train": train if train.is_dir() else path}
    if train.is_dir():
        validation = [path / name for name in _VALIDATION if (path / name).is_dir()]
        if (path / "test").is_dir() and _folders(path / "test"):
            parts["test"] = path / "test"
            if validation:
                parts["validation"] = validation[0]
        elif validation:
            parts["test"] = validation[0]
    for folder in parts.values():
        if folder != parts["train"] and folder.samefile(parts["train"]):
            raise Refusal(f"{folder} is {parts['train']} itself: give it images that are not trained on.")
    classes = _folders(parts["train"])
    if not classes:
        raise Refusal(f"There is no folder of a class in {parts['train']}. Put each class into a folder.")
    for name in classes:
        if any("\ud800" <= letter <= "\udfff" for letter in name):  # bytes that ``os`` could not decode
            raise Refusal(f"{parts['train'] / name}: the name of this class is no UTF-8. Rename the folder.")
    skipped: Counter[str] = Counter()
    indices = {name: _index(folder, classes, skip_bad, skipped) for name, folder in parts.items()}
    for name, index in indices.items():
        refuse_unlearned(str(parts[name]), indices["train"].labels, index.labels, classes)

    def digest() -> str:
        arrays = [x for index in indices.values() for x in (index.sizes, index.labels, index.starts)]
        names = (np.frombuffer(index.names, np.uint8) for index in indices.values())
        return digest_of([*arrays, *names], classes)

    files = {name: ImageFiles(index, size, shortest, skip_bad) for name, index in indices.items()}
    return ImageData(
        files["train"], tuple(classes), files.get("validation"), files.get("test"), digest, skipped
    )


def _check_parts(path: Path) -> None:
    """Raise Refusal for folders of parts whose names would be taken for classes, or which would be passed
    over."""
    names = _folders(path)
    right_names = {name: _OTHER_PARTS.get(name.lower(), name.lower()) for name in names}
    if "train" not in names and not all(right in _PARTS for right in right_names.values()):
        classes = {name for name, right in right_names.items() if right not in _PARTS}
        for name in names:
            if name not in classes and classes.intersection(_folders(path / name)):
                raise Refusal(
                    f"{path / name} has folders of the classes beside it, so it is no class of its own. Move "
                    f"those into {path / 'train'}."
                )
        return  # the folders of classes
    for name, right in right_names.items():
        if right in _PARTS and right != name:
            raise Refusal(
                f"{path / name} has the name of a part, but spelled otherwise. Rename it to {right}."
            )
    if names and "train" not in names:
        raise Refusal(
            f"There is no folder train in {path}, only {', '.join(names)}. Add the training images."
        )
    if len(both := [name for name in _VALIDATION if name in names]) > 1:
        raise Refusal(
            f"{path} has the folders {' and '.join(both)}, each a validation part. Move one elsewhere."
        )


def _folders(folder: Path) -> list[str]:
    """The names of the folders in ``folder``, sorted, without hidden ones."""
    with os.scandir(folder) as entries:
        return sorted(e.name for e in entries if not is_clutter(e.name) and e.is_dir())


def _index(folder: Path, classes: list[str], skip_bad: bool, skipped: Counter[str]) -> FolderIndex:
    unknown_class = min(set(_folders(folder)) - set(classes), default=None)
    if unknown_class is not None:
        raise Refusal(
            f"{folder / unknown_class} is of a class without a folder in train. Remove it, or add the folder."
        )
    names, sizes, labels = [], [], []
    empty_classes = []
    above = (os.path.realpath(folder),)
    for label, name in enumerate(classes):
        if not (folder / name).is_dir():
            continue
        files = sorted(_files(folder / name, os.fsencode(name), above, skipped))
        if not files:
            empty_classes.append(name)
        for file, size in files:
            if size and file.lower().endswith(_IMAGES):
                names.append(file)
                sizes.append(size)
                labels.append(label)
            elif skip_bad:
                skipped["image of another type" if size else "empty file"] += 1
            else:
                fault = f"it is none of {', '.join(SUFFIXES)}" if size else "it is empty"
                remedy = "Convert it" if size else "Restore it"
                raise Refusal(bad_image(str(folder / os.fsdecode(file)), fault, remedy))
    if not names:
        raise Refusal(
            f"There is no image in the folders of {folder}: no file in {', '.join(SUFFIXES)}. Put the images "
            "of each class into a folder of its own there."
        )
    if empty_classes:
        raise Refusal(
            f"There is no image in {folder / empty_classes[0]}: no file in {', '.join(SUFFIXES)}. Remove the "
            "folder, or put images of the class there."
        )
    starts = np.cumsum([0, *map(len, names)], dtype=np.int64)
    return FolderIndex(
        str(folder), b"".join(names), starts, np.array(sizes, np.int64), np.array(labels, np.int64)
    )


def _files(
    folder: Path, prefix: bytes, above: tuple[str, ...], skipped: Counter[str]
) -> Iterator[tuple[bytes, int]]:
    """(relative path, size) of the image files in the folder of a class and in folders within it, those of
    other types included. above: real paths of the folders that are being read. skipped: counts the other
    files. Raises Refusal for a loop of symbolic links."""
    real = os.path.realpath(folder) if folder.is_symlink() else os.path.join(above[-1], folder.name)
    if any(f"{path}/".startswith(f"{real.rstrip('/')}/") for path in above):
        raise _loop(str(folder), real)
    with os.scandir(folder) as entries:
        for entry in entries:
            name = prefix + b"/" + os.fsencode(entry.name)
            if is_clutter(entry.name):
                continue
            if entry.is_dir():
                yield from _files(Path(entry.path), name, (*above, real), skipped)
            elif not entry.is_file():
                continue
            elif entry.name.lower().endswith(_ALL_IMAGES):
                yield name, entry.stat().st_size
            else:
                skipped[_NO_ENDING] += 1


def _loop(link: str, target: str) -> Refusal:
    whole = target if target == "itself" else f"{target}, a folder that it is in"
    return Refusal(
        f"{link} is a symbolic link to {whole}, so that reading it would not end. Remove the link."
    )


# -- images beside those of a run -------------------------------------------------------------------


@dataclass(frozen=True)
class OtherImages(World):
    """Images that a run is evaluated on in place of its own: its test part. The other parts are empty.

    world: the run's. path: a folder with a folder of each class. classes: names of the run's classes, in the
        order of labels, of which the folder may lack some.
    """

    world: ImageFilesWorld
    path: str
    classes: tuple[str, ...]

    unit: ClassVar[str] = "images"

    @property
    def name(self) -> str:
        return self.world.name

    def spec(self, fingerprint: Mapping[str, Any] | None = None) -> EnvSpec:
        return self.world.spec(fingerprint)

    def divided(self) -> Split:
        """The images, prepared as the run's test images are. Raises Refusal for a folder with the name of no
        class, and as ``FolderWorld.load`` for what cannot be read."""
        folder = Path(self.path)
        with _refusing_unreadable(folder):
            for name in _folders(folder):
                if name not in self.classes:
                    some = ", ".join(self.classes[:3]) + (", ..." if len(self.classes) > 3 else "")
                    raise Refusal(
                        f"There is no class {name}, as {folder / name} is named: the run's are {some}. Name "
                        "the folder that has a folder of each class, and move others elsewhere."
                    )
            left_out: Counter[str] = Counter()
            index = _index(folder, list(self.classes), self.world.skip_bad, left_out)
        if left_out:
            causes = ", ".join(f"{count} ({cause})" for cause, count in left_out.items())
            warnings.warn(f"files of {folder} that are left out: {causes}", stacklevel=2)
        images = ImageFiles(index, self.world.size, self.world.shortest, self.world.skip_bad)
        none = Subset(images, np.empty(0, np.int64))
        return Split(none, none, images)


def other_images(
    world: World, path: str | os.PathLike[str], fingerprint: Mapping[str, Any] | None
) -> OtherImages:
    """The images in the folder ``path``, to evaluate a run on ``world``.

    fingerprint: of the run's data set, which is not read then. Raises Refusal if the run does not learn from
    image files, and for an empty path.
    """
    if not world.has_image_files:
        raise Refusal(
            f"--images (images in Python) is for runs on image files, and the world of this one is "
            f"{world.name}. Leave it out; predict in Python takes arrays of other images (docs/images.md)."
        )
    if not os.fspath(path):
        raise Refusal("images is an empty path: name the folder that has a folder of each class.")
    own = cast(ImageFilesWorld, world)
    classes = (own.fingerprint() if fingerprint is None else fingerprint)["classes"]
    return OtherImages(own, os.path.expanduser(path), tuple(classes))
