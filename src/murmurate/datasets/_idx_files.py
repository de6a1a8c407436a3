"""Arrays in idx files, the format of MNIST and Fashion-MNIST (LeCun et al.): a magic number, the sizes as
big-endian 32-bit integers, then bytes."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from murmurate.datasets._archives import refuse_special
from murmurate.errors import Refusal, cause_of

_UNSIGNED_BYTE = 8  # code of the type uint8 in the magic number
_MOST_PACKED = 1032  # most bytes that deflate can pack in one byte


def read_idx(path: Path, dimensions: int) -> NDArray[np.uint8]:
    """The array of unsigned bytes in an idx file, gzip or not. Raises Refusal for another file."""
    refuse_special(path)
    try:
        size = path.stat().st_size
        if path.suffix == ".gz":
            with gzip.open(path, "rb") as file:
                return _read(file, dimensions, size * _MOST_PACKED)  # type: ignore[arg-type]
        with open(path, "rb") as plain:
            return _read(plain, dimensions, size)
    except OSError as error:
        raise Refusal(f"{path} cannot be read: {cause_of(error)}. Restore the file.") from error
    except (ValueError, EOFError, zlib.error, MemoryError) as error:
        raise Refusal(f"{path} is no idx file of images or labels: {error}. Restore the file.") from error


def _read(file: IO[bytes], dimensions: int, most: int) -> NDArray[np.uint8]:
    """The array in an open idx file. most: greatest number of bytes that the file can hold."""
    head = file.read(4 + 4 * dimensions)
    if len(head) < 4 + 4 * dimensions:
        raise ValueError("it ends in its header")
    zero, kind, file_dimensions, *shape = struct.unpack(f">HBB{dimensions}I", head)
    if zero or kind != _UNSIGNED_BYTE or file_dimensions != dimensions:
        raise ValueError(
            f"it begins with {head[:4].hex()}, not with 0000{_UNSIGNED_BYTE:02x}{dimensions:02x}"
        )
    needed = math.prod(shape)
    if needed > most:
        raise ValueError(f"its header promises {needed:,} bytes, and there cannot be so many")
    values = np.empty(needed, np.uint8)
    read, view = 0, values.data
    while read < needed:
        part = file.read(min(needed - read, 1 << 24))
        if not part:
            raise ValueError(f"its header promises {needed:,} bytes, and there are {read:,}")
        view[read : read + len(part)] = part
        read += len(part)
    if file.read(1):
        raise ValueError(f"there are more bytes than the {needed:,} of its header")
    return values.reshape(shape)
