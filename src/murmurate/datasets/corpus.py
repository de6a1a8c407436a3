"""A corpus: how often each word stands in each document, without their order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from murmurate.errors import MissingExtra, Refusal

FRACTIONS = (
    "These look like tf-idf weights or shares, and a topic model needs counts: pass what was counted before "
    "any weighting (CountVectorizer, or the bag of words)."
)
_BLOCK = 1 << 20  # entries that are looked at or copied at a time


@dataclass(frozen=True, eq=False)
class Corpus:
    """D documents over V words, as counts in compressed rows.

    A document may be empty; files hand out none that are (``reading.read``). Raises Refusal where the
    arrays do not fit together; the entries themselves are looked at by ``check``.
    """

    starts: NDArray[np.int64]  # [D + 1]: document d is starts[d]:starts[d + 1]
    words: NDArray[np.int32]  # [N]: in 0..V-1, ascending and distinct within a document
    counts: NDArray[np.int32]  # [N]: all above 0
    vocabulary: tuple[str, ...] | None  # V words, or None where there are only ids
    vocabulary_size: int  # V
    digest: str | None = None  # of all of this; None where it was not read from a file

    def __post_init__(self) -> None:
        kinds = {"starts": np.int64, "words": np.int32, "counts": np.int32}
        for name, kind in kinds.items():
            array = getattr(self, name)
            if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype != kind:
                raise Refusal(f"A corpus's {name} are a one-dimensional {kind.__name__} array of numpy.")
        if not (
            len(self.starts)
            and self.starts[0] == 0
            and self.starts[-1] == len(self.words) == len(self.counts)
            and (self.starts[1:] >= self.starts[:-1]).all()
        ):
            raise Refusal(
                "A corpus's starts rise from 0 to the number of its entries, which words and counts have."
            )
        if self.vocabulary is not None and len(self.vocabulary) != self.vocabulary_size:
            raise Refusal(
                f"The vocabulary has {len(self.vocabulary)} words, and the corpus {self.vocabulary_size}."
            )

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def tokens(self) -> int:
        """How many words all documents have, each as often as it stands there."""
        return int(self.counts.sum(dtype=np.int64))

    @property
    def lengths(self) -> NDArray[np.int64]:
        """[D]: distinct words of each document."""
        return np.diff(self.starts)

    def document_tokens(self) -> NDArray[np.int64]:
        """[D]: words of each document, each as often as it stands there."""
        totals = np.empty(len(self), np.int64)
        for first, last in blocks(self.starts):
            edges = self.starts[first : last + 1]
            sums = np.zeros(edges[-1] - edges[0] + 1, np.int64)
            np.cumsum(self.counts[edges[0] : edges[-1]], out=sums[1:])
            totals[first:last] = np.diff(sums[edges - edges[0]])
        return totals

    def select(self, documents: ArrayLike) -> Corpus:
        """Those documents, in that order, copied; ``documents`` are numbers or a mask [D].

        Raises IndexError for a document that is not there.
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
            into = slice(starts[first], starts[last])
            shift = self.starts[chosen[first:last]] - starts[first:last]
            index = np.arange(into.start, into.stop) + np.repeat(shift, lengths[first:last])
            words[into], counts[into] = self.words[index], self.counts[index]
        return Corpus(starts, words, counts, self.vocabulary, self.vocabulary_size)

    def check(self) -> None:
        """Look at every entry. Raises Refusal that names the first document with a wrong one."""
        for first, last in blocks(self.starts):
            part = slice(self.starts[first], self.starts[last])
            words, counts = self.words[part], self.counts[part]
            inside = np.ones(
                len(words), np.bool_
            )  # whether an entry is of the same document as the one before
            begins = self.starts[first:last] - part.start
            inside[begins[begins < len(words)]] = False
            wrong = (words < 0) | (words >= self.vocabulary_size) | (counts < 1)
            wrong[1:] |= inside[1:] & (words[1:] <= words[:-1])
            if wrong.any():
                place = part.start + int(wrong.argmax())
                document = int(np.searchsorted(self.starts, place, side="right")) - 1
                raise Refusal(
                    f"Document {document} has word {self.words[place]} with count {self.counts[place]}. "
                    f"Words ascend within a document and are in 0..{self.vocabulary_size - 1}, counts are "
                    "above 0. Corpus.from_entries sorts and sums."
                )

    def over(self, vocabulary: tuple[str, ...]) -> Over:
        """The same documents over other words, by their names; words that are not among them are left out.

        Raises Refusal without names, or if not a word of the documents is among them.
        """
        if self.vocabulary is None:
            raise Refusal("Words have no names here. Give the corpus its vocabulary.")
        number = {word: i for i, word in enumerate(vocabulary)}
        place = np.array([number.get(word, -1) for word in self.vocabulary], np.int32)
        over = Over(self, vocabulary, place)
        if len(self.words) and not over.tokens:
            raise Refusal("Not a word of these documents is among those that the topics are over.")
        return over

    def as_scipy(self) -> Any:
        """[D, V] ``scipy.sparse.csr_matrix`` of counts, on the same memory. Raises MissingExtra."""
        try:
            from scipy.sparse import csr_matrix
        except ImportError as error:
            raise MissingExtra("scipy", "topics", "A corpus as a sparse matrix") from error
        shape = (len(self), self.vocabulary_size)
        return csr_matrix((self.counts, self.words, self.starts), shape=shape, copy=False)

    @classmethod
    def from_scipy(cls, matrix: Any, vocabulary: Sequence[str] | None = None) -> Corpus:
        """Of a sparse [D, V] matrix in any of scipy's formats, copied; a row without entries stays.

        Raises Refusal for counts that are negative or fractional.
        """
        if not hasattr(matrix, "tocsr"):
            raise Refusal(
                f"A sparse matrix [documents, words] is needed, not {type(matrix).__name__}. Dense counts: "
                "scipy.sparse.csr_matrix(counts)."
            )
        rows = matrix.tocsr()
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
        """Of [N] documents, [N] word ids and [N] counts in any order; those of one word in one document are
        summed, and those of 0 left out. ``shape`` is (D, V).

        Raises Refusal for an id outside the shape, and for counts that are negative or fractional.
        """
        which, word, count = np.asarray(documents), np.asarray(words), whole(np.asarray(counts))
        for name, ids, size in (("document", which, shape[0]), ("word", word, shape[1])):
            if len(ids) and not 0 <= ids.min() <= ids.max() < size:
                raise Refusal(f"There is a {name} {ids.max()} or {ids.min()}, and they are in 0..{size - 1}.")
        kept = count > 0
        if not kept.all():
            which, word, count = which[kept], word[kept], count[kept]
        which, word, count = ordered(which, word, count, shape[1])
        if len(count) and count.max() > np.iinfo(np.int32).max:
            at = int(count.argmax())
            raise Refusal(
                f"Document {which[at]} has word {word[at]} {count[at]} times, above "
                f"{np.iinfo(np.int32).max}. Leave that word out."
            )
        starts = np.zeros(shape[0] + 1, np.int64)
        np.cumsum(np.bincount(which, minlength=shape[0]), out=starts[1:])
        known = None if vocabulary is None else tuple(str(w) for w in vocabulary)
        return cls(starts, word.astype(np.int32), count.astype(np.int32), known, shape[1])


