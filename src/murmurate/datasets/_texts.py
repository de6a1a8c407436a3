"""Reads text: a folder of ``.txt`` files, a document each, or one file with a document a line."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

from murmurate.datasets._lines import Lines
from murmurate.datasets._record_errors import RecordErrors, refuse_unreadable
from murmurate.datasets.corpus import Corpus
from murmurate.datasets.tokens import Tokens, WordCounter
from murmurate.errors import Refusal


def corpus(path: Path, tokens: Tokens, vocabulary: Sequence[str] | None, errors: RecordErrors) -> Corpus:
    """All documents, those without a word too. A document that is blank, or not UTF-8, is an error."""
    counter = WordCounter(tokens, vocabulary)
    if lost := counter.unreachable():
        warnings.warn(
            f"{lost:,} of the {len(vocabulary or ()):,} words of the vocabulary are in no text, where words "
            "are runs of letters in lower case: they count as never there",
            stacklevel=2,
        )
    for where, text in _files(path) if path.is_dir() else _lines(path, errors):
        counter.add(_decode(where, text, errors))
    return counter.finish()


def _decode(where: int | str, text: bytes, errors: RecordErrors) -> str:
    """The text; empty if it is not UTF-8."""
    try:
        decoded = text.decode()
    except UnicodeDecodeError as error:
        line = text.count(b"\n", 0, error.start) + 1
        place = where if isinstance(where, int) else f"{where}, line {line}"
        errors.add(place, "not UTF-8", f"byte {text[error.start]:#04x} is not UTF-8; iconv -t utf-8 converts")
        return ""
    if not decoded.strip():
        errors.add(where, "empty document", "the document is empty")
    return decoded


def _files(folder: Path) -> Iterator[tuple[str, bytes]]:
    paths = sorted(folder.rglob("*.txt"))
    if not paths:
        raise Refusal(f"There is no .txt file in {folder}. A document is a .txt file, or a line of one file.")
    for path in paths:
        with refuse_unreadable(path):
            text = path.read_bytes()
        yield str(path.relative_to(folder)), text


def _lines(path: Path, errors: RecordErrors) -> Iterator[tuple[int, bytes]]:
    with Lines(path, errors) as lines:
        yield from lines.numbered()
