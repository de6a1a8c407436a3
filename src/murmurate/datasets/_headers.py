"""The first lines of files that begin with their sizes."""

from __future__ import annotations

import codecs
import re
from pathlib import Path

from murmurate.datasets._lines import Lines
from murmurate.datasets._record_errors import RecordErrors
from murmurate.datasets._triples import Header, shown
from murmurate.errors import Refusal

_BIGGEST = 2**31 - 2
_SIZE = re.compile(rb"\s*[0-9]{1,18}\s*")


def uci(path: Path, errors: RecordErrors) -> tuple[Header, int]:
    """The header of a UCI bag of words (D, V and entries, a line each), and how many lines it has."""
    lines = Lines(path, errors)
    names = ("documents", "words of the vocabulary", "entries")
    sizes = []
    for name in names:
        line = lines.line()
        if line is None or not _SIZE.fullmatch(line):
            what = "the file ends" if line is None else f"{shown(line)} stands"
            raise errors.refusal(
                lines.number,
                f"{what} where the header has the number of {name}",
                "A UCI bag of words begins with three lines: documents, words, entries. If it is of another "
                "kind, say so with kind.",
            )
        sizes.append(int(line))
    return _header(sizes, lines, errors), lines.number


def matrix_market(path: Path, transpose: bool, errors: RecordErrors) -> tuple[Header, int]:
    """The header of a Matrix Market file of coordinates, and how many lines it has."""
    lines = Lines(path, errors)
    banner = (lines.line() or b"").lower().split()
    if banner[:2] != [b"%%matrixmarket", b"matrix"] or len(banner) < 5:
        raise errors.refusal(
            1,
            "the banner '%%MatrixMarket matrix ...' is missing",
            "If it is of another kind, say so with kind.",
        )
    layout, field, symmetry = banner[2:5]
    if layout != b"coordinate":
        raise errors.refusal(1, "the matrix is dense", "Write it sparse, as csr_matrix(counts).")
    if field not in (b"integer", b"real", b"double") or symmetry != b"general":
        raise errors.refusal(
            1,
            f"a {field.decode('latin1')} {symmetry.decode('latin1')} matrix holds no counts",
            "An integer or real general one is needed.",
        )
    line = lines.line()
    while line is not None and (line.startswith(b"%") or not line.strip()):
        line = lines.line()
    sizes = (line or b"").split()
    if len(sizes) != 3 or not all(_SIZE.fullmatch(size) for size in sizes):
        raise errors.refusal(
            lines.number, f"{shown(line or b'')} stands where rows, columns and entries do", "Mend this line."
        )
    rows, columns, entries = map(int, sizes)
    documents, words = (columns, rows) if transpose else (rows, columns)
    header = _header([documents, words, entries], lines, errors)
    return Header(
        header.documents, header.vocabulary_size, entries, transpose, field != b"integer"
    ), lines.number


def _header(sizes: list[int], lines: Lines, errors: RecordErrors) -> Header:
    if max(sizes[:2]) > _BIGGEST:
        raise errors.refusal(
            lines.number,
            f"{max(sizes[:2]):,} documents or words",
            f"At most {_BIGGEST:,} of either can be read.",
        )
    return Header(sizes[0], sizes[1], sizes[2])


def vocabulary_beside(path: Path) -> Path:
    """Where the vocabulary of a file lies: ``vocab.x.txt`` for ``docword.x.txt.gz``, otherwise
    ``<file>.vocab.txt``; neither name has the ``.gz``."""
    name = path.name.removesuffix(".gz")
    if name.startswith("docword."):
        return path.with_name("vocab." + name.removeprefix("docword."))
    return path.with_name(name + ".vocab.txt")


def read_vocabulary(path: Path) -> tuple[str, ...]:
    """A word a line. Raises Refusal for an empty line, for a word that stands there twice, for what is not
    UTF-8, and if it cannot be read."""
    errors = RecordErrors(path, skip=False)
    words: dict[str, int] = {}  # and their lines
    for first, chunk in Lines(path, errors).chunks():
        for number, line in enumerate(chunk.split(b"\n")[:-1], first):
            try:
                word = line.removeprefix(codecs.BOM_UTF8 if number == 1 else b"").rstrip(b"\r").decode()
            except UnicodeDecodeError as error:
                raise errors.refusal(
                    number, f"{shown(line)} is not UTF-8", "Convert it: iconv -t utf-8."
                ) from error
            if not word.strip():
                raise errors.refusal(
                    number, "there is no word", "A vocabulary has a word a line, in the order of ids."
                )
            if word in words:
                raise errors.refusal(
                    number,
                    f"{word!r} stands in line {words[word]} too",
                    "Which of the two is meant could not be told: each word has one line.",
                )
            words[word] = number
    if not words:
        raise Refusal(f"{path} has no words. A vocabulary has a word a line, in the order of ids.")
    return tuple(words)
