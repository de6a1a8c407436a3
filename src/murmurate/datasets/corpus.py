"""A corpus: how often each word occurs in each document."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from murmurate.errors import MissingExtra, Refusal

FRACTIONS = (
    "These look like tf-idf weights or shares, and a topic model needs counts: pass the counts from before "
    "any weighting (CountVectorizer, or the bag of words)."
)
LARGEST_COUNT = 2**31 - 1
_BLOCK = 1 << 20  # entries that are read or copied at a time


@dataclass(frozen=True, eq=False)
class Corpus:
    """D documents over V words: counts in compressed sparse rows.

    A document may be empty, except in a corpus that was read from a file. Raises Refusal if the arrays do not
    fit together; the entries themselves are not checked.
    """

    starts: NDArray[np.int64]  # [D + 1]: document d is starts[d]:starts[d + 1]
    words: NDArray[np.int32]  # [N]: 0..V-1, ascending and distinct within a document
    counts: NDArray[np.int32]  # [N]: all above 0
    vocabulary: tuple[str, ...] | None  # V words, or None where words have only ids
    vocabulary_size: int  # V
    digest: str | None = None  # a hash of all fields above; None if the corpus was not read from a file

    def __post_init__(self) -> None:
        dtypes = {"starts": np.int64, "words": np.int32, "counts": np.int32}
        for name, dtype in dtypes.items():
            array = getattr(self, name)
            if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype != dtype:
                raise Refusal(f"A corpus's {name} are a one-dimensional {dtype.__name__} array of numpy.")
        if not (
            len(self.starts)
            and self.starts[0] == 0
            and self.starts[-1] == len(self.words) == len(self.counts)
            and (self.starts[1:] >= self.starts[:-1]).all()
        ):
            raise Refusal("A corpus's starts rise from 0 to the length of its words, which its counts share.")
        if self.vocabulary is not None and len(self.vocabulary) != self.vocabulary_size:
            raise Refusal(
                f"The vocabulary has {len(self.vocabulary)} words, and the corpus {self.vocabulary_size}."
            )

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def tokens(self) -> int:
        """The number of words in all documents, repeated ones included."""
        return int(self.counts.sum(dtype=np.int64))

    @property
    def lengths(self) -> NDArray[np.int64]:
        """[D]: the number of distinct words of each document."""
        return np.diff(self.starts)

    def select(self, documents: ArrayLike) -> Corpus:
        """A copy of some documents, in the given order; ``documents`` are numbers or a mask [D].

        Raises IndexError for a number or a mask that does not fit.
        """
        chosen = np.asarray(documents)
        if chosen.dtype == np.bool_ and len(chosen) != len(self):
            raise IndexError(f"a mask of {len(chosen)} for {len(self)} documents")
        chosen = np.flatnonzero(chosen) if chosen.dtype == np.bool_ else chosen.astype(np.int64).reshape(-1)
        if len(chosen) and not 0 <= chosen.min() <= chosen.max() < len(self):
            raise IndexError(f"documents are numbered from 0 to {len(self) - 1}")
        lengths = self.starts[chosen + 1] - self.starts[chosen]
        starts = np.zeros(len(chosen) + 1, np.int64)
        np.cumsum(lengths, out=starts[1:])
        words, counts = np.empty(starts[-1], np.int32), np.empty(starts[-1], np.int32)
        for first, last in blocks(starts):
            block = slice(starts[first], starts[last])
            shift = self.starts[chosen[first:last]] - starts[first:last]
            index = np.arange(block.start, block.stop) + np.repeat(shift, lengths[first:last])
            words[block], counts[block] = self.words[index], self.counts[index]
        return Corpus(starts, words, counts, self.vocabulary, self.vocabulary_size)

    def with_vocabulary(self, vocabulary: tuple[str, ...]) -> RemappedCorpus:
        """The same documents over another vocabulary; words are matched by name, and left out if the other
        vocabulary lacks them.

        Raises Refusal if this corpus has no vocabulary, or no word of the other vocabulary.
        """
        if self.vocabulary is None:
            raise Refusal("Words have no names here. Give the corpus its vocabulary.")
        ids = {word: i for i, word in enumerate(vocabulary)}
        new_ids = np.array([ids.get(word, -1) for word in self.vocabulary], np.int32)
        remapped = RemappedCorpus(self, vocabulary, new_ids)
        if len(self.words) and not remapped.tokens:
            raise Refusal("These documents have no word of the topics' vocabulary.")
        return remapped

    def as_scipy(self) -> Any:
        """A ``scipy.sparse.csr_matrix`` [D, V] of the counts, which shares their memory. Raises MissingExtra
        without scipy."""
        try:
            from scipy.sparse import csr_matrix
        except ImportError as error:
            raise MissingExtra("scipy", "topics", "A corpus as a sparse matrix") from error
        shape = (len(self), self.vocabulary_size)
        return csr_matrix((self.counts, self.words, self.starts), shape=shape, copy=False)

    @classmethod
    def from_scipy(cls, matrix: Any, vocabulary: Sequence[str] | None = None) -> Corpus:
        """A copy of a sparse [D, V] matrix in any of scipy's formats; a row without entries becomes an empty
        document.

        Raises Refusal for what is no sparse matrix of two dimensions, for counts that are negative,
        fractional or too large, and for a vocabulary of other than V words.
        """
        if not hasattr(matrix, "tocsr"):
            raise Refusal(
                f"A sparse matrix [documents, words] is needed, not {type(matrix).__name__}. Dense counts: "
                "scipy.sparse.csr_matrix(counts)."
            )
        rows = matrix.tocsr()
        if len(rows.shape) != 2:  # a row of a sparse array
            raise Refusal(
                f"A sparse matrix [documents, words] is needed, and this one has the shape {rows.shape}. "
                "One document: counts.reshape(1, -1)."
            )
        starts = np.asarray(rows.indptr, np.int64)
        documents = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
        return cls.from_entries(
            documents, rows.indices, rows.data, shape=tuple(rows.shape), vocabulary=vocabulary
        )

    @classmethod
    def from_entries(
        cls,
        documents: ArrayLike,
        words: ArrayLike,
        counts: ArrayLike,
        *,
        shape: tuple[int, int],
        vocabulary: Sequence[str] | None = None,
    ) -> Corpus:
        """A corpus from entries in any order: documents [N], word ids [N] and counts [N]. Counts of one word
        in one document are summed, and counts of 0 are left out. ``shape`` is (D, V).

        Raises Refusal for ids that are not integers or are outside the shape, for counts that are negative,
        fractional or too large, and for a vocabulary of other than V words.
        """
        document, word = _ids("document", documents, shape[0]), _ids("word", words, shape[1])
        count = _as_integers(np.asarray(counts))
        kept = count > 0
        document, word, count = sort_and_sum(document[kept], word[kept], count[kept])
        if count.max(initial=0) > LARGEST_COUNT:
            at = int(count.argmax())
            raise Refusal(
                f"Document {document[at]} has word {word[at]} {count[at]} times, above {LARGEST_COUNT}. "
                "Leave that word out."
            )
        starts = np.zeros(shape[0] + 1, np.int64)
        np.cumsum(np.bincount(document, minlength=shape[0]), out=starts[1:])
        names = None if vocabulary is None else tuple(vocabulary)
        return cls(starts, word.astype(np.int32), count.astype(np.int32), names, shape[1])


@dataclass(frozen=True, eq=False)
class RemappedCorpus:
    """A corpus over another vocabulary, computed only for the documents that are selected, because a second
    corpus would take as much memory as the first."""

    corpus: Corpus
    vocabulary: tuple[str, ...]
    new_ids: NDArray[np.int32]  # [V of the corpus]: each word's id in the new vocabulary; -1: not in it

    def __len__(self) -> int:
        return len(self.corpus)

    @cached_property
    def tokens(self) -> int:
        """The number of words in all documents that are in the vocabulary, repeated ones included."""
        return sum(
            int(self.corpus.counts[a:b][self.new_ids[self.corpus.words[a:b]] >= 0].sum(dtype=np.int64))
            for a, b in pairwise([*range(0, len(self.corpus.words), _BLOCK), len(self.corpus.words)])
        )

    def select(self, documents: ArrayLike) -> Corpus:
        """A copy of some documents over the vocabulary; see ``Corpus.select``."""
        part = self.corpus.select(documents)
        words = self.new_ids[part.words]
        known = words >= 0
        return Corpus.from_entries(
            np.repeat(np.arange(len(part)), part.lengths)[known],
            words[known],
            part.counts[known],
            shape=(len(part), len(self.vocabulary)),
            vocabulary=self.vocabulary,
        )

    def to_corpus(self) -> Corpus:
        """All documents over the vocabulary, in memory."""
        parts = [self.select(np.arange(first, last)) for first, last in blocks(self.corpus.starts)]
        return Corpus(
            np.cumsum(np.concatenate([[0], *(part.lengths for part in parts)]), dtype=np.int64),
            np.concatenate([np.empty(0, np.int32), *(part.words for part in parts)]),
            np.concatenate([np.empty(0, np.int32), *(part.counts for part in parts)]),
            self.vocabulary,
            len(self.vocabulary),
        )


def _ids(name: str, given: ArrayLike, size: int) -> NDArray[Any]:
    """The ids as signed integers. Raises Refusal unless they are integers in 0..size - 1."""
    ids = np.asarray(given)
    if len(ids) and ids.dtype.kind not in "iu":
        raise Refusal(f"The {name} ids are {ids.dtype}, and must be integers.")
    if len(ids) and not 0 <= ids.min() <= ids.max() < size:
        raise Refusal(f"The {name} ids are from {ids.min()} to {ids.max()}, and must be in 0..{size - 1}.")
    return ids if ids.dtype.kind == "i" else ids.astype(np.int64)


def _as_integers(counts: NDArray[Any]) -> NDArray[Any]:
    """The counts as int64. Raises Refusal for negative, fractional or too large counts."""
    if not len(counts):
        return counts.astype(np.int64)
    if counts.dtype.kind not in "biuf":
        raise Refusal(f"Counts are numbers, not {counts.dtype}.")
    if not (counts >= 0).all():
        raise Refusal("A count is negative or not a number. A count is how often a word is in a document.")
    if counts.dtype.kind == "f" and (counts != np.floor(counts)).any():
        worst = counts[counts != np.floor(counts)][0]
        raise Refusal(f"A count is {worst:g}. {FRACTIONS}")
    if counts.max() > LARGEST_COUNT:
        raise Refusal(f"A count is {counts.max()}, above {LARGEST_COUNT}. Leave that word out.")
    return counts.astype(np.int64)


def sort_and_sum(
    documents: NDArray[Any], words: NDArray[Any], counts: NDArray[Any]
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """The entries [N] sorted by document, then by word, with the counts of one word in one document summed
    (int64). Entries that are already sorted and distinct are returned as they are."""
    key = (documents.astype(np.int64) << 31) + words
    if (key[1:] > key[:-1]).all():
        return documents, words, counts
    order = np.argsort(key, kind="stable")
    key = key[order]
    first = np.flatnonzero(np.diff(key, prepend=-1))
    sums = np.add.reduceat(counts[order].astype(np.int64), first)
    return documents[order][first], words[order][first], sums


def blocks(starts: NDArray[np.int64], entries: int = _BLOCK) -> list[tuple[int, int]]:
    """Ranges (first, last) of documents, each with about ``entries`` entries and at least one document."""
    total = len(starts) - 1
    cuts = np.searchsorted(starts, np.arange(entries, int(starts[-1]) + entries, entries))
    edges = np.unique(np.concatenate([[0], np.minimum(cuts, total), [total]]))
    return [(int(a), int(b)) for a, b in pairwise(edges)]
