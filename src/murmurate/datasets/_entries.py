"""Converts files of numbers to the entries (document, word, count) of a corpus.

numpy parses a chunk of lines at a time. Where that fails, the chunk is rewritten in a plain form (single
spaces, counts as whole numbers) and parsed again; where that fails too, it is halved repeatedly, and small
pieces are parsed line by line, to find the line with the error.
"""

from __future__ import annotations

import functools
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from murmurate.datasets._corpus_writer import Buckets, CorpusWriter, Unordered
from murmurate.datasets._headers import Header
from murmurate.datasets._lines import Lines
from murmurate.datasets._record_errors import RecordError, RecordErrors, quoted
from murmurate.datasets.corpus import FRACTIONS, LARGEST_COUNT

_FEW_LINES = 64  # chunks of at most so many lines are parsed line by line
_ID = re.compile(rb"[+-]?[0-9]{1,18}")  # int() accepts underscores too, and is slow on long numbers
_LINE_END = re.compile(rb"[ \t]*\r?\n[ \t]*")
_SPACES = re.compile(rb"[ \t]+")
_REAL = rb"[0-9]+(?:\.[0-9]*(?:[eE][+-]?[0-9]+)?|[eE][+-]?[0-9]+)"
_REAL_COUNT = re.compile(rb" %b(?=\n)|:%b(?=[ \n])" % (_REAL, _REAL))
_LABEL = re.compile(rb"(?m)^[+-]?[0-9]+(?:\.[0-9]*)?(?= )")
# remarks and query ids of SVMlight; the group matches in a line that is nothing but a remark
_REMARK = re.compile(rb"(?m)^[ \t]*(#).*| *#.*| qid:[0-9]+")
_Row = tuple[int, int, float, int]  # document, word, count, line


class Parsed(NamedTuple):
    """Entries as a file has them, before they are checked; n of them, as arrays [n]."""

    documents: NDArray[Any]
    words: NDArray[Any]
    counts: NDArray[Any]
    lines: NDArray[Any] | None = None  # line numbers; None where a format has no lines


class LineFormat(ABC):
    """Parses the lines of one file. Numbers of documents and words begin at ``base``."""

    hint = ""  # appended to the message about a word id below ``base``

    def __init__(self, header: Header, base: int = 1) -> None:
        self.header = header
        self.base = base
        self.seen = 0  # entries or documents parsed so far, those with errors included

    @abstractmethod
    def parse_chunk(self, first: int, chunk: bytes) -> Parsed | None:
        """The entries of a chunk of lines; None if a line is malformed, or not in the form that ``plain``
        makes. first: number of the first line."""

    @abstractmethod
    def parse_line(self, number: int, line: bytes) -> list[_Row]:
        """The entries of one line. Raises RecordError for a malformed line and for an empty document."""

    def plain(self, chunk: bytes) -> bytes:
        """The same lines with single spaces between fields, no spaces around them, and whole counts as
        integers."""
        if any(space in chunk for space in (b"\t", b"\r", b"  ", b" \n", b"\n ")):
            chunk = _SPACES.sub(b" ", _LINE_END.sub(b"\n", chunk))
        if any(sign in chunk for sign in b".eE"):
            chunk = _REAL_COUNT.sub(lambda match: _as_integer(match[0]), chunk)
        return chunk.lstrip(b" ")

    def documents(self, last_line: int, errors: RecordErrors) -> int:
        """D, once all lines are parsed."""
        return self.seen


