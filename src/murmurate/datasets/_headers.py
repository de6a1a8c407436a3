"""Reads the headers of corpus files: the lines that state their sizes."""

from __future__ import annotations

import re
from dataclasses import dataclass

from murmurate.datasets._lines import Lines
from murmurate.datasets._record_errors import RecordErrors, quoted

LARGEST = 2**31 - 2  # greatest D and V
_OTHER_KIND = "If the file is of another kind, name the kind with --kind (in Python kind=)."
_LONGEST = 100_000  # most lines of a header
_SIZE = re.compile(rb"\s*[0-9]{1,18}\s*")


@dataclass(frozen=True)
class Header:
    """The sizes that a file states. documents: D. vocabulary_size: V. entries: how many entries follow.
    lines: number of the header's lines."""

    documents: int
    vocabulary_size: int
    entries: int
    lines: int
    transposed: bool = False  # lines are ``word document count``


def uci(lines: Lines, errors: RecordErrors) -> Header:
    """The header of a UCI bag of words: three lines with D, V and the number of entries."""
    sizes = []
    for name in ("documents", "words of the vocabulary", "entries"):
        line = lines.line()
        if line is None or not _SIZE.fullmatch(line):
            raise errors.refusal(
                lines.number,
                f"{'the file ends' if line is None else quoted(line)} where the number of {name} should be",
                f"A UCI bag of words begins with three lines: documents, words, entries. {_OTHER_KIND}",
            )
        sizes.append(int(line))
    return _checked(Header(sizes[0], sizes[1], sizes[2], lines.number), errors)


def matrix_market(lines: Lines, transpose: bool, errors: RecordErrors) -> Header:
    """The header of a Matrix Market file in coordinate layout. transpose: whether rows are words."""
    banner = (lines.line() or b"").lower().split()
    if banner[:2] != [b"%%matrixmarket", b"matrix"] or len(banner) < 5:
        raise errors.refusal(1, "the banner '%%MatrixMarket matrix ...' is missing", _OTHER_KIND)
    layout, field, symmetry = (word.decode("latin1") for word in banner[2:5])
    if layout != "coordinate":
        raise errors.refusal(1, "the matrix is dense", "Write it sparse, as scipy.sparse.csr_matrix(counts).")
    if field not in ("integer", "unsigned-integer", "real", "double") or symmetry != "general":
        raise errors.refusal(
            1, f"the {symmetry} {field} matrix holds no counts", "Write it as general, and integer or real."
        )
    line = lines.line()
    while line is not None and (line.startswith(b"%") or not line.strip()):
        if lines.number > _LONGEST:
            raise errors.refusal(lines.number, "the header does not end", "Is the file complete?")
        line = lines.line()
    sizes = (line or b"").split()
    if len(sizes) != 3 or not all(map(_SIZE.fullmatch, sizes)):
        raise errors.refusal(
            lines.number, f"{quoted(line or b'')} is not 'rows columns entries'", "Correct this line."
        )
    rows, columns, entries = map(int, sizes)
    documents, words = (columns, rows) if transpose else (rows, columns)
    return _checked(Header(documents, words, entries, lines.number, transpose), errors)


def _checked(header: Header, errors: RecordErrors) -> Header:
    largest = max(header.documents, header.vocabulary_size)
    if largest > LARGEST:
        raise errors.refusal(
            header.lines, f"{largest:,} documents or words", f"At most {LARGEST:,} of either can be read."
        )
    return header
