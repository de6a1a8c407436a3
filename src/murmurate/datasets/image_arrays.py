"""Images and labels as arrays in an ``.npz`` file."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from murmurate.datasets._archives import load_arrays, refuse_special
from murmurate.datasets._files import state_of
from murmurate.datasets._image_world import ImageWorld
from murmurate.datasets._record_errors import refuse_unreadable
from murmurate.datasets.image_set import ImageData, ImageSet, checked_labels, refuse_unlearned
from murmurate.errors import Refusal
from murmurate.ranges import NonNegativeFloat, Seed

# names of the arrays (images, labels) of each part: those of MedMNIST, of Keras, and of a file with one part
_NAMES = {
    "train": (("train_images", "train_labels"), ("x_train", "y_train"), ("images", "labels")),
    "validation": (("val_images", "val_labels"), ("x_val", "y_val")),
    "test": (("test_images", "test_labels"), ("x_test", "y_test")),
}
_MOST_CLASSES = 1_000_000


@dataclass(frozen=True)
class ArraysWorld(ImageWorld):
    """Images uint8 [n, H, W] or [n, H, W, C] and labels [n] in an ``.npz`` file.

    path: path of the file, with arrays train_images and train_labels, or x_train and y_train, or images and
        labels; val_images, test_images and so on are optional.
    validation: training images held out to validate during a run, if the file has no validation part: a
        number or, below 1, a share.
    test: training images held out to evaluate after a run, if the file has no test part: a number or share.
    split_seed: seed of the random choice of images that are held out.
    """

    path: str = field(default="", metadata={"place": True})
    validation: NonNegativeFloat = 0.02
    test: NonNegativeFloat = 0.05
    split_seed: Seed = 0

    name: ClassVar[str] = "arrays"

    def load(self) -> ImageData:
        """All images. Raises Refusal for a file that is damaged, or holds other arrays."""
        if not self.path:
            raise Refusal("say where the images are: --world.path FILE.npz.")
        return _read(Path(self.path), state_of(self.path)).with_test(self.test)


@functools.lru_cache(maxsize=2)
def _read(path: Path, state: str) -> ImageData:
    """state: see ``state_of``; for the cache, as a changed file is read again."""
    refuse_special(path)
    try:
        with refuse_unreadable(path):
            arrays = load_arrays(path)
    except ValueError as error:
        raise Refusal(
            f"{path} is no .npz file of arrays: {error}. Restore it, or save it with np.savez."
        ) from error
    names_of_parts = _names_of_parts(path, arrays)
    if "train" not in names_of_parts:
        *first, last = (" and ".join(names) for names in _NAMES["train"])
        raise Refusal(
            f"{path} holds {', '.join(arrays) or 'nothing'}; it should hold {', '.join(first)}, or {last}. "
            "Rename its arrays."
        )
    parts = {part: _part(path, arrays, *names) for part, names in names_of_parts.items()}
    shapes = {part: images.shape for part, images in parts.items()}
    if len(set(shapes.values())) > 1:
        raise Refusal(f"{path} has images of several sizes: {shapes}. Scale them to one.")
    for part in parts.keys() - {"train"}:
        refuse_unlearned(f"{path}, {names_of_parts[part][1]}", parts["train"].labels, parts[part].labels)
    count = 1 + max(int(images.labels.max()) for images in parts.values())
    classes = tuple(str(label) for label in range(count))
    return ImageData(parts["train"], classes, parts.get("validation"), parts.get("test"))


def _names_of_parts(path: Path, arrays: Mapping[str, NDArray[Any]]) -> dict[str, tuple[str, str]]:
    """The names (images, labels) of each part that ``arrays`` holds; other arrays are passed over.

    Raises Refusal for images without labels, labels without images, a part that is there twice, and a name
    that seems to be misspelt.
    """
    known = [name for spellings in _NAMES.values() for names in spellings for name in names]
    for name in arrays.keys() - set(known):
        if meant := difflib.get_close_matches(name, known, n=1, cutoff=0.9):
            raise Refusal(f"{path} holds {name}. Rename it {meant[0]}, or leave it out.")
    names_of_parts: dict[str, tuple[str, str]] = {}
    for part, spellings in _NAMES.items():
        for names in spellings:
            held = [name for name in names if name in arrays]
            if len(held) == 1:
                (missing,) = set(names) - set(held)
                raise Refusal(f"{path} holds {held[0]} without {missing}. Add {missing}, or leave both out.")
            if held and part in names_of_parts:
                first = names_of_parts[part][0]
                raise Refusal(f"{path} holds both {first} and {names[0]}. Leave one of them out.")
            if held:
                names_of_parts[part] = names
    return names_of_parts


def _part(path: Path, arrays: Mapping[str, NDArray[Any]], images: str, labels: str) -> ImageSet:
    pixels, numbers = arrays[images], arrays[labels]
    if pixels.dtype != np.uint8 or pixels.ndim not in (3, 4) or not pixels.size:
        raise Refusal(
            f"{path}: {images} is {pixels.dtype} {list(pixels.shape)}; it should be uint8 [n, height, width] "
            f"or [n, height, width, channels]. {_type_remedy(images, pixels)}"
        )
    if pixels.ndim == 4 and pixels.shape[3] not in (1, 3):
        raise Refusal(
            f"{path}: {images} is {list(pixels.shape)}; the last number should be of channels, 1 or 3. "
            f"{_channels_remedy(images, pixels.shape)}"
        )
    if numbers.ndim == 2 and numbers.shape[1] == 1:  # as in MedMNIST
        numbers = numbers[:, 0]
    if numbers.dtype.kind not in "iu" or numbers.shape != pixels.shape[:1]:
        raise Refusal(
            f"{path}: {labels} is {numbers.dtype} {list(numbers.shape)}; it should be whole numbers, one for "
            f"each of the {len(pixels):,} images. {_labels_remedy(labels, numbers, len(pixels))}"
        )
    pixels = np.ascontiguousarray(pixels if pixels.ndim == 4 else pixels[..., None])
    explain = functools.partial(_label_remedy, labels)
    return ImageSet(pixels, checked_labels(numbers, _MOST_CLASSES, f"{path}, {labels}", explain))


def _type_remedy(name: str, pixels: NDArray[Any]) -> str:
    if not pixels.size:
        return "Save at least one image."
    if pixels.ndim not in (3, 4):
        return "Reshape it."
    kind = pixels.dtype.kind
    if kind == "b":
        return f'Save 255 * {name}.astype("uint8").'
    if kind not in "iuf":
        return "Save the pixels as numbers from 0 to 255."
    least, greatest = pixels.min(), pixels.max()
    if not (np.isfinite(least) and np.isfinite(greatest)):
        return "Some of its values are not finite: replace them by numbers from 0 to 255."
    if least < 0 or greatest > 255:
        return f"Scale its values, which are from {least:g} to {greatest:g}, to whole numbers from 0 to 255."
    if kind != "f":
        return f'Save {name}.astype("uint8").'
    return f'Save {f"(255 * {name})" if greatest <= 1 else name}.round().astype("uint8").'


def _channels_remedy(name: str, shape: tuple[int, ...]) -> str:
    if shape[1] in (1, 3):
        return f"Transpose it: {name}.transpose(0, 2, 3, 1)."
    if shape[3] == 4:
        return f"Drop the fourth channel, which is usually transparency: {name}[..., :3]."
    if shape[1] == 4:
        return f"Drop the fourth channel and transpose it: {name}[:, :3].transpose(0, 2, 3, 1)."
    if shape[3] == 2:
        return f"Keep one channel: {name}[..., :1]."
    return f"Keep three channels, such as {name}[..., :3], or one."


def _labels_remedy(name: str, numbers: NDArray[Any], images: int) -> str:
    if not numbers.ndim or len(numbers) != images:
        return "Save one label for each image, in the order of the images."
    if numbers.ndim == 2 and numbers.dtype.kind in "biuf":
        return f"If these are one-hot vectors, save {name}.argmax(1)."
    if numbers.ndim == 1 and numbers.dtype.kind in "bf":
        return f'Save {name}.astype("int64").'
    return f"Number the classes from 0: np.unique({name}, return_inverse=True)[1]."


def _label_remedy(name: str, label: int) -> str:
    limit = "labels are integers from 0 up" if label < 0 else f"{_MOST_CLASSES - 1:,} is the greatest"
    return f"{limit}. Number the classes from 0: np.unique({name}, return_inverse=True)[1]."
