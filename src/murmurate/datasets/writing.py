"""Writes corpora in the formats that others read."""

from __future__ import annotations

import gzip
import os
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np

from murmurate.datasets._headers import vocabulary_beside
from murmurate.datasets.corpus import Corpus, blocks
from murmurate.errors import Refusal


def write(corpus: Corpus, path: str | Path, kind: str, *, one_based: bool = True) -> None:
    """Write a corpus as ``uci``, ``matrix-market``, ``lda-c``, ``svmlight`` or ``npz``; compressed if the
    name ends in ``.gz``. A vocabulary goes into the file beside it that ``read`` looks for.

    ``one_based``: where SVMlight's ids begin; its labels are all 0. LDA-C and SVMlight do not keep V. A
    file is there whole or not at all. Raises Refusal for another kind, for words that a line cannot hold,
    and where nothing can be written.
    """
    target = Path(path)
    writers: dict[str, Callable[[Corpus], Iterator[bytes]]] = {
        "uci": _uci,
        "matrix-market": _matrix_market,
        "lda-c": _lda_c,
        "svmlight": lambda c: _svmlight(c, int(one_based)),
    }
    if kind not in (*writers, "npz"):
        raise Refusal(f"A corpus cannot be written as '{kind}'. The kinds: {', '.join([*writers, 'npz'])}.")
    try:
        if corpus.vocabulary is not None:
            words = _vocabulary(corpus.vocabulary)
            _replace(vocabulary_beside(target), lambda file: file.writelines(words))
        if kind == "npz":
            _replace(target, lambda file: _npz(corpus, file))
        elif target.name.endswith(".gz"):
            _replace(target, lambda file: _packed(writers[kind](corpus), file))
        else:
            _replace(target, lambda file: file.writelines(writers[kind](corpus)))
    except OSError as error:
        raise Refusal(f"{target} cannot be written: {error.strerror}. Choose another path.") from error


def _replace(target: Path, fill: Callable[[BinaryIO], None]) -> None:
    fresh = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with open(fresh, "wb") as file:
            fill(file)
        fresh.replace(target)
    finally:
        fresh.unlink(missing_ok=True)


def _packed(parts: Iterator[bytes], file: BinaryIO) -> None:
    with gzip.GzipFile("", "wb", compresslevel=6, fileobj=file, mtime=0) as packed:
        packed.writelines(parts)


def _vocabulary(words: tuple[str, ...]) -> Iterator[bytes]:
    for number, word in enumerate(words):
        if not word.strip() or "\n" in word or word.endswith("\r"):
            raise Refusal(
                f"Word {number} of the vocabulary is {word!r}, which a line cannot hold. Rename it."
            )
    return (word.encode() + b"\n" for word in words)


def _uci(corpus: Corpus) -> Iterator[bytes]:
    yield b"%d\n%d\n%d\n" % (len(corpus), corpus.vocabulary_size, len(corpus.words))
    yield from _entries(corpus)


def _matrix_market(corpus: Corpus) -> Iterator[bytes]:
    yield b"%%MatrixMarket matrix coordinate integer general\n"
    yield b"%d %d %d\n" % (len(corpus), corpus.vocabulary_size, len(corpus.words))
    yield from _entries(corpus)


def _entries(corpus: Corpus) -> Iterator[bytes]:
    """``document word count``, from 1, a line each."""
    for first, last in blocks(corpus.starts):
        part = slice(corpus.starts[first], corpus.starts[last])
        documents = np.repeat(np.arange(first + 1, last + 1), np.diff(corpus.starts[first : last + 1]))
        rows = zip(
            documents.tolist(), (corpus.words[part] + 1).tolist(), corpus.counts[part].tolist(), strict=True
        )
        yield b"".join(map(b"%d %d %d\n".__mod__, rows))


def _documents(corpus: Corpus, base: int) -> Iterator[bytes]:
    """`` word:count`` of each document, in one piece."""
    for first, last in blocks(corpus.starts):
        begin = int(corpus.starts[first])
        part = slice(begin, int(corpus.starts[last]))
        rows = zip((corpus.words[part] + base).tolist(), corpus.counts[part].tolist(), strict=True)
        pairs = list(map(b" %d:%d".__mod__, rows))
        edges = (corpus.starts[first : last + 1] - begin).tolist()
        for a, b in pairwise(edges):
            yield b"".join(pairs[a:b])


def _lda_c(corpus: Corpus) -> Iterator[bytes]:
    for length, pairs in zip(corpus.lengths.tolist(), _documents(corpus, 0), strict=True):
        yield b"%d%b\n" % (length, pairs)


def _svmlight(corpus: Corpus, base: int) -> Iterator[bytes]:
    for pairs in _documents(corpus, base):
        yield b"0%b\n" % pairs


def _npz(corpus: Corpus, file: BinaryIO) -> None:
    """As ``scipy.sparse.save_npz`` writes it."""
    np.savez_compressed(
        cast(str, file),  # numpy's types know of paths alone
        indices=corpus.words,
        indptr=corpus.starts,
        format=np.array(b"csr"),
        shape=np.array([len(corpus), corpus.vocabulary_size]),
        data=corpus.counts,
    )
