"""Writes corpora in the formats that other programs read."""

from __future__ import annotations

import gzip
import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np

from murmurate.datasets.corpus import Corpus, blocks
from murmurate.datasets.vocabulary import vocabulary_beside
from murmurate.errors import Refusal, cause_of

_KINDS = ("uci", "matrix-market", "lda-c", "svmlight", "npz")


def write(corpus: Corpus, path: str | Path, kind: str, *, one_based: bool = True) -> None:
    """Write a corpus as ``uci``, ``matrix-market``, ``lda-c``, ``svmlight`` or ``npz``; all but ``npz``
    compressed by gzip if the name ends in ``.gz``. The corpus's vocabulary is written to a file beside it,
    where ``read`` looks for it.

    ``one_based``: whether word ids begin at 1 in SVMlight. All labels in SVMlight are 0. LDA-C and SVMlight
    do not store V. Files are replaced atomically. Raises Refusal for another kind, for documents without a
    word in LDA-C and SVMlight, where ``read`` refuses their lines, for equal words and words that a line
    cannot hold, for a vocabulary beside it if the corpus has none, and where the files cannot be written.
    """
    target = Path(path)
    if kind not in _KINDS:
        raise Refusal(f"A corpus cannot be written as '{kind}'. The kinds: {', '.join(_KINDS)}.")
    if kind in ("lda-c", "svmlight") and not corpus.lengths.all():
        raise Refusal(
            f"Document {corpus.lengths.argmin()} (from 0) has no word, and its line of {kind} would be "
            "refused when it is read. Leave such documents out, corpus.select(corpus.lengths > 0), or write "
            "uci, matrix-market or npz."
        )
    beside = vocabulary_beside(target)
    if corpus.vocabulary is None and beside.exists():
        raise Refusal(
            f"{beside} would be read as the vocabulary of this corpus, which has none. Remove it, or write "
            "the corpus elsewhere."
        )
    try:
        if corpus.vocabulary is not None:
            words = _vocabulary(corpus.vocabulary)
            with _replacing(beside) as file:
                file.writelines(words)
        with _replacing(target) as file:
            if kind == "npz":
                _write_npz(corpus, file)
            elif target.name.endswith(".gz"):
                with gzip.GzipFile("", "wb", compresslevel=6, fileobj=file, mtime=0) as packed:
                    packed.writelines(_lines(corpus, kind, one_based))
            else:
                file.writelines(_lines(corpus, kind, one_based))
    except OSError as error:
        raise Refusal(f"{target} cannot be written: {cause_of(error)}. Choose another path.") from error


@contextmanager
def _replacing(target: Path) -> Iterator[BinaryIO]:
    """A file that replaces ``target`` when it is complete."""
    fresh = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with open(fresh, "wb") as file:
            yield file
        fresh.replace(target)
    finally:
        fresh.unlink(missing_ok=True)


def _vocabulary(words: tuple[str, ...]) -> Iterator[bytes]:
    ids: dict[str, int] = {}
    for number, word in enumerate(words):
        stored = word.encode(errors="replace").decode()
        if not word.strip() or "\n" in word or word.endswith("\r") or stored != word:
            raise Refusal(
                f"Word {number} of the vocabulary is {word!r}, which a line cannot hold. Rename it."
            )
        if ids.setdefault(word, number) != number:
            raise Refusal(f"Words {ids[word]} and {number} of the vocabulary are {word!r}. Rename one.")
    return (word.encode() + b"\n" for word in words)


def _lines(corpus: Corpus, kind: str, one_based: bool) -> Iterator[bytes]:
    sizes = (len(corpus), corpus.vocabulary_size, len(corpus.words))
    if kind == "uci":
        yield b"%d\n%d\n%d\n" % sizes
        yield from _triples(corpus)
    elif kind == "matrix-market":
        yield b"%%%%MatrixMarket matrix coordinate integer general\n%d %d %d\n" % sizes
        yield from _triples(corpus)
    elif kind == "lda-c":
        for length, pairs in zip(corpus.lengths.tolist(), _pairs(corpus, 0), strict=True):
            yield b"%d%b\n" % (length, pairs)
    else:
        for pairs in _pairs(corpus, int(one_based)):
            yield b"0%b\n" % pairs


def _triples(corpus: Corpus) -> Iterator[bytes]:
    """A line ``document word count`` for each entry, with numbers from 1; joined for several documents."""
    for first, last in blocks(corpus.starts):
        part = slice(corpus.starts[first], corpus.starts[last])
        documents = np.repeat(np.arange(first + 1, last + 1), np.diff(corpus.starts[first : last + 1]))
        rows = zip(
            documents.tolist(), (corpus.words[part] + 1).tolist(), corpus.counts[part].tolist(), strict=True
        )
        yield b"".join(map(b"%d %d %d\n".__mod__, rows))


def _pairs(corpus: Corpus, base: int) -> Iterator[bytes]:
    """For each document, the joined ``" word:count"`` of its words."""
    for first, last in blocks(corpus.starts):
        begin = int(corpus.starts[first])
        part = slice(begin, int(corpus.starts[last]))
        rows = zip((corpus.words[part] + base).tolist(), corpus.counts[part].tolist(), strict=True)
        pairs = list(map(b" %d:%d".__mod__, rows))
        edges = (corpus.starts[first : last + 1] - begin).tolist()
        for a, b in pairwise(edges):
            yield b"".join(pairs[a:b])


def _write_npz(corpus: Corpus, file: BinaryIO) -> None:
    """Write the counts in the format of ``scipy.sparse.save_npz``."""
    np.savez_compressed(
        cast(str, file),  # numpy's types allow only paths
        indices=corpus.words,
        indptr=corpus.starts,
        format=np.array(b"csr"),
        shape=np.array([len(corpus), corpus.vocabulary_size]),
        data=corpus.counts,
    )
