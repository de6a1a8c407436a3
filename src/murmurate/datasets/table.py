"""Tables of numbers, and how they are read from files."""

from __future__ import annotations

import contextlib
import csv
import hashlib
import io
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np
from numpy.typing import ArrayLike, NDArray

from murmurate.datasets._archives import load_arrays, refuse_special
from murmurate.datasets._columns import long_fields
from murmurate.datasets._lines import TolerantGzip
from murmurate.datasets._record_errors import not_utf8, quoted
from murmurate.errors import Refusal, cause_of

_BLOCK = 1 << 16  # rows that are read at a time
_LONGEST_HEADER = 1_000_000  # lines before the first row
_SEPARATORS = (",", ";", "\t")
_MISSING = ("", "na", "n/a", "null", "none", "?", "-")  # what other programs write for a missing value


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

    def check(self, names: Sequence[str] = ()) -> None:
        """Raise Refusal, naming the first row with a number that is not finite, or the first column that is
        constant. names: of the columns, for the message; none: their numbers."""
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
            column = int(varies.argmin())
            name = repr(names[column]) if names else f"{column} (from 0)"
            raise Refusal(
                f"Column {name} is the same in every row. Leave it out (--world.columns names those that are "
                "taken)."
            )


def read_table(path: Path, columns: Sequence[str] = ()) -> Table:
    """The table in an ``.npy`` file (memory-mapped), ``.npz`` file (with one array) or text file (gzip or
    not).

    Text has one row on each line, with commas, semicolons, tabs or spaces between numbers, which may be
    quoted, and optionally a first line with the names of the columns; one of numbers alone, such as years, is
    a row unless ``columns`` are names in it. columns: the columns to take, in this order, by their names or
    numbers (from 0); others may hold anything. Warns of a first row such as 0,1,2. Raises Refusal that names
    the line or row with an error, or a column that is not there.
    """
    refuse_special(path)
    try:
        table = Table(_read(path, columns))
        if not len(table):
            raise Refusal("it has no row.")
        table.check(columns)
    except OSError as error:
        raise Refusal(f"{path} cannot be read: {cause_of(error)}.") from error
    except Refusal as refusal:
        raise Refusal(str(refusal) if str(path) in str(refusal) else f"{path}: {refusal}") from refusal
    except UnicodeDecodeError as error:
        cause = not_utf8(error.object, error.start)
        raise Refusal(f"{path} is no table of numbers: {cause}.") from error
    except MemoryError as error:
        raise Refusal(
            f"{path} does not fit in memory ({error}). Save it with np.save: it is mapped."
        ) from error
    except Exception as error:  # numpy and gzip raise a dozen kinds of exceptions for damaged files
        raise Refusal(f"{path} is no table of numbers: {str(error).rstrip('.')}.") from error
    return table


@long_fields()
def _read(path: Path, columns: Sequence[str]) -> NDArray[Any]:
    if path.suffix.lower() == ".npy":
        return _as_columns(np.load(path, mmap_mode="r", allow_pickle=False), columns)
    if path.suffix.lower() == ".npz":
        arrays = load_arrays(path)
        if len(arrays) != 1:
            raise Refusal(f"it holds {list(arrays)}; a table's file holds one array.")
        return _as_columns(next(iter(arrays.values())), columns)
    layout = _layout(path, set(columns))
    if columns and layout.names and layout.columns not in (0, len(layout.names)):
        raise Refusal(
            f"its header has {len(layout.names)} names, and its first row {layout.columns} values, so it is "
            "not known which column is which. Correct the header, or leave out --world.columns."
        )
    chosen = _chosen(columns, layout.names or [str(k) for k in range(layout.columns)])
    try:
        with warnings.catch_warnings(), _text(path) as lines:
            warnings.filterwarnings("ignore", message=".*input contained no data")
            return np.loadtxt(
                # numpy does not count the values of rows of which it takes some
                _counted(lines, path, layout) if chosen else lines,
                delimiter=layout.separator,
                quotechar='"',
                skiprows=layout.skipped,
                usecols=chosen or None,
                ndmin=2,
                dtype=np.float64,
            )
    except ValueError as error:  # counts rows, and knows no names of columns
        row = re.search(r"at row (\d+)", str(error))
        if fault := _first_fault(path, layout, chosen, int(row[1]) if row else 0):
            raise Refusal(fault) from error
        raise


