"""A corpus as what is learned from, and its documents in mini-batches."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from murmurate.datasets.corpus import Corpus
from murmurate.datasets.reading import Skipped, kind_of, read
from murmurate.datasets.tokens import STOP_WORDS, Tokens, stop_words_in
from murmurate.errors import Refusal
from murmurate.fabric.interface import Channel
from murmurate.spec import Batch, EnvSpec, derive_seed
from murmurate.workloads.conjugate import Library

E = TypeVar("E")


@dataclass(frozen=True)
class CorpusWorld:
    """A corpus in a file or a folder, and which of its documents are kept back.

    Paths become absolute, so that a run may be resumed from anywhere.
    path: of the corpus. kind: of file (docs/corpora.md); none guesses.
    vocabulary: a file with a word a line; none looks beside the corpus.
    validation, test: documents kept back, as a number or, below 1, as a share.
    split_seed: decides which ones. skip_bad: leave out what cannot be read, and count it, instead of
        refusing the corpus. cache: folder for the converted corpus; none is beside it.
    transpose: a Matrix Market file is [words, documents]. one_based: whether ids begin at 1 (SVMlight has to
        be told). vocabulary_size: V, where the format does not say.
    min_letters: that a word of a text has at least.
    stop_words: file with words that a text is counted without; none is a list of English ones.
    min_df: documents of a text that a word must stand in; 3 is a number, 0.01 a share.
    max_df: documents of a text that a word may stand in; 1 is one document, 1.0 is all.
    max_vocabulary: words of a text that are kept, the most frequent of these; none keeps all.
    """

    path: str = ""
    kind: str | None = None
    vocabulary: str | None = None
    validation: float = 0.02
    test: float = 0.05
    split_seed: int = 0
    skip_bad: bool = False
    cache: str | None = None
    transpose: bool = False
    one_based: bool | None = None
    vocabulary_size: int | None = None
    min_letters: int = Tokens.min_letters
    stop_words: str | None = None
    min_df: int | float = Tokens.min_df
    max_df: int | float = Tokens.max_df
    max_vocabulary: int | None = Tokens.max_vocabulary

    name: ClassVar[str] = "corpus"
    holds: ClassVar[str] = "documents"

    def __post_init__(self) -> None:
        for name in ("path", "vocabulary", "cache", "stop_words"):
            if getattr(self, name):  # a run goes on from other folders too; links keep their telling names
                object.__setattr__(self, name, os.path.abspath(getattr(self, name)))

    @property
    def is_text(self) -> bool:
        """Whether its words are what a tokeniser found. Raises Refusal for a file of no known kind."""
        return (self.kind or kind_of(Path(self.path))) == "text"

    def without_places(self) -> CorpusWorld:
        """The same, wherever its files lie."""
        return dataclasses.replace(self, path="", vocabulary=None, cache=None, stop_words=None)

    def whole(self) -> Corpus:
        """All documents. Raises Refusal for a corpus that cannot be read."""
        return _read(self, repr(self))[0]

    def read_as(self, **instead: Any) -> tuple[Corpus, Skipped]:
        """All documents, and what of the source is not among them; ``instead``: arguments of ``read`` in the
        place of these settings."""
        skipped = Skipped()
        given = {
            "kind": self.kind,
            "vocabulary": None if self.vocabulary is None else Path(self.vocabulary),
            "skip_bad": self.skip_bad,
            "cache": None if self.cache is None else Path(self.cache),
            "transpose": self.transpose,
            "one_based": self.one_based,
            "vocabulary_size": self.vocabulary_size,
            "tokens": None
            if "vocabulary" in instead
            else self.tokens(),  # given words are counted as they are
        }
        return read(Path(self.path), skipped=skipped, **(given | instead)), skipped

    def skipped(self) -> Skipped:
        """What of its source is not in it."""
        return _read(self, repr(self))[1]

    def tokens(self) -> Tokens | None:
        """How its text becomes words; None where nothing else is said than what is usual. Raises Refusal for
        numbers that make no sense, and for a file of stop words that cannot be read."""
        said = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(Tokens)
            if field.name != "stop_words"
        }
        own = STOP_WORDS if self.stop_words is None else stop_words_in(Path(self.stop_words))
        tokens = Tokens(**said, stop_words=own)
        return None if self.stop_words is None and tokens == Tokens() else tokens

    def divided(self) -> tuple[Chosen[Corpus], Chosen[Corpus], Chosen[Corpus]]:
        """The documents (to learn from, to validate with, to test with)."""
        corpus = self.whole()
        train, validation, test = (Chosen(corpus, part) for part in divide(self, len(corpus)))
        return train, validation, test

    @property
    def spec(self) -> EnvSpec:
        """What a topic model must know: an observation is a document's counts [V]."""
        corpus = self.whole()
        return self.spec_of(len(corpus), corpus.vocabulary_size)

    def spec_of(self, documents: int, vocabulary_size: int) -> EnvSpec:
        """``spec`` of a corpus of that size, without a look at it."""
        train, _, _ = divide(self, documents)
        return EnvSpec("corpus", (vocabulary_size,), torch.int32, 0, documents=len(train))


