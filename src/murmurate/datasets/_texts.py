"""Reads text: files of a folder, lines of a file, or a column of a CSV or JSON-lines file."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import NamedTuple

from murmurate.datasets import _columns, _markdown, collocations
from murmurate.datasets._lines import Lines
from murmurate.datasets._record_errors import RecordErrors, not_utf8, refuse_unreadable
from murmurate.datasets._text_files import SUFFIXES, files_of
from murmurate.datasets.corpus import Corpus
from murmurate.datasets.tokens import Tokens, WordCounter
from murmurate.errors import Refusal


class Document(NamedTuple):
    """name: name of its file, or its number from 0; UTF-8 can hold it. text: "" for a document with an
    error."""

    name: str
    text: str


@dataclass(frozen=True)
class TextSource:
    """A file or folder with documents of text.

    kind: one of ``TEXT_KINDS``. column, name_column: the columns of a ``csv`` or ``jsonl`` file that have the
    text and the name of a document. Documents are always in the same order, those without a text included.
    """

    path: Path
    kind: str
    column: str | None = None
    name_column: str | None = None

    def documents(self, errors: RecordErrors) -> Iterator[Document]:
        """The documents, read one at a time. A document that is blank, or not UTF-8, is an error. Raises
        Refusal for a file that cannot be read."""
        if self.path.is_dir():
            yield from _files(self.path, self.kind, errors)
        elif self.kind == "markdown":
            raise Refusal(f"{self.path} is one document, and a corpus has many. Name its folder.")
        elif self.kind == "text":
            with Lines(self.path, errors) as lines:
                for number, line in lines.numbered():
                    yield Document(str(number - 1), _decode(number, line, errors))
        else:
            values = _columns.column_values(self.path, self.kind, self.column, self.name_column, errors)
            for name, text in values:
                yield Document(_writable(name), text)

    @property
    def has_names(self) -> bool:
        """Whether documents have names other than their numbers."""
        return self.path.is_dir() or self.name_column is not None

    def names(self) -> Iterator[str]:
        """The names of all documents, in order. If the file has a name column, it is read for this."""
        if self.path.is_dir():
            return (_name_of(file, self.path) for file in files_of(self.path, self.kind))
        if self.name_column is None:
            return map(str, count())
        return (document.name for document in self.documents(RecordErrors(self.path, skip=True)))

    def pick(self, numbers: Iterable[int]) -> dict[int, Document]:
        """The documents with these numbers (from 0), by number. In a folder only their files are read.

        Raises Refusal for a file that cannot be read.
        """
        wanted, errors, picked = set(numbers), RecordErrors(self.path, skip=True), {}
        if self.path.is_dir():
            paths = files_of(self.path, self.kind)
            return {n: _file(paths[n], self.path, self.kind, errors) for n in wanted if n < len(paths)}
        for number, document in enumerate(self.documents(errors)):
            if number in wanted:
                picked[number] = document
            if len(picked) == len(wanted):
                break
        return picked


def corpus(
    source: TextSource, tokens: Tokens, vocabulary: Sequence[str] | None, bigrams: bool, errors: RecordErrors
) -> Corpus:
    """The corpus of all documents, those without a word included.

    vocabulary: if given, only its words are counted. bigrams: whether pairs of words are counted as one word:
    the pairs in ``vocabulary``, or the collocations of these documents.
    """

    def count_all(counter: WordCounter, errors: RecordErrors) -> Corpus:
        documents = 0
        for document in source.documents(errors):
            counter.add(document.text)
            documents += 1
        if not documents:
            raise Refusal(f"{source.path} has no documents. Check the file.")
        return counter.finish()

    if vocabulary is not None:
        counter = WordCounter(tokens, vocabulary, bigrams=bigrams)
        if unreachable := counter.unreachable():
            warnings.warn(
                f"{unreachable:,} of the {len(vocabulary):,} words of the vocabulary cannot be found, "
                "because words of a text are runs of letters in lower case: their counts are 0",
                stacklevel=2,
            )
        return count_all(counter, errors)
    if not bigrams:
        return count_all(WordCounter(tokens), errors)
    # the documents are read three times, and only errors of the last reading are counted
    ignored = [RecordErrors(source.path, errors.skip) for _ in range(2)]
    texts = (document.text for document in source.documents(ignored[0]))
    pairs = collocations.find_collocations(texts, tokens)
    first_corpus = count_all(WordCounter(tokens, pairs=pairs), ignored[1])
    # count again, as in new texts: a pair that the vocabulary's bounds left out now counts as its two words
    return count_all(WordCounter(tokens, first_corpus.vocabulary, bigrams=True), errors)


def _writable(name: str) -> str:
    """``name`` with escapes for what UTF-8 cannot hold: bytes of a file's name, or half of a surrogate pair
    in JSON."""
    return name.encode("utf-8", "backslashreplace").decode()


def _name_of(file: Path, folder: Path) -> str:
    return _writable(str(file.relative_to(folder)))


def _decode(where: int | str, text: bytes, errors: RecordErrors) -> str:
    """The text; empty if it is not UTF-8."""
    try:
        decoded = text.decode()
    except UnicodeDecodeError as error:
        line = text.count(b"\n", 0, error.start) + 1
        place = where if isinstance(where, int) else f"{where}, line {line}"
        errors.add(place, "not UTF-8", not_utf8(text, error.start))
        return ""
    if not decoded.strip():
        errors.add(where, "empty document", "the document is empty")
    return decoded


def _files(folder: Path, kind: str, errors: RecordErrors) -> Iterator[Document]:
    paths = files_of(folder, kind)
    if not paths:
        suffix = SUFFIXES[kind][0]
        raise Refusal(
            f"There is no {suffix} file in {folder}. A folder of {kind} has one file for each document."
        )
    for path in paths:
        yield _file(path, folder, kind, errors)


def _file(path: Path, folder: Path, kind: str, errors: RecordErrors) -> Document:
    with refuse_unreadable(path):
        text = path.read_bytes()
    name = _name_of(path, folder)
    decoded = _decode(name, text, errors)
    if kind == "markdown" and path.suffix.lower() != ".txt":
        decoded = _markdown.prose(decoded)
    return Document(name, decoded)
