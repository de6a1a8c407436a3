"""Corpora drawn by a seed, and by hypothesis."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from hypothesis import strategies as st

from murmurate.datasets.corpus import Corpus
from murmurate.datasets.tokens import Tokens, WordCounter


def corpus(seed: int, documents: int = 40, vocabulary: int = 30, *, empty: bool = False) -> Corpus:
    """Random counts; ``empty``: some documents have no word."""
    random = np.random.default_rng(seed)
    dense = random.poisson(0.3, (documents, vocabulary)) * random.integers(1, 2000, (documents, vocabulary))
    if not empty:
        dense[np.arange(documents), random.integers(0, vocabulary, documents)] += 1
    which, words = np.nonzero(dense)
    return Corpus.from_entries(which, words, dense[which, words], shape=dense.shape)


def dense(corpus: Corpus) -> np.ndarray:
    """[D, V] counts, entry by entry."""
    table = np.zeros((len(corpus), corpus.vocabulary_size), np.int64)
    for document in range(len(corpus)):
        for entry in range(corpus.starts[document], corpus.starts[document + 1]):
            table[document, corpus.words[entry]] += corpus.counts[entry]
    return table


def count(
    texts: Iterable[str], tokens: Tokens | None = None, vocabulary: Sequence[str] | None = None
) -> Corpus:
    """A corpus of texts, a document each, over the words that ``tokens`` keeps or over a given vocabulary."""
    counter = WordCounter(tokens or Tokens(), vocabulary)
    for text in texts:
        counter.add(text)
    return counter.finish()


def check(corpus: Corpus) -> None:
    """Words ascend within each document and are in the vocabulary, and counts are above 0."""
    for document in range(len(corpus)):
        words = corpus.words[corpus.starts[document] : corpus.starts[document + 1]]
        assert (words[1:] > words[:-1]).all()
        assert (words >= 0).all()
        assert (words < corpus.vocabulary_size).all()
    assert (corpus.counts > 0).all()


def same(one: Corpus, other: Corpus) -> bool:
    return (
        one.vocabulary_size == other.vocabulary_size
        and one.vocabulary == other.vocabulary
        and all(np.array_equal(getattr(one, n), getattr(other, n)) for n in ("starts", "words", "counts"))
    )


@st.composite
def corpora(draw: st.DrawFn) -> Corpus:
    """Of documents that all have a word, over a vocabulary of words or of ids alone."""
    size = draw(st.integers(1, 12))
    count = st.integers(1, 2**31 - 1)
    document = st.dictionaries(st.integers(0, size - 1), count, min_size=1)
    documents = draw(st.lists(document, min_size=1, max_size=8))
    entries = [(d, w, n) for d, found in enumerate(documents) for w, n in found.items()]
    which, words, counts = zip(*draw(st.permutations(entries)), strict=True)
    names = st.lists(st.text("abcdefgäж", min_size=1), min_size=size, max_size=size, unique=True)
    vocabulary = draw(st.none() | names)
    return Corpus.from_entries(which, words, counts, shape=(len(documents), size), vocabulary=vocabulary)