def _as_columns(values: NDArray[Any], columns: Sequence[str]) -> NDArray[Any]:
    """A vector [n] as one column [n, 1]; of a matrix the ``columns``, or all."""
    if values.ndim == 1:
        values = values[:, None]
    if not columns or values.ndim != 2:
        return values
    return values[:, _chosen(columns, [str(k) for k in range(values.shape[1])])]


def _chosen(columns: Sequence[str], names: Sequence[str]) -> list[int]:
    """The numbers of ``columns``, each a name or, where no column has it, a number from 0. Raises Refusal."""
    numbers = {**{str(k): k for k in range(len(names))}, **{name: k for k, name in enumerate(names)}}
    if missing := [column for column in columns if column not in numbers]:
        raise Refusal(
            f"it has no column {missing[0]!r}. Its columns: {', '.join(names)}. Choose some by their names, "
            "or numbers from 0: --world.columns."
        )
    if doubled := [column for column in columns if names.count(column) > 1]:
        raise Refusal(f"{names.count(doubled[0])} columns are called {doubled[0]!r}. Rename them.")
    chosen = [numbers[column] for column in columns]
    if len(set(chosen)) < len(chosen):
        twice = next(column for column, k in zip(columns, chosen, strict=True) if chosen.count(k) > 1)
        raise Refusal(f"--world.columns names the column {twice!r} twice. Name it once.")
    return chosen


@contextlib.contextmanager
def _text(path: Path) -> Iterator[TextIO]:
    """The lines of a file, gzip or not."""
    with open(path, "rb") as file:
        if path.suffix.lower() == ".gz":
            unpacked = TolerantGzip(file, path)
            yield io.TextIOWrapper(io.BufferedReader(unpacked), encoding="utf-8-sig")
            if unpacked.damage:
                raise Refusal(f"{unpacked.damage}.")
        else:
            yield io.TextIOWrapper(file, encoding="utf-8-sig")


class _Layout(NamedTuple):
    """separator: what is between numbers; None: spaces. skipped: number of lines before the first row.
    names: of the columns, where the file has them. columns: the number of columns of the first row."""

    separator: str | None
    skipped: int
    names: list[str]
    columns: int = 0


def _layout(path: Path, wanted: set[str]) -> _Layout:
    """wanted: names or numbers of columns. Warns of a first row that may be a header."""
    header = _Layout(None, 0, [])
    header_line = ""
    with _text(path) as lines:
        for number, line in enumerate(lines):
            if number == _LONGEST_HEADER:
                raise Refusal(f"its first {_LONGEST_HEADER:,} lines hold no row.")
            separator = next((s for s in _SEPARATORS if s in _uncommented(line).strip()), None)
            cells = _cells(line, separator)
            if not cells:
                continue
            if not header_line and any(map(_is_number, cells)) and not _names_columns(cells, wanted):
                _warn_of_counting(path, cells)
                return _Layout(separator, number, [], len(cells))
            if header_line:
                # a # that is a part of a name was taken for the beginning of a comment
                if separator is not None and separator in header_line and len(cells) != len(header.names):
                    header = header._replace(separator=separator, names=_names(header_line, separator))
                return header._replace(columns=len(cells))
            header_line = line
            header = _Layout(separator, number + 1, _names(line.partition("#")[0], separator))
    return header


def _names_columns(cells: list[str], wanted: set[str]) -> bool:
    """Whether a first line with numbers in it is a header: one of the ``wanted`` columns is in it that is no
    number; or all are, and one is no number of a column."""
    found = wanted.intersection(cells)
    if not all(map(_is_number, found)):
        return True
    return found == wanted and not found <= {str(k) for k in range(len(cells))}


def _warn_of_counting(path: Path, cells: list[str]) -> None:
    """Warn of a first row that counts up, as 0,1,2 does: pandas writes such a header, others years."""
    first = int(cells[0]) if cells[0].isdecimal() else 0
    if len(cells) > 2 and cells == [str(first + k) for k in range(len(cells))]:
        warnings.warn(
            f"{path}: its first row counts from {cells[0]} to {cells[-1]}, and is read as numbers. If these "
            "are names of columns, delete that line.",
            stacklevel=2,
        )


def _names(line: str, separator: str | None) -> list[str]:
    """The names of a header, without quotes, which may have spaces around them."""
    if separator is None:
        return line.split()
    return [name.strip() for name in next(csv.reader([line], delimiter=separator, skipinitialspace=True))]


