"""Files with a document a line, ``number word:count word:count ...``: LDA-C and SVMlight."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from murmurate.datasets._corpus_writer import CorpusWriter
from murmurate.datasets._lines import Lines, found_in
from murmurate.datasets._record_errors import RecordError, RecordErrors
from murmurate.datasets._triples import IN_NUMBER, WHOLE, count_of, floats, shown, written_as_real

_REMARK = re.compile(rb"(?m)^[ \t]*(#).*| *#.*| qid:[0-9]+")  # the group: of a line that is nothing else
_NO_DOCUMENT = b"#"  # what is left of such a line: lines keep their numbers
_BIGGEST = 2**31 - 1

# of some lines: lengths [n], words [N] from 0, counts [N]
Rows = tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.int32]]


def convert(
    path: Path,
    *,
    labels: bool,
    one_based: bool,
    vocabulary_size: int | None,
    errors: RecordErrors,
    folder: Path,
) -> tuple[NDArray[np.int64], int]:
    """Convert to ``words.npy`` and ``counts.npy``; returns [D] lengths, and V.

    The first number of a line is how many pairs follow (LDA-C), or a label (``labels``: SVMlight) that is
    left out. V is one more than the greatest word id where it is not given.
    """
    kept = CorpusWriter(folder, _BIGGEST, errors)
    reader = _PairReader(labels, one_based, vocabulary_size, errors)
    documents, greatest = 0, -1
    lines = Lines(path, errors)
    for lengths, words, counts in _rows(lines, reader, labels):
        which = np.arange(documents, documents + len(lengths), dtype=np.int32)
        kept.add(np.repeat(which, lengths), words, counts)
        documents += len(lengths)
        greatest = max(greatest, int(words.max(initial=-1)))
    return kept.finish(documents), greatest + 1 if vocabulary_size is None else vocabulary_size


def _rows(lines: Lines, reader: _PairReader, labels: bool) -> Iterator[Rows]:
    for first, chunk in lines.chunks():
        if labels and (b"#" in chunk or b" qid:" in chunk):
            chunk = _REMARK.sub(rb"\1", chunk)
        yield from found_in(first, chunk, reader.fast, reader.slow)


class _PairReader:
    def __init__(
        self, labels: bool, one_based: bool, vocabulary_size: int | None, errors: RecordErrors
    ) -> None:
        self._labels = labels
        self._base = int(one_based)
        self._limit = _BIGGEST if vocabulary_size is None else vocabulary_size
        self._errors = errors

    def fast(self, chunk: bytes) -> Rows | None:
        """Of lines without fault, or None."""
        text = np.frombuffer(chunk, np.uint8)
        ends = np.flatnonzero(~IN_NUMBER[text])
        marks = text[ends]
        line_ends = np.flatnonzero(marks == 10)
        fields = np.diff(line_ends, prepend=-1)  # 1 + 2 pairs
        begins = line_ends - fields + 1
        place = np.arange(len(ends)) - np.repeat(begins, fields)
        wanted = np.where(place % 2 == 1, 58, 32)  # a colon after a word id, a space after other numbers
        wanted[line_ends] = 10
        if not (marks == wanted).all() or (fields < 3).any() or (fields % 2 == 0).any():
            return None
        real = place[written_as_real(text, ends)]
        values = self._values(chunk, ends, text)
        if values is None or (real % 2 == 1).any() or (not self._labels and (real == 0).any()):
            return None
        ids, counts = values[place % 2 == 1], values[(place % 2 == 0) & (place > 0)]
        lengths = (fields - 1) // 2
        if not self._labels and (values[begins] != lengths).any():
            return None
        ids = ids - self._base
        sound = (ids >= 0) & (ids < self._limit) & (counts >= 1) & (counts <= _BIGGEST)
        if not sound.all() or (counts != np.floor(counts)).any():
            return None
        return lengths, ids.astype(np.int32), counts.astype(np.int32)

    def _values(
        self, chunk: bytes, ends: NDArray[np.int64], text: NDArray[np.uint8]
    ) -> NDArray[np.int32] | NDArray[np.float64] | None:
        """All numbers of the lines, in their order; None if one is none."""
        plain = chunk.replace(b":", b" ")
        width = np.diff(ends, prepend=-1)
        if width.min() < 2:
            return None
        if len(ends) + np.count_nonzero(text - np.uint8(48) <= 9) == len(text) and width.max() <= 10:
            return np.fromstring(plain, np.int32, sep=" ")
        return floats(plain, len(ends))

    def slow(self, first: int, chunk: bytes) -> Rows:
        """Of the lines without fault; the others are refused or counted, and their documents empty."""
        lengths: list[int] = []
        words: list[int] = []
        counts: list[int] = []
        for number, line in enumerate(chunk.split(b"\n")[:-1], first):
            if self._labels and line == _NO_DOCUMENT:
                continue
            found: list[tuple[int, int]] = []
            try:
                found = self._document(line)
            except RecordError as fault:
                self._errors.bad(number, fault.cause, fault.detail)
            lengths.append(len(found))
            words.extend(word for word, _ in found)
            counts.extend(count for _, count in found)
        return np.array(lengths, np.int64), np.array(words, np.int32), np.array(counts, np.int32)

    def _document(self, line: bytes) -> list[tuple[int, int]]:
        head, *pairs = line.split() or [b""]
        if self._labels:
            try:
                [float(label) for label in head.split(b",") if head]  # several of one document
            except ValueError:
                raise RecordError("malformed line", f"{shown(head)} is no label") from None
        elif head and not WHOLE.fullmatch(head):
            raise RecordError("malformed line", f"{shown(head)} is not the number of words")
        found = [self._pair(pair) for pair in pairs]
        if not self._labels and int(head or 0) != len(found):
            raise RecordError(
                "malformed line", f"{int(head or 0)} words are promised, and {len(found)} are there"
            )
        if not found:
            raise RecordError("empty document", "the document is empty")
        return found

    def _pair(self, pair: bytes) -> tuple[int, int]:
        word, colon, count = pair.partition(b":")
        if not colon or not WHOLE.fullmatch(word):
            raise RecordError("malformed line", f"{shown(pair)} is not 'word:count'")
        id_ = int(word) - self._base
        if not 0 <= id_ < self._limit:
            hint = " (ids from 0 are read with one_based=False)" if self._base and id_ == -1 else ""
            last = self._limit - 1 + self._base
            raise RecordError("word out of range", f"word {int(word)} is not in {self._base}..{last}{hint}")
        return id_, count_of(count)