class Triples(LineFormat):
    """UCI and Matrix Market: below a header, each line is an entry ``document word count``, or
    ``word document count`` if the header says that the matrix is transposed."""

    def parse_chunk(self, first: int, chunk: bytes) -> Parsed | None:
        if chunk.isspace():
            return _columns([])
        values, separators = _integers(chunk)
        if len(values) % 3 or not len(values):
            return None
        if (separators.reshape(-1, 3) != np.frombuffer(b"  \n", np.uint8)).any():
            return None
        rows = values.reshape(-1, 3)
        self.seen += len(rows)
        documents, words = (1, 0) if self.header.transposed else (0, 1)
        return Parsed(rows[:, documents], rows[:, words], rows[:, 2], np.arange(first, first + len(rows)))

    def parse_line(self, number: int, line: bytes) -> list[_Row]:
        fields = line.split()
        if not fields:
            return []
        self.seen += 1
        if len(fields) != 3 or not all(map(_ID.fullmatch, fields[:2])):
            names = "word document" if self.header.transposed else "document word"
            raise RecordError("malformed line", f"{quoted(line)} is not '{names} count'")
        ids = fields[1::-1] if self.header.transposed else fields[:2]
        document, word = map(int, ids)
        return [(document, word, _number(fields[2], "count"), number)]

    def documents(self, last_line: int, errors: RecordErrors) -> int:
        missing = self.header.entries - self.seen
        if missing:
            errors.add(
                last_line,
                f"entries that the header {'promises' if missing > 0 else 'does not have'}",
                f"the header promises {self.header.entries:,} entries, and there are "
                f"{'only ' if missing > 0 else ''}{self.seen:,}",
                count=abs(missing),
            )
        return self.header.documents


class Pairs(LineFormat):
    """LDA-C and SVMlight: each line is a document, ``number word:count word:count ...``.

    The number is how many pairs follow (LDA-C) or, with ``labels``, a label, which is ignored (SVMlight);
    remarks (from ``#`` on) and ``qid:`` fields of SVMlight are ignored, too.
    """

    def __init__(self, labels: bool, one_based: bool, vocabulary_size: int | None) -> None:
        size = LARGEST_COUNT if vocabulary_size is None else vocabulary_size
        super().__init__(Header(LARGEST_COUNT, size, 0, 0), int(one_based))
        self._labels = labels
        self.hint = " (ids from 0 are read with --one-based false)" if one_based else ""

    def parse_chunk(self, first: int, chunk: bytes) -> Parsed | None:
        values, separators = _integers(chunk)
        ends = np.flatnonzero(separators == ord("\n"))
        fields = np.diff(ends, prepend=-1)  # numbers in each line: 1 + 2 for each pair
        heads = ends - fields + 1  # index of the first number of each line
        if not len(ends) or (fields % 2 == 0).any() or (separators[heads] != ord(" ")).any():
            return None
        pairs = np.delete(values, heads).reshape(-1, 2)
        pair_separators = np.delete(separators, heads).reshape(-1, 2)
        lengths = fields // 2
        if (pair_separators[:, 0] != ord(":")).any() or (pair_separators[:, 1] == ord(":")).any():
            return None
        if not self._labels and (values[heads] != lengths).any():
            return None
        documents = np.repeat(np.arange(len(ends)), lengths)
        first_document = self.base + self.seen
        self.seen += len(ends)
        return Parsed(documents + first_document, pairs[:, 0], pairs[:, 1], documents + first)

    def parse_line(self, number: int, line: bytes) -> list[_Row]:
        line = _REMARK.sub(rb"\1", line) if self._labels else line
        if self._labels and line == b"#":  # a line with nothing but a remark is no document
            return []
        document = self.base + self.seen
        self.seen += 1
        head, *pairs = line.split() or [b"0"]
        if self._labels:
            for label in head.split(b","):  # a document may have several labels
                _number(label, "label")
        elif not _ID.fullmatch(head):
            raise RecordError("malformed line", f"{quoted(head)} is not the number of words")
        rows = [(document, *_pair(pair), number) for pair in pairs]
        if not self._labels and int(head) != len(rows):
            raise RecordError("malformed line", f"{int(head)} words are promised, and {len(rows)} are there")
        if not rows:
            raise RecordError("empty document", "the document is empty")
        return rows

    def plain(self, chunk: bytes) -> bytes:
        if not self._labels:
            return super().plain(chunk)
        if b"#" in chunk or b"qid:" in chunk:
            chunk = _REMARK.sub(rb"\1", chunk)
        return _LABEL.sub(b"0", super().plain(chunk))


