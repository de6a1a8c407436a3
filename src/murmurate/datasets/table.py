"""Tables of numbers, and how they are read from files."""

from __future__ import annotations

import contextlib
import hashlib
import io
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from numpy.typing import ArrayLike, NDArray

from murmurate.datasets._archives import load_arrays, refuse_special
from murmurate.datasets._lines import TolerantGzip
from murmurate.errors import Refusal

_BLOCK = 1 << 16  # rows that are read at a time
_LONGEST_HEADER = 1_000_000  # lines before the first row
_SEPARATORS = (",", ";", "\t")


@dataclass(frozen=True, eq=False)
class Table:
    """n rows of D numbers. values: [n, D]. Raises Refusal for another kind of array."""

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
        """D, the number of columns."""
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
    """The table in an ``.npy`` file (memory-mapped), ``.npz`` file (with one array) or text file (gzip or
    not).

    Text has one row on each line, with commas, semicolons, tabs or spaces between numbers, and optionally a
    first line with the names of the columns. Raises Refusal that names the line or row with an error.
    """
    refuse_special(path)
    try:
        table = Table(_read(path))
        if not len(table):
            raise Refusal("it has no row.")
        table.check()
    except OSError as error:
        raise Refusal(f"{path} cannot be read: {error.strerror or error}.") from error
    except Refusal as refusal:
        raise Refusal(str(refusal) if str(path) in str(refusal) else f"{path}: {refusal}") from refusal
    except MemoryError as error:
        raise Refusal(
            f"{path} does not fit in memory ({error}). Save it with np.save: it is mapped."
        ) from error
    except Exception as error:  # numpy and gzip raise a dozen kinds of exceptions for damaged files
        raise Refusal(f"{path} is no table of numbers: {error}.") from error
    return table


def _read(path: Path) -> NDArray[Any]:
    if path.suffix == ".npy":
        return _as_columns(np.load(path, mmap_mode="r", allow_pickle=False))
    if path.suffix == ".npz":
        arrays = load_arrays(path)
        if len(arrays) != 1:
            raise Refusal(f"it holds {list(arrays)}; a table's file holds one array.")
        return _as_columns(next(iter(arrays.values())))
    separator, skipped = _layout(path)
    with warnings.catch_warnings(), _text(path) as lines:
        warnings.filterwarnings("ignore", message=".*input contained no data")
        return np.loadtxt(lines, delimiter=separator, skiprows=skipped, ndmin=2, dtype=np.float64)


def _as_columns(values: NDArray[Any]) -> NDArray[Any]:
    """A vector [n] as one column [n, 1]; a matrix as it is."""
    return values[:, None] if values.ndim == 1 else values


@contextlib.contextmanager
def _text(path: Path) -> Iterator[TextIO]:
    """The lines of a file, gzip or not."""
    with open(path, "rb") as file:
        if path.suffix == ".gz":
            unpacked = TolerantGzip(file, path)
            yield io.TextIOWrapper(io.BufferedReader(unpacked), encoding="utf-8-sig")
            if unpacked.damage:
                raise Refusal(f"{unpacked.damage}.")
        else:
            yield io.TextIOWrapper(file, encoding="utf-8-sig")


def _layout(path: Path) -> tuple[str | None, int]:
    """(separator between numbers, None for spaces; number of lines before the first row)."""
    with _text(path) as lines:
        for number, line in enumerate(lines):
            if number == _LONGEST_HEADER:
                raise Refusal(f"its first {_LONGEST_HEADER:,} lines hold no row.")
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
