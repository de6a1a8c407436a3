"""Tables of numbers, and reading them from files."""

from __future__ import annotations

import gzip
import hashlib
import warnings
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from murmurate.errors import Refusal

_BLOCK = 1 << 16  # rows that are read at a time
_SEPARATORS = (",", ";", "\t")


@dataclass(frozen=True, eq=False)
class Table:
    """n rows of D numbers, [n, D]. Raises Refusal for another kind of array."""

    values: NDArray[Any]

    def __post_init__(self) -> None:
        x = self.values
        if not isinstance(x, np.ndarray) or x.ndim != 2 or x.dtype.kind not in "biuf" or not x.shape[1]:
            shape, kind = getattr(x, "shape", "no shape"), getattr(x, "dtype", type(x).__name__)
            raise Refusal(
                f"A table is an array of numbers [rows, columns], and this is {kind} of shape {shape}."
            )

    def __len__(self) -> int:
        return len(self.values)

    @property
    def columns(self) -> int:
        """D."""
        return int(self.values.shape[1])

    @cached_property
    def digest(self) -> str:
        """A hash of type, shape and all numbers."""
        digest = hashlib.blake2b(f"{self.values.dtype.str} {self.values.shape}".encode(), digest_size=16)
        for first in range(0, len(self), _BLOCK):
            digest.update(np.ascontiguousarray(self.values[first : first + _BLOCK]).data)
        return digest.hexdigest()

    def select(self, rows: ArrayLike) -> Table:
        """A copy of some rows, in the given order; ``rows`` are numbers or a mask [n]."""
        return Table(self.values[np.asarray(rows)])

    def check(self) -> None:
        """Raise Refusal, naming the first row with a number that is not finite, or the first column that is
        constant."""
        varies = np.zeros(self.columns, np.bool_)
        for first in range(0, len(self), _BLOCK):
            block = self.values[first : first + _BLOCK]
            varies |= (block != self.values[0]).any(0)
            wrong = ~np.isfinite(block).all(1)
            if wrong.any():
                row = first + int(wrong.argmax())
                raise Refusal(
                    f"Row {row} (from 0) is {self.values[row].tolist()}: a value is missing or infinite. "
                    "Leave such rows out, or fill them in."
                )
        if len(self) and not varies.all():
            raise Refusal(f"Column {int(varies.argmin())} (from 0) is the same in every row. Leave it out.")


def read_table(path: Path) -> Table:
    """The table in an ``.npy`` (mapped, not read), ``.npz`` (of one array) or text file, gzip or not.

    Text has a row a line, with commas, semicolons, tabs or spaces between numbers, and optionally a first
    line with the names of the columns. Raises Refusal that names the line or row that is wrong.
    """
    try:
        table = Table(_read(path))
        if not len(table):
            raise Refusal("it has no row.")
        table.check()
    except OSError as error:
        raise Refusal(f"{path} cannot be read: {error.strerror or error}.") from error
    except (ValueError, EOFError) as error:
        raise Refusal(f"{path} is no table of numbers: {error}.") from error
    except Refusal as refusal:
        raise Refusal(f"{path}: {refusal}") from refusal
    return table


def _read(path: Path) -> NDArray[Any]:
    if path.suffix == ".npy":
        return _as_columns(np.load(path, mmap_mode="r", allow_pickle=False))
    if path.suffix == ".npz":
        with np.load(path, allow_pickle=False) as arrays:
            if len(arrays.files) != 1:
                raise Refusal(f"it holds {arrays.files}; a table's file holds one array.")
            return _as_columns(arrays[arrays.files[0]])
    separator, skipped = _layout(path)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*input contained no data")
        return np.loadtxt(path, delimiter=separator, skiprows=skipped, ndmin=2, dtype=np.float64)


def _as_columns(values: NDArray[Any]) -> NDArray[Any]:
    return values[:, None] if values.ndim == 1 else values


def _layout(path: Path) -> tuple[str | None, int]:
    """(the separator of numbers, None for spaces; the number of lines before the first row)."""
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        for number, line in enumerate(lines):
            text = line.partition("#")[0].strip()
            if not text:
                continue
            separator = next((s for s in _SEPARATORS if s in text), None)
            has_names = not any(_is_number(cell) for cell in text.split(separator))
            return separator, number + has_names
    return None, 0


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True