def _cells(line: str, separator: str | None) -> list[str]:
    """What is between the separators of a row, without quotes; nothing for a blank line or a comment."""
    text = _uncommented(line).strip(" \r\n" if separator == "\t" else None)
    if separator is None or not text:
        return text.split()
    return [cell.strip() for cell in next(csv.reader([text], delimiter=separator))]


def _uncommented(line: str) -> str:
    """``line`` up to a # outside of quotes."""
    pieces = line.split('"')
    end = next((k for k in range(0, len(pieces), 2) if "#" in pieces[k]), None)
    return line if end is None else '"'.join([*pieces[:end], pieces[end].partition("#")[0]])


def _rows(lines: Iterable[str], path: Path, separator: str | None) -> Iterator[tuple[int, str]]:
    """(number of its first line, from 1; text) of each row: a quoted value may have several lines. Raises
    Refusal for a quote that is open at the end, in which rows would be lost."""
    row, first, is_open = "", 1, False
    for number, line in enumerate(lines, 1):
        first = first if row else number
        row += line
        if '"' in line:
            is_commented = _uncommented(row) != row  # a comment ends with its line
            is_open = row.count('"') % 2 == 1 and not is_commented and _ends_in_quotes(row, separator)
        if not is_open:
            yield first, row
            row = ""
    if row:
        raise Refusal(f"{path}, line {first}: a quote in it is not closed. Close it, or leave it out.")


def _ends_in_quotes(row: str, separator: str | None) -> bool:
    """Whether a quote is open at the end of ``row``: quotes within a value, as in 5" x 7, open none."""
    if separator is None:
        return False
    longer = row.rstrip("\r\n") + f"{separator}0"  # in an open quote, the 0 is no value of its own
    return len(_cells(longer, separator)) == len(_cells(row, separator))


def _counted(lines: Iterable[str], path: Path, layout: _Layout) -> Iterator[str]:
    """``lines``. Raises Refusal for a row of another number of values than the first one."""
    for number, row in _rows(lines, path, layout.separator):
        if number > layout.skipped and row.count(layout.separator or " ") != layout.columns - 1:
            count = len(_cells(row, layout.separator))
            if count not in (0, layout.columns):
                raise Refusal(f"{path}, line {number}: {_wrong_count(count, layout.columns)}")
        yield row


def _wrong_count(values: int, columns: int) -> str:
    return f"the number of values is {values}, and of columns {columns}. Correct this line."


def _first_fault(path: Path, layout: _Layout, chosen: list[int], near: int) -> str:
    """What is wrong in the first line that is no row of numbers, and what to do; empty if there is none.

    chosen: the numbers of the columns that are read; empty: all. near: the row, to within one, at which numpy
    stopped: rows before it are only counted.
    """
    fault, columns, rows = "", 0, 0
    with _text(path) as lines:
        for number, line in _rows(lines, path, layout.separator):
            if number <= layout.skipped or not line.partition("#")[0].strip(" \r\n"):
                continue
            rows += 1
            if 1 < rows < near - 1:
                continue
            cells = _cells(line, layout.separator)
            if not cells:
                continue
            columns = columns or len(cells)
            if len(cells) != columns:
                fault = _wrong_count(len(cells), columns)
            elif wrong := [k for k in chosen or range(len(cells)) if not _is_number(cells[k])]:
                fault = _fault_of(cells[wrong[0]], wrong[0], layout.names)
            if fault:
                return f"{path}, line {number}: {fault}"
    return ""


def _fault_of(cell: str, column: int, names: list[str]) -> str:
    """What is wrong with a value that is no number, and what to do."""
    place = f"column '{names[column]}'" if column < len(names) else f"column {column} (from 0)"
    shown = quoted(cell.encode()) if cell else "empty"
    if cell.lower() in _MISSING:
        return f"{place} is {shown}. Leave such rows out, or fill them in."
    # 1,5;2,5 without a header was split at its commas
    if all(map(_is_number, cell.replace(",", ".").replace(";", " ").split())):
        return f"{place} is {shown}. If commas stand for decimal points, write points, as in 1.5."
    return (
        f"{place} is {shown}, which is no number. Leave the column out (--world.columns names those that are "
        "taken), or write it as numbers, such as a column of 0 and 1 for each category."
    )


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return "_" not in cell  # 1_000 is a number in Python alone
