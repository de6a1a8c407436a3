"""Files with an entry a line, ``document word count``: UCI's bags of words and Matrix Market."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from murmurate.datasets._corpus_writer import Buckets, CorpusWriter, Ids, Unordered
from murmurate.datasets._lines import Lines, found_in
from murmurate.datasets._record_errors import RecordError, RecordErrors
from murmurate.datasets.corpus import FRACTIONS

WHOLE = re.compile(rb"[+-]?[0-9]{1,18}")  # int() takes underscores too, and is slow on long ones
_LAYOUT = np.frombuffer(b"  \n", np.uint8)
IN_NUMBER = np.isin(np.arange(256), np.frombuffer(b"0123456789+-.eE", np.uint8))
_BIGGEST = 2**31 - 1


@dataclass(frozen=True)
class Header:
    """What a file says of itself: D, V, and how many entries follow."""

    documents: int
    vocabulary_size: int
    entries: int
    transposed: bool = False  # lines are ``word document count``
    real: bool = False  # counts are written with a point or an exponent


def convert(
    path: Path, header: Header, skip_lines: int, errors: RecordErrors, folder: Path
) -> NDArray[np.int64]:
    """Convert the entries behind the header to ``words.npy`` and ``counts.npy``; returns [D] lengths.

    Entries are sorted where they are not in the order of documents, at the cost of a second reading.
    """
    kept = CorpusWriter(folder, header.vocabulary_size, errors)
    before = errors.skipped.causes.copy()
    try:
        for entries in _entries(path, header, skip_lines, errors):
            kept.add(*entries)
    except Unordered:
        errors.skipped.causes = before
        kept.close()
        kept = CorpusWriter(folder, header.vocabulary_size, errors)
        buckets = Buckets(folder, header.documents, header.entries)
        for entries in _entries(path, header, skip_lines, errors):
            buckets.add(*entries)
        for entries in buckets.sorted():
            kept.add(*entries)
    return kept.finish(header.documents)


def _entries(
    path: Path, header: Header, skip_lines: int, errors: RecordErrors
) -> Iterator[tuple[Ids, Ids, Ids]]:
    """Documents, words (from 0) and counts, [n] each, of some lines at a time."""
    lines = Lines(path, errors)
    for _ in range(skip_lines):
        lines.line()
    reader = _TripleReader(header, errors)
    for first, chunk in lines.chunks():
        for rows in found_in(first, chunk, reader.fast, reader.slow):
            documents, words = (rows[:, 1], rows[:, 0]) if header.transposed else (rows[:, 0], rows[:, 1])
            yield documents - 1, words - 1, rows[:, 2]
    if reader.seen != header.entries:
        more = "only " if reader.seen < header.entries else ""
        errors.bad(
            lines.number,
            "entries that the header does not have" if not more else "entries that the header promises",
            f"the header promises {header.entries:,} entries, and there are {more}{reader.seen:,}",
            count=abs(header.entries - reader.seen),
        )


class _TripleReader:
    def __init__(self, header: Header, errors: RecordErrors) -> None:
        self.seen = 0  # entries, the wrong ones too
        self._header = header
        self._errors = errors
        rows = (header.documents, header.vocabulary_size)
        self._limits = rows[::-1] if header.transposed else rows

    def fast(self, chunk: bytes) -> NDArray[np.int32] | None:
        """[n, 3] of lines without fault, or None."""
        rows = _integers(chunk)
        if rows is None and self._header.real:
            rows = _reals(chunk)
        if rows is None or (len(rows) and not self._in_range(rows)):
            return None
        self.seen += len(rows)
        return rows

    def _in_range(self, rows: NDArray[np.int32]) -> bool:
        greatest = int(rows[:, 0].max()), int(rows[:, 1].max())
        return bool(rows.min() >= 1 and greatest[0] <= self._limits[0] and greatest[1] <= self._limits[1])

    def slow(self, first: int, chunk: bytes) -> NDArray[np.int32]:
        """[n, 3] of the lines without fault; the others are refused or counted."""
        rows = []
        for number, line in enumerate(chunk.split(b"\n")[:-1], first):
            if not line.strip():
                continue
            self.seen += 1
            try:
                rows.append(self._row(line))
            except RecordError as fault:
                self._errors.bad(number, fault.cause, fault.detail)
        return np.array(rows, np.int32).reshape(-1, 3)

    def _row(self, line: bytes) -> tuple[int, int, int]:
        fields = line.split()
        names = ["word", "document"] if self._header.transposed else ["document", "word"]
        if len(fields) != 3 or not all(WHOLE.fullmatch(field) for field in fields[:2]):
            raise RecordError("malformed line", f"{shown(line)} is not '{names[0]} {names[1]} count'")
        ids = [int(field) for field in fields[:2]]
        for name, id_, limit in zip(names, ids, self._limits, strict=True):
            if not 1 <= id_ <= limit:
                raise RecordError(
                    f"{name} out of range", f"{name} {id_} is not in 1..{limit}, which the header promises"
                )
        return ids[0], ids[1], count_of(fields[2])


def count_of(field: bytes) -> int:
    """A count above 0. Raises RecordError."""
    try:
        value = float(field.replace(b"_", b"x"))  # Python's numbers may have underscores
    except ValueError:
        raise RecordError("malformed line", f"{shown(field)} is no count") from None
    if not value > 0:
        raise RecordError(
            "count of zero or below", f"the count is {field.decode()}, and counts are 1 or more"
        )
    if value > _BIGGEST:
        raise RecordError("count too large", f"the count is {field.decode()}, and the largest is {_BIGGEST}")
    if value != int(value):
        raise RecordError(
            "fractional count", f"the count is {field.decode()}, no whole number. {FRACTIONS[:-1]}"
        )
    return int(value)


def shown(text: bytes) -> str:
    """What stands in a file, for a message."""
    line = text.decode("utf-8", "backslashreplace").strip()
    return repr(line if len(line) <= 60 else line[:57] + "...")


def _integers(chunk: bytes) -> NDArray[np.int32] | None:
    """[n, 3] if every line is three numbers of at most nine digits, a space apart; otherwise None."""
    text = np.frombuffer(chunk, np.uint8)
    ends = np.flatnonzero(text - np.uint8(48) > 9)  # below 48 it wraps: all that is no digit
    if len(ends) % 3 or not (text[ends].reshape(-1, 3) == _LAYOUT).all():
        return None
    gaps = ends[1:] - ends[:-1]
    if len(gaps) and not (1 <= ends[0] <= 9 and gaps.min() >= 2 and gaps.max() <= 10):
        return None
    return np.fromstring(chunk, np.int32, sep=" ").reshape(-1, 3)


def _reals(chunk: bytes) -> NDArray[np.int32] | None:
    """The same for numbers with points and exponents, if all are whole."""
    text = np.frombuffer(chunk, np.uint8)
    ends = np.flatnonzero(~IN_NUMBER[text])
    if len(ends) % 3 or not (text[ends].reshape(-1, 3) == _LAYOUT).all():
        return None
    if (np.diff(ends, prepend=-1) < 2).any() or (written_as_real(text, ends) % 3 != 2).any():
        return None
    values = floats(chunk, len(ends))
    if (
        values is None
        or (len(values) and np.abs(values).max() > _BIGGEST)
        or (values != np.floor(values)).any()
    ):
        return None
    return values.astype(np.int32).reshape(-1, 3)


def written_as_real(text: NDArray[np.uint8], ends: NDArray[np.int64]) -> NDArray[np.int64]:
    """Which numbers have a sign, a point or an exponent (one of them once for each)."""
    return np.searchsorted(ends, np.flatnonzero(IN_NUMBER[text] & (text - np.uint8(48) > 9)))


def floats(text: bytes, count: int) -> NDArray[Any] | None:
    """So many numbers, or None where there are not."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # numpy only warns of what is no number
        try:
            values = np.fromstring(text, np.float64, sep=" ")
        except (ValueError, DeprecationWarning):
            return None
    return values if len(values) == count else None
