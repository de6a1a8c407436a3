"""Reads arrays from ``.npz`` files; refuses to unpack files to many times their size."""

from __future__ import annotations

import math
import stat
import zipfile
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from murmurate.errors import Refusal, cause_of

# What unpacks to more than 64 MiB and to more than 100 times its size is refused: data that deflate
# compresses so much hold next to no information.
_ALLOWED_BYTES, _LARGEST_RATIO = 1 << 26, 100


def refuse_special(path: Path) -> None:
    """Raise Refusal for a pipe or a device, because reading it may never end, and for a path that cannot be
    read."""
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:
        raise Refusal(f"{path} cannot be read: {cause_of(error)}. Check the path.") from error
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise Refusal(f"{path} is a pipe or a device, and a data set is a file or a folder.")


def refuse_inflated(path: Path, packed_bytes: int, unpacked_bytes: int, remedy: str) -> None:
    """Raise Refusal if ``packed_bytes`` of a file unpack to so many bytes that they cannot be data."""
    if unpacked_bytes > max(_ALLOWED_BYTES, _LARGEST_RATIO * packed_bytes):
        raise Refusal(
            f"{packed_bytes:,} bytes of {path} unpack to {unpacked_bytes:,} or more, and no data are packed "
            f"so tightly. If it is sound, {remedy}."
        )


def load_arrays(path: Path) -> dict[str, NDArray[Any]]:
    """The arrays of an ``.npz`` file, by name. Raises OSError if it cannot be read, ValueError if it is
    damaged, Refusal for arrays of Python objects and for a file that unpacks to many times its size."""
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            unpacked = sum(member.file_size for member in members)
            refuse_inflated(path, path.stat().st_size, unpacked, "save it without compression (np.savez)")
            return {member.filename.removesuffix(".npy"): _array(archive, member) for member in members}
    except (Refusal, OSError):
        raise
    except MemoryError as error:
        raise ValueError(f"its arrays do not fit in memory ({error})") from error
    except Exception as error:  # zipfile and numpy raise a dozen kinds of exceptions for damaged files
        raise ValueError(str(error) or type(error).__name__) from error


def _array(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> NDArray[Any]:
    with archive.open(member) as file:
        shape, dtype = _header(file)
    if dtype.hasobject:
        name = member.filename.removesuffix(".npy")
        raise Refusal(
            f"{archive.filename}: {name} is an array of Python objects, which is not read because unpickling "
            f'may run code. Save it with a plain type: {name}.astype("int64"), or .astype("str") for text.'
        )
    needed = math.prod(shape) * dtype.itemsize
    if needed > member.file_size:  # checked here because numpy would first allocate the array
        raise ValueError(f"{member.filename} should have {needed:,} bytes, and has {member.file_size:,}")
    with archive.open(member) as file:
        array: NDArray[Any] = np.lib.format.read_array(file, allow_pickle=False)
    return array


def _header(file: IO[bytes]) -> tuple[tuple[int, ...], np.dtype[Any]]:
    read = np.lib.format.read_array_header_1_0
    if np.lib.format.read_magic(file) != (1, 0):
        read = np.lib.format.read_array_header_2_0
    shape, _, dtype = read(file)
    return shape, dtype