@dataclass(frozen=True, eq=False)
class Over:
    """A corpus over other words, made of a few documents when they are asked for: a second corpus would take
    as much memory as the first."""

    corpus: Corpus
    vocabulary: tuple[str, ...]  # the other words
    place: NDArray[np.int32]  # [V]: number of each of the corpus's words among them, -1 where it is not

    def __len__(self) -> int:
        return len(self.corpus)

    @cached_property
    def tokens(self) -> int:
        """How many words all documents have that are among the others."""
        return sum(
            int(self.corpus.counts[a:b][self.place[self.corpus.words[a:b]] >= 0].sum(dtype=np.int64))
            for a, b in pairwise([*range(0, len(self.corpus.words), _BLOCK), len(self.corpus.words)])
        )

    def select(self, documents: ArrayLike) -> Corpus:
        """Those documents over the other words; see ``Corpus.select``."""
        part = self.corpus.select(documents)
        words = self.place[part.words]
        known = words >= 0
        found = Corpus.from_entries(
            np.repeat(np.arange(len(part)), part.lengths)[known],
            words[known],
            part.counts[known],
            shape=(len(part), len(self.vocabulary)),
        )
        return replace(found, vocabulary=self.vocabulary)

    def whole(self) -> Corpus:
        """All documents over the other words, in memory."""
        parts = [self.select(np.arange(first, last)) for first, last in blocks(self.corpus.starts)]
        return Corpus(
            np.cumsum(np.concatenate([[0], *(part.lengths for part in parts)]), dtype=np.int64),
            np.concatenate([np.empty(0, np.int32), *(part.words for part in parts)]),
            np.concatenate([np.empty(0, np.int32), *(part.counts for part in parts)]),
            self.vocabulary,
            len(self.vocabulary),
        )


