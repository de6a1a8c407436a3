"""Reads files with the words of a corpus: one word on each line, in the order of their ids."""

from __future__ import annotations

from pathlib import Path

from murmurate.datasets._lines import Lines
from murmurate.datasets._record_errors import RecordErrors, not_utf8
from murmurate.errors import Refusal


def vocabulary_beside(path: Path) -> Path:
    """The vocabulary file of a corpus file: ``vocab.x.txt`` for ``docword.x.txt.gz``, otherwise
    ``<file>.vocab.txt``; a ``.gz`` of the corpus file is left out."""
    name = path.name.removesuffix(".gz")
    if name.startswith("docword."):
        return path.with_name("vocab." + name.removeprefix("docword."))
    return path.with_name(name + ".vocab.txt")


def read_vocabulary(path: Path) -> tuple[str, ...]:
    """The words of a file. Raises Refusal for an empty line, for a repeated word, for text that is not UTF-8,
    and for a file that cannot be read."""
    errors = RecordErrors(path, skip=False)
    words: dict[str, int] = {}  # word -> its line
    with Lines(path, errors) as lines:
        for number, line in lines.numbered():
            try:
                word = line.rstrip(b"\r").decode()
            except UnicodeDecodeError as error:
                raise errors.refusal(
                    number, not_utf8(error.object, error.start), "Convert the file."
                ) from None
            if not word.strip():
                raise errors.refusal(
                    number, "there is no word", "A vocabulary has a word a line, in the order of ids."
                )
            if word in words:
                raise errors.refusal(
                    number, f"{word!r} is in line {words[word]} too", "Remove one: each word has one id."
                )
            words[word] = number
    if not words:
        raise Refusal(f"{path} has no words. A vocabulary has a word a line, in the order of ids.")
    return tuple(words)
