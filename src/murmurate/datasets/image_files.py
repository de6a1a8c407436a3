"""Sets of images that stay encoded in files until they are selected."""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from murmurate.datasets._image_decoding import Place, centre_crop, checked_header, decode_crop, read_encoded
from murmurate.datasets._image_headers import ImageError
from murmurate.datasets._record_errors import refuse_unreadable
from murmurate.datasets.image_set import ImageBatch
from murmurate.errors import Refusal, printable
from murmurate.native.cores import usable_cores


class EncodedImages(Protocol):
    """An index of n encoded images."""

    @property
    def labels(self) -> NDArray[np.int64]:
        """[n] int64, the numbers of classes."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the index takes."""
        ...

    def place(self, number: int) -> Place:
        """Where the bytes of an encoded image are."""
        ...

    def title(self, number: int) -> str:
        """The name of an image in messages."""
        ...


@dataclass(frozen=True, eq=False)
class ImageFiles:
    """n images in files (an ``ExampleSet``).

    size: side of the square images that ``select`` returns: an image's shorter side is scaled to ``shortest``
    pixels, and the square is cut from the middle. skip_bad: leave out images that cannot be decoded.
    """

    encoded: EncodedImages
    size: int
    shortest: int
    skip_bad: bool = False

    def __len__(self) -> int:
        return len(self.encoded.labels)

    @property
    def labels(self) -> NDArray[np.int64]:
        return self.encoded.labels

    @property
    def shape(self) -> tuple[int, int, int]:
        """(C, H, W) of selected images."""
        return 3, self.size, self.size

    @property
    def nbytes(self) -> int:
        return self.encoded.nbytes

    def select(self, examples: ArrayLike) -> ImageBatch:
        """The images with these numbers [G], without skipped ones. Threads of this process decode them.

        Raises Refusal that names an image that cannot be decoded, unless such images are skipped.
        """
        numbers = np.asarray(examples, np.int64)
        pixels = np.empty((len(numbers), self.size, self.size, 3), np.uint8)
        good = np.ones(len(numbers), np.bool_)
        with ThreadPoolExecutor(usable_cores()) as threads:  # OpenCV decodes without the GIL
            errors = threads.map(self._decode, numbers.tolist(), pixels)
            for k, error in enumerate(errors):
                if error is not None and not self.skip_bad:
                    raise Refusal(bad_image(self.encoded.title(int(numbers[k])), error.args[1])) from error
                good[k] = error is None
        if not good.all():
            pixels, numbers = pixels[good], numbers[good]
        return ImageBatch.of(pixels, self.encoded.labels[numbers])

    def _decode(self, number: int, into: NDArray[np.uint8]) -> ImageError | None:
        try:
            _decode_centre(self.encoded.place(number), self.shortest, into)
        except ImageError as error:
            return error
        return None


def read_images(
    files: str | os.PathLike[str] | Iterable[str | os.PathLike[str]], size: int, shortest: int
) -> NDArray[np.uint8]:
    """The pixels [n, 3, size, size] of image files, red first, prepared as those of ``ImageFiles.select``.

    files: paths of n JPEG, PNG, WebP or BMP files, or a single path (n = 1).
    Raises Refusal that names a file that cannot be read or decoded.
    """
    paths = [os.fspath(path) for path in ([files] if isinstance(files, str | os.PathLike) else files)]
    pixels = np.empty((len(paths), size, size, 3), np.uint8)
    with ThreadPoolExecutor(usable_cores()) as threads:
        for _ in threads.map(lambda path, into: _read_file(path, shortest, into), paths, pixels):
            pass  # raises what a thread raised, for the first of the files
    return pixels.transpose(0, 3, 1, 2)


def _read_file(path: str, shortest: int, into: NDArray[np.uint8]) -> None:
    try:
        with refuse_unreadable(path):
            _decode_centre(Place(path, 0, os.stat(path).st_size), shortest, into)
    except ImageError as error:
        raise Refusal(f"{path}: {error.args[1]}. Restore it, or leave it out.") from error


def _decode_centre(place: Place, shortest: int, into: NDArray[np.uint8]) -> None:
    """Write the square in the middle of an image, whose shorter side is scaled to ``shortest``, to ``into``
    [size, size, 3]. Raises ImageError."""
    data = read_encoded(place)
    header = checked_header(data)
    decode_crop(data, header, centre_crop(header.height, header.width, len(into), shortest), into)


def bad_image(title: str, detail: str, remedy: str = "Restore it") -> str:
    """The message about an image that cannot be used. It can be written to files whatever its name is."""
    return f"{printable(title)}: {detail}. {remedy}, or leave such images out with --world.skip-bad true."
