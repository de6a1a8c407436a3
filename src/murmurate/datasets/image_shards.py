"""Images in tar files, in WebDataset's layout: the files of a sample follow one another and differ in their
suffix alone, ``n01440764_10.jpg`` and ``n01440764_10.cls``."""

from __future__ import annotations

import functools
import itertools
import json
import os
import re
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar

import numpy as np
from numpy.typing import NDArray

from murmurate.datasets._archives import refuse_special
from murmurate.datasets._files import is_clutter, state_of
from murmurate.datasets._image_decoding import Place, read_encoded
from murmurate.datasets._image_headers import ImageError
from murmurate.datasets._image_world import ImageFilesWorld
from murmurate.datasets._record_errors import refuse_unreadable
from murmurate.datasets._tar_files import CompressedTar, TarError, TarMember, members, name_at
from murmurate.datasets.image_files import ImageFiles, bad_image
from murmurate.datasets.image_folder import SUFFIXES, check_sizes
from murmurate.datasets.image_set import ImageData, digest_of, refuse_unlearned
from murmurate.errors import Refusal
from murmurate.ranges import NonNegativeFloat, PositiveInt, Range, Seed

_BRACES = re.compile(r"\{([^{}]*)\}")
_MOST_SHARDS = 100_000
_LABEL_KEYS = ("cls", "label", "class", "target")  # keys under which a .json file may have the label
_MOST_CLASSES = 1_000_000
_NUMBER = f"integer from 0 to {_MOST_CLASSES - 1:,}"
_NAMED_KEYS = f"{', '.join(_LABEL_KEYS[:-1])} or {_LABEL_KEYS[-1]}"


@dataclass(frozen=True)
class ShardsWorld(ImageFilesWorld):
    """Images in uncompressed tar files in WebDataset's layout, labelled by ``key.cls`` (a number in text) or
    ``key.json`` (with the label as ``cls``, ``label``, ``class`` or ``target``).

    path: pattern such as ``/data/train-{000000..000146}.tar``, of tar files or of folders with tar files, or
        such a folder. test_path: the same for the test part; none draws it from the training images.
    classes: number of classes; none is the greatest label + 1.
    size: side of the square images that the learner sees, in pixels. shortest: for evaluation an image's
        shorter side is scaled to so many pixels, and the square is cut from the middle.
    validation: training images held out to validate during a run: a number or, below 1, a share.
    test: training images held out to evaluate after a run, if there is no ``test_path``: a number or share.
    split_seed: seed of the random choice of images that are held out.
    skip_bad: leave out damaged files and samples, and count them.
    """

    path: str = field(default="", metadata={"place": True})
    test_path: str | None = field(default=None, metadata={"place": True})
    classes: Annotated[int, Range(1, _MOST_CLASSES)] | None = None
    size: PositiveInt = 224
    shortest: PositiveInt = 256
    validation: NonNegativeFloat = 0.02
    test: NonNegativeFloat = 0.05
    split_seed: Seed = 0
    skip_bad: bool = field(default=False, metadata={"place": True})

    name: ClassVar[str] = "shards"

    def __post_init__(self) -> None:
        for name in ("path", "test_path"):
            if getattr(self, name):  # a run may be resumed from another folder
                object.__setattr__(self, name, _absolute(getattr(self, name)))

    def load(self) -> ImageData:
        """The index of all images; its digest is of the shards' names, and of the places and labels of the
        images in them. Raises Refusal for shards that are missing, or damaged without ``skip_bad``, that are
        named twice or in both parts, and for images without a valid label."""
        check_sizes(self.size, self.shortest)
        if not self.path:
            raise Refusal("say where the shards are: --world.path 'train-{000000..000146}.tar'.")
        patterns = (self.path, self.test_path or "")
        state = state_of(*(path for pattern in patterns if pattern for path in expand(pattern)))
        data = _read(*patterns, self.classes, self.size, self.shortest, self.skip_bad, state)
        return data.with_test(self.test)


@dataclass(frozen=True, eq=False)
class ShardIndex:
    """The images in tar files (``EncodedImages``). shards: [n], index in ``paths`` of each image's tar file.
    offsets, sizes: [n], where its bytes are in that file. labels: [n]."""

    paths: tuple[str, ...]
    shards: NDArray[np.int64]
    offsets: NDArray[np.int64]
    sizes: NDArray[np.int64]
    labels: NDArray[np.int64]

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in (self.shards, self.offsets, self.sizes, self.labels))

    def place(self, number: int) -> Place:
        path = self.paths[self.shards[number]]
        return Place(path, int(self.offsets[number]), int(self.sizes[number]))

    def title(self, number: int) -> str:
        path, offset, _ = self.place(number)
        name = name_at(Path(path), offset)
        return f"{path}, the image at byte {offset:,}" if name is None else _title(path, _key(name)[0])