def convert(
    path: Path, make_format: Callable[[], LineFormat], errors: RecordErrors, folder: Path
) -> tuple[NDArray[np.int64], int]:
    """Convert a file to ``words.npy`` and ``counts.npy`` in ``folder``. Returns ([D] lengths, the greatest
    word id + 1).

    If entries are not in the order of documents, the file is read again, and they are sorted. Raises Refusal
    for the first error in the file, unless ``errors`` counts them.
    """
    earlier_causes = errors.causes.copy()
    line_format, writer = make_format(), CorpusWriter(folder, errors)
    try:
        documents = _read(path, line_format, errors, writer.add)
    except Unordered:
        errors.causes = earlier_causes
        writer.close()
        line_format, writer = make_format(), CorpusWriter(folder, errors)
        buckets = Buckets(folder, line_format.header.documents, line_format.header.entries)
        documents = _read(path, line_format, errors, buckets.add)
        for entries in buckets.ranges():
            writer.add_documents(entries)
    return writer.finish(documents), writer.greatest_word + 1


def _read(
    path: Path, line_format: LineFormat, errors: RecordErrors, add: Callable[[NDArray[np.int32]], None]
) -> int:
    """Read a file, and pass its valid entries to ``add``. Returns D."""
    header, base, hint = line_format.header, line_format.base, line_format.hint
    with Lines(path, errors) as lines:
        for _ in range(header.lines):
            lines.line()
        for first, chunk in lines.chunks():
            for parsed in parse(line_format, first, chunk, errors):
                add(valid_entries(parsed, header, base, errors, hint))
        return line_format.documents(lines.number, errors)