def whole(counts: NDArray[Any]) -> NDArray[Any]:
    """The counts as integers. Raises Refusal for negative, fractional and too large ones."""
    if not len(counts):
        return counts.astype(np.int64)
    if counts.dtype.kind not in "biuf":
        raise Refusal(f"Counts are numbers, not {counts.dtype}.")
    if not (counts >= 0).all():
        raise Refusal(
            "A count is negative or not a number. Counts say how often a word stands in a document."
        )
    if counts.dtype.kind == "f" and (counts != np.floor(counts)).any():
        worst = counts[counts != np.floor(counts)][0]
        raise Refusal(f"A count is {worst:g}. {FRACTIONS}")
    if counts.max() > np.iinfo(np.int32).max:
        raise Refusal(f"A count is {counts.max()}, above {np.iinfo(np.int32).max}. Leave that word out.")
    return counts.astype(np.int64)


def ordered(
    documents: NDArray[Any], words: NDArray[Any], counts: NDArray[Any], vocabulary_size: int
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Entries by document, then by word, those of one pair summed to 64 bits; [N] each, and as they are if
    they are so."""
    key = documents.astype(np.int64) * max(vocabulary_size, 1) + words
    if (key[1:] > key[:-1]).all():
        return documents, words, counts
    order = np.argsort(key, kind="stable")
    key = key[order]
    first = np.flatnonzero(np.diff(key, prepend=-1))
    sums = np.add.reduceat(counts[order].astype(np.int64), first)
    return documents[order][first], words[order][first], sums


def blocks(starts: NDArray[np.int64], entries: int = _BLOCK) -> list[tuple[int, int]]:
    """Ranges of documents, each of about so many entries (one document at least)."""
    total = len(starts) - 1
    cuts = np.searchsorted(starts, np.arange(entries, int(starts[-1]) + entries, entries))
    edges = np.unique(np.concatenate([[0], np.minimum(cuts, total), [total]]))
    return [(int(a), int(b)) for a, b in pairwise(edges)]


def split(
    corpus: Corpus, *, validation: int | float, test: int | float, seed: int
) -> tuple[Corpus, Corpus, Corpus]:
    """(train, validation, test), drawn without replacement by ``seed``; each in the corpus's order.

    ``validation`` and ``test`` are documents (int) or shares of them in [0, 1) (float); a share is rounded to
    whole documents. Raises Refusal where no document is left to train on.
    """
    sizes = [_documents("validation", validation, len(corpus)), _documents("test", test, len(corpus))]
    if sum(sizes) >= len(corpus):
        raise Refusal(
            f"{sizes[0]} documents for validation and {sizes[1]} for the test leave none of {len(corpus)} to "
            "train on. Ask for fewer."
        )
    drawn = np.random.default_rng(seed).permutation(len(corpus))
    held, tested, trained = np.split(drawn, np.cumsum(sizes))
    return corpus.select(np.sort(trained)), corpus.select(np.sort(held)), corpus.select(np.sort(tested))


def _documents(name: str, size: int | float, total: int) -> int:
    if isinstance(size, bool) or not size >= 0 or (isinstance(size, float) and size >= 1):
        raise Refusal(
            f"{name} is {size}. Give a number of documents (a whole number), or a share of them from 0.0 to "
            "below 1.0."
        )
    return round(size * total) if isinstance(size, float) else int(size)