def _absolute(pattern: str) -> str:
    """``pattern`` with absolute paths; it may begin with a list of them: ``{/data1,/data2}/a.tar``."""
    beginning = _BRACES.match(pattern)
    if beginning is None or not any(os.path.isabs(path) for path in beginning[1].split(",")):
        return os.path.abspath(pattern)
    paths = [os.path.join(os.getcwd(), path) for path in beginning[1].split(",")]
    return f"{{{','.join(paths)}}}{pattern[beginning.end() :]}"


def expand(pattern: str) -> list[str]:
    """The paths of a pattern with ``{000000..000146}`` and ``{a,b}``; in place of a folder its tar files,
    sorted. Raises Refusal for an invalid range, a * or ?, too many files, and a folder without a tar file."""
    if Path(pattern).is_dir():
        return _tar_files(pattern)
    if set("*?") & set(pattern) and not Path(pattern).exists():
        raise Refusal(
            f"{pattern} has a * or ?, which are not patterns here. Name a folder, which means all .tar files "
            "in it, or a pattern with a range or list, such as train-{000000..000146}.tar."
        )
    pieces = _BRACES.split(pattern)
    choices = [_choices(piece) if k % 2 else [piece] for k, piece in enumerate(pieces)]
    count = np.prod([float(len(choice)) for choice in choices])
    if count > _MOST_SHARDS:
        raise Refusal(f"{pattern} means {count:,.0f} files; {_MOST_SHARDS:,} is the most.")
    paths = ["".join(parts) for parts in itertools.product(*choices)]
    return [file for path in paths for file in (_tar_files(path) if os.path.isdir(path) else [path])]


def _tar_files(folder: str) -> list[str]:
    files = sorted(str(path) for path in Path(folder).glob("*.tar") if not is_clutter(path.name))
    if not files:
        raise Refusal(f"There is no tar file in {folder}. Name another folder, or a pattern of files.")
    return files


def _choices(piece: str) -> list[str]:
    first, dots, last = piece.partition("..")
    if not dots:
        return piece.split(",")
    if not (first.isdecimal() and last.isdecimal()) or int(last) < int(first):
        raise Refusal(f"{{{piece}}} is no range of numbers. Write {{000000..000146}}.")
    if int(last) - int(first) >= _MOST_SHARDS:
        count = 1 + int(last) - int(first)
        raise Refusal(f"{{{piece}}} means {count:,} files; {_MOST_SHARDS:,} is the most.")
    return [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]


@functools.lru_cache(maxsize=2)
def _read(
    path: str, test_path: str, classes: int | None, size: int, shortest: int, skip_bad: bool, state: str
) -> ImageData:
    """state: of the files, for the cache."""
    if shared := _files_of(path) & _files_of(test_path):
        raise Refusal(
            f"{min(shared)} is in both world.path and world.test_path, so images would be tested that are "
            "trained on. Leave it out of one."
        )
    skipped: Counter[str] = Counter()
    indices = {
        part: _index(pattern, skip_bad, skipped)
        for part, pattern in (("train", path), ("test", test_path))
        if pattern
    }
    for part, index in indices.items():
        refuse_unlearned(test_path if part == "test" else path, indices["train"].labels, index.labels)
    greatest = max(int(index.labels.max()) for index in indices.values())
    count = greatest + 1 if classes is None else classes
    if greatest >= count:
        raise Refusal(
            f"{path} has the label {greatest:,}, and world.classes is {count:,}: labels begin at 0. Use "
            f"--world.classes {greatest + 1}."
        )
    names = tuple(str(label) for label in range(count))

    def digest() -> str:
        arrays = [x for i in indices.values() for x in (i.shards, i.offsets, i.sizes, i.labels)]
        return digest_of(arrays, [Path(p).name for index in indices.values() for p in index.paths])

    files = {part: ImageFiles(index, size, shortest, skip_bad) for part, index in indices.items()}
    return ImageData(files["train"], names, None, files.get("test"), digest, skipped)


def _files_of(pattern: str) -> set[str]:
    return set(map(os.path.realpath, expand(pattern))) if pattern else set()