def parse(
    line_format: LineFormat, first: int, chunk: bytes, errors: RecordErrors, plain: bool = False
) -> Iterator[Parsed]:
    """The entries of a chunk that begins with line ``first``; malformed lines are refused or counted.

    plain: whether the chunk is already in the form that ``LineFormat.plain`` makes.
    """
    parsed = line_format.parse_chunk(first, chunk)
    middle = chunk.find(b"\n", len(chunk) // 2) + 1
    if parsed is not None:
        yield parsed
    elif not plain:
        yield from parse(line_format, first, line_format.plain(chunk), errors, plain=True)
    elif middle == len(chunk) or chunk.count(b"\n") <= _FEW_LINES:
        rows: list[_Row] = []
        for number, line in enumerate(chunk.split(b"\n")[:-1], first):
            try:
                rows += line_format.parse_line(number, line)
            except RecordError as error:
                yield _columns(rows)  # first, so that errors are reported in the order of lines
                rows = []
                errors.add(number, *error.args)
        yield _columns(rows)
    else:
        yield from parse(line_format, first, chunk[:middle], errors, plain)
        second = first + chunk.count(b"\n", 0, middle)
        yield from parse(line_format, second, chunk[middle:], errors, plain)


def valid_entries(
    parsed: Parsed, header: Header, base: int, errors: RecordErrors, hint: str = ""
) -> NDArray[np.int32]:
    """[3, n]: document numbers and word ids, from 0, and counts, of the entries in lines without an error."""
    columns: tuple[NDArray[Any], ...] = parsed[:3]
    limits = (
        (base, header.documents + base - 1),
        (base, header.vocabulary_size + base - 1),
        (1, LARGEST_COUNT),
    )
    if any(
        len(column) and not (column.min() >= least and column.max() <= greatest and column.dtype.kind == "i")
        for column, (least, greatest) in zip(columns, limits, strict=True)
    ):
        kept = _without_errors(parsed, limits[0], limits[1], errors, hint)
        columns = tuple(column[kept] for column in columns)
    entries = np.empty((3, len(columns[0])), np.int32)
    for row, column, first in zip(entries, columns, (base, base, 0), strict=True):
        row[:] = column - first
    return entries


def _without_errors(
    parsed: Parsed, documents: tuple[int, int], words: tuple[int, int], errors: RecordErrors, hint: str
) -> NDArray[np.bool_]:
    """[n]: whether an entry's line has no error. Errors are refused or counted.

    documents, words: (least, greatest) valid number.
    """
    document, word, count, lines = parsed
    masks = {  # cause -> [n], whether an entry has that error
        "document out of range": (document < documents[0]) | (document > documents[1]),
        "word out of range": (word < words[0]) | (word > words[1]),
        "count of zero or below": ~(count > 0),
        "count too large": count > LARGEST_COUNT,
        "fractional count": count != np.floor(count),
    }
    has_error = np.logical_or.reduce(list(masks.values()))
    records = np.arange(len(word)) if lines is None else lines
    faulty, first = np.unique(records[has_error], return_index=True)
    for i in np.flatnonzero(has_error)[first]:
        value, word_hint = f"word {word[i]} has {count[i]:.12g}", hint if word[i] < words[0] else ""
        details = {
            "document out of range": f"document {document[i]} is not in {documents[0]}..{documents[1]}",
            "word out of range": f"word {word[i]} is not in {words[0]}..{words[1]}{word_hint}",
            "count of zero or below": f"{value}, and counts are 1 or more",
            "count too large": f"{value}, too large: the largest is {LARGEST_COUNT}",
            "fractional count": f"{value}, no whole number. {FRACTIONS[:-1]}",
        }
        cause = next(cause for cause, mask in masks.items() if mask[i])
        where = f"document {document[i]} (from 0)" if lines is None else int(lines[i])
        errors.add(where, cause, details[cause])
    return ~np.isin(records, faulty)


def _integers(chunk: bytes) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
    """(the numbers of a chunk, the character after each) if all numbers have one to nine digits and are
    followed by a space, a colon or a line end. Otherwise both are empty."""
    text = np.frombuffer(chunk, np.uint8)
    # all characters that are no digits: "0" is 48, and smaller ones wrap around to large numbers
    ends = np.flatnonzero(text - np.uint8(48) > 9)
    widths, separators = ends[1:] - ends[:-1], text[ends]
    known = (separators == ord(" ")) | (separators == ord("\n")) | (separators == ord(":"))
    if (
        not known.all()
        or ends[0] not in range(1, 10)
        or widths.min(initial=2) < 2
        or widths.max(initial=2) > 10
    ):
        return np.empty(0, np.int32), np.empty(0, np.uint8)
    return np.fromstring(chunk.replace(b":", b" "), np.int32, sep=" "), separators


def _columns(rows: list[_Row]) -> Parsed:
    table = np.array(rows, "i8, i8, f8, i8")
    return Parsed(*(table[name] for name in ("f0", "f1", "f2", "f3")))


@functools.lru_cache(maxsize=1024)
def _as_integer(count: bytes) -> bytes:
    """A count such as b":2.0" as b":2", if it is whole. count: includes the separator before the number."""
    value = float(count[1:])
    return b"%c%d" % (count[0], value) if value.is_integer() and value < LARGEST_COUNT else count


def _pair(pair: bytes) -> tuple[int, float]:
    word, colon, count = pair.partition(b":")
    if not colon or not _ID.fullmatch(word):
        raise RecordError("malformed line", f"{quoted(pair)} is not 'word:count'")
    return int(word), _number(count, "count")


def _number(field: bytes, name: str) -> float:
    try:
        return float(field.replace(b"_", b"x"))  # float() would accept underscores
    except ValueError:
        raise RecordError("malformed line", f"{quoted(field)} is no {name}") from None