class Divisible(Protocol):
    """Examples in a file, and which of them are kept back; ``holds`` is what they are called."""

    holds: ClassVar[str]

    @property
    def path(self) -> str: ...

    @property
    def validation(self) -> float: ...

    @property
    def test(self) -> float: ...

    @property
    def split_seed(self) -> int: ...


def divide(world: Divisible, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Numbers of ``count`` examples (to learn from, to validate with, to test with). Raises Refusal if none
    of the first are left."""
    kept, of = [], world.holds
    for name, share in (("validation", world.validation), ("test", world.test)):
        if share < 0 or (share >= 1 and share != int(share)):
            raise Refusal(f"world.{name} is {share}; give a number of {of}, or a share below 1.")
        kept.append(int(share) if share >= 1 else round(share * count))
    if count - sum(kept) < 1:
        raise Refusal(
            f"{world.path} has {count:,} {of} and {sum(kept):,} of them are kept back: nothing is left to "
            "learn from. Use a smaller --world.validation and --world.test."
        )
    order = np.random.default_rng(derive_seed(world.split_seed, "split")).permutation(count)
    held, tested, train = np.split(order, np.cumsum(kept))
    return train, held, tested


@dataclass(frozen=True)
class Chosen(Generic[E]):
    """Some documents of a corpus, or rows of a table, which are not copied before they are asked for."""

    corpus: Library[E]
    documents: NDArray[np.int64]  # their numbers

    def __len__(self) -> int:
        return len(self.documents)

    def select(self, chosen: Any) -> E:
        """Those of them, copied."""
        return self.corpus.select(self.documents[chosen])


@functools.lru_cache(maxsize=2)
def _read(world: CorpusWorld, said: str) -> tuple[Corpus, Skipped]:
    """said: a world that says max_df 1 equals one that says 1.0, which is another corpus."""
    if not world.path:
        raise Refusal("say which corpus: murmurate topics fit CORPUS, or --world.path CORPUS.")
    return world.read_as()


class DocumentSource:
    """Yields mini-batches for ever (a ``Source``): each pass goes once through all examples, and is divided
    among the replicas, each of which sees its part in an order of its own."""

    def __init__(self, documents: Chosen[Any], batch: int, *, seed: int, rank: int, replicas: int) -> None:
        self.alive: Callable[[int], bool] = lambda played: False
        self._documents, self._batch = documents, batch
        self._seed, self._rank, self._replicas = seed, rank, replicas
        self._passes, self._place = 0, 0
        self._order: NDArray[np.int64] | None = None

    exact = True

    def __iter__(self) -> DocumentSource:
        return self

    def __next__(self) -> Batch:
        parts, missing = [], self._batch
        while missing:
            order = self._pass()
            part = order[self._place : self._place + missing]
            parts.append(part)
            missing -= len(part)
            self._place += len(part)
            if self._place == len(order):
                self._passes, self._place, self._order = self._passes + 1, 0, None
        documents = self._documents.select(np.concatenate(parts))
        return Batch(documents, env_steps=len(documents))

    def _pass(self) -> NDArray[np.int64]:
        """What this replica sees in the present pass; with fewer documents than replicas, all of them."""
        if self._order is None:
            random = np.random.default_rng(derive_seed(self._seed, "pass", self._passes))
            whole = random.permutation(len(self._documents))
            part = whole[self._rank :: self._replicas]
            self._order = part if len(part) else whole
        return self._order

    def share(self, channel: Channel, learners: int) -> None:
        raise RuntimeError("documents are not weighed by what other replicas hold")

    def fields(self) -> dict[str, Any]:
        return {"passes": self._passes + self._place / max(len(self._pass()), 1)}

    def events(self) -> list[tuple[str, str]]:
        return []

    def state(self) -> dict[str, Any]:
        return {"passes": self._passes, "place": self._place}

    def load(self, state: dict[str, Any]) -> None:
        self._passes, self._place, self._order = int(state["passes"]), int(state["place"]), None

    def close(self) -> None:
        pass