def _index(pattern: str, skip_bad: bool, skipped: Counter[str]) -> ShardIndex:
    paths = expand(pattern)
    if repeated := [path for path, count in Counter(map(os.path.realpath, paths)).items() if count > 1]:
        raise Refusal(f"{pattern} means {repeated[0]} more than once. Name each file once.")
    columns = [array("q") for _ in range(4)]  # shards, offsets, sizes, labels
    for number, path in enumerate(paths):
        refuse_special(Path(path))
        try:
            with refuse_unreadable(path):
                for row in _samples(Path(path), skip_bad, skipped):
                    for column, value in zip(columns, (number, *row), strict=True):
                        column.append(value)
        except CompressedTar as error:
            raise Refusal(f"{path}: {error}.") from error
        except TarError as error:
            if not skip_bad:
                raise Refusal(bad_image(path, str(error))) from error
            skipped["damaged tar file"] += 1
    if not columns[0]:
        raise Refusal(
            f"{pattern} has no image with a label: no key.jpg beside a key.cls, or a key.json with "
            f"{_NAMED_KEYS}, that holds an {_NUMBER}. Write the number of each image's class into key.cls."
        )
    return ShardIndex(tuple(paths), *(np.array(column, np.int64) for column in columns))


def _samples(path: Path, skip_bad: bool, skipped: Counter[str]) -> Iterator[tuple[int, int, int]]:
    """(offset, size, label) of each image of a tar file. Raises TarError for a damaged file, after the images
    before the damage; unless ``skip_bad``, Refusal for an invalid sample."""
    damage: list[TarError] = []
    found = (file for file in _until_damage(path, damage) if not _is_clutter(file.name))
    for key, files in itertools.groupby(found, lambda member: _key(member.name)[0]):
        try:
            yield _sample({_key(file.name)[1]: file for file in files}, path)
        except ImageError as error:
            if damage:  # it is the reason why the last sample is incomplete
                break
            if not skip_bad:
                title, (cause, detail) = _title(path, key), error.args
                if cause == _NO_LABEL and not _has_sample(path):
                    raise Refusal(
                        f"{title}: {detail}, and no other image of the file has a label either. Write the "
                        "number of each image's class, from 0 up, into key.cls."
                    ) from error
                remedy = "Correct the label" if cause == _NO_LABEL else "Restore it"
                raise Refusal(bad_image(title, detail, remedy)) from error
            skipped[error.args[0]] += 1
    if damage:
        raise damage[0]


def _has_sample(path: Path) -> bool:
    """Whether a tar file has an image with a label."""
    try:
        return any(True for _ in _samples(path, True, Counter()))
    except (TarError, OSError):
        return False


def _title(path: Path | str, key: bytes) -> str:
    return f"{path}, sample {key.decode('utf-8', 'backslashreplace')}"


def _is_clutter(name: bytes) -> bool:
    """Whether a member is a hidden file, or one that macOS adds to archives."""
    *folders, file = name.split(b"/")
    return file.startswith(b".") or b"__MACOSX" in folders


def _until_damage(path: Path, damage: list[TarError]) -> Iterator[TarMember]:
    """The members before the first damage, which is appended to ``damage``."""
    try:
        yield from members(path)
    except TarError as error:
        damage.append(error)


def _key(name: bytes) -> tuple[bytes, bytes]:
    """(key, suffix) of a member: its path up to the first dot of its name, and the rest in lower case."""
    folder, slash, file = name.rpartition(b"/")
    key, _, suffix = file.partition(b".")
    return folder + slash + key, suffix.lower()


def _sample(files: Mapping[bytes, TarMember], path: Path) -> tuple[int, int, int]:
    """(offset, size, label) of a sample's image. files: its members by suffix. Raises ImageError."""
    image = next((file for kind, file in files.items() if b"." + kind in _IMAGES), None)
    if image is None:
        names = b", ".join(files).decode("utf-8", "backslashreplace")
        raise ImageError("sample without an image", f"it has no image, only {names}")
    if not image.size:
        raise ImageError("empty file", "its image is empty")
    label = next((files[kind] for kind in (b"cls", b"json") if kind in files), None)
    if label is None:
        raise ImageError(_NO_LABEL, "it has no .cls and no .json")
    text = label.content
    if text is None:
        text = read_encoded(Place(str(path), label.offset, label.size))
    return image.offset, image.size, _label(text, label.name.lower().endswith(b".json"))


_IMAGES = frozenset(suffix.encode() for suffix in SUFFIXES)
_NO_LABEL = "sample without a label"  # a cause


def _label(text: bytes, is_json: bool) -> int:
    try:
        if is_json:
            values = json.loads(text)
            value = next(values[key] for key in _LABEL_KEYS if key in values)
        else:
            value = int(text)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _MOST_CLASSES:
            raise ValueError
    except (ValueError, TypeError, StopIteration, RecursionError) as error:
        shown = text[:60].decode("utf-8", "backslashreplace")
        if is_json:
            detail = f"its .json is {shown!r}, with no {_NUMBER} under {_NAMED_KEYS}"
        else:
            detail = f"its label is {shown!r}, no {_NUMBER}"
        raise ImageError(_NO_LABEL, detail) from error
    return value
