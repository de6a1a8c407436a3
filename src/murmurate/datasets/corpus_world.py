"""A data set of the documents of a corpus."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from murmurate.datasets._files import state_of
from murmurate.datasets._text_files import TEXT_KINDS, files_of
from murmurate.datasets._texts import TextSource
from murmurate.datasets.corpus import Corpus
from murmurate.datasets.interface import Split, Subset, other_data, split_indices
from murmurate.datasets.reading import Skipped, detect_kind, read
from murmurate.datasets.tokens import (
    FORMER_DEFAULTS,
    STOP_WORDS,
    VERSION,
    DocumentFrequency,
    Tokens,
    stop_words_in,
)
from murmurate.datasets.vocabulary import vocabulary_beside
from murmurate.errors import Refusal
from murmurate.ranges import NonNegativeFloat, PositiveInt, Range, Seed
from murmurate.spec import EnvSpec, World


@dataclass(frozen=True)
class CorpusWorld(World):
    """A corpus in a file or a folder, and which of its documents are held out.

    Paths become absolute, so that a run may be resumed from anywhere.
    path: path of the corpus. kind: kind of file (docs/corpora.md); none detects it.
    vocabulary: a file with one word on each line; none looks for it beside the corpus.
    validation, test: documents held out, as a number or, below 1, as a share.
    split_seed: seed of the random choice of documents that are held out. skip_bad: leave out what cannot be
        read, and count it, instead of refusing the corpus. cache: folder for the converted corpus; none puts
        it beside the corpus.
    transpose: a Matrix Market file is [words, documents]. one_based: whether word ids begin at 1 (required
        for SVMlight). vocabulary_size: number of words, where the format does not give it.
    min_letters: for text, the least length of words that are counted.
    stop_words: for text, file with words that are not counted; none uses a built-in list of English words.
    min_df: for text, least number of documents that a word must occur in; 3 is a number, 0.01 a share.
    max_df: for text, greatest number of documents that a word may occur in; 1 is one document, 1.0 is all.
    max_vocabulary: for text, how many words are kept, the most frequent ones; none keeps all.
    bigrams: for text, whether pairs of words that belong together, such as machine_learning, count as one
        word.
    column: column of a CSV or JSON-lines file that has the text of a document.
    name_column: column of a CSV or JSON-lines file that has the name of a document; none numbers documents.
    """

    path: str = field(default="", metadata={"place": True})
    kind: str | None = None
    vocabulary: str | None = field(default=None, metadata={"place": True})
    validation: NonNegativeFloat = 0.02
    test: NonNegativeFloat = 0.05
    split_seed: Seed = 0
    skip_bad: bool = False
    cache: str | None = field(default=None, metadata={"place": True})
    transpose: bool = False
    one_based: bool | None = None
    vocabulary_size: Annotated[int, Range(1, 2**31 - 2)] | None = None
    min_letters: PositiveInt = Tokens.min_letters
    stop_words: str | None = field(default=None, metadata={"place": True})
    min_df: DocumentFrequency = Tokens.min_df
    max_df: DocumentFrequency = Tokens.max_df
    max_vocabulary: PositiveInt | None = Tokens.max_vocabulary
    bigrams: bool = field(default=False, metadata={"since": 6})
    column: str | None = field(default=None, metadata={"since": 6})
    name_column: str | None = field(default=None, metadata={"since": 6})

    name: ClassVar[str] = "corpus"
    unit: ClassVar[str] = "documents"

    def __post_init__(self) -> None:
        for name in ("path", "vocabulary", "cache", "stop_words"):
            if getattr(self, name):  # a run may be resumed from another folder; links are not resolved
                object.__setattr__(self, name, os.path.abspath(getattr(self, name)))

    @property
    def is_text(self) -> bool:
        """Whether the corpus is text, which the tokeniser splits into words. Raises Refusal for a file of an
        unknown kind."""
        return (self.kind or detect_kind(Path(self.path))) in TEXT_KINDS

    def texts(self) -> TextSource | None:
        """The source of the documents' texts; None for a corpus of counts. Raises Refusal for a file of an
        unknown kind."""
        kind = self.kind or detect_kind(Path(self.path))
        if kind not in TEXT_KINDS:
            return None
        return TextSource(Path(self.path), kind, self.column, self.name_column)

    def load(self) -> Corpus:
        """All documents. Raises Refusal for a corpus that cannot be read."""
        return _read(self, repr(self), self._state())[0]

    def _state(self) -> str:
        """The state of the files that the corpus is read from."""
        path = Path(self.path)
        if not self.path:
            return ""
        # of all kinds: what is a document of kind text is one of kind markdown too
        files = files_of(path, "markdown") if path.is_dir() else [path, vocabulary_beside(path)]
        return state_of(*files, self.vocabulary or "", self.stop_words or "")

    def read_as(self, **overrides: Any) -> tuple[Corpus, Skipped]:
        """(all documents, what was left out of them). overrides: arguments of ``read`` that replace these
        settings. Raises Refusal as ``read``."""
        skipped = Skipped()
        arguments = {
            "kind": self.kind,
            "vocabulary": None if self.vocabulary is None else Path(self.vocabulary),
            "skip_bad": self.skip_bad,
            "cache": None if self.cache is None else Path(self.cache),
            "transpose": self.transpose,
            "one_based": self.one_based,
            "vocabulary_size": self.vocabulary_size,
            # with a vocabulary, exactly its words are counted
            "tokens": None if "vocabulary" in overrides else self.tokens(),
            "bigrams": self.bigrams,
            "column": self.column,
            "name_column": self.name_column,
        }
        return read(Path(self.path), skipped=skipped, **(arguments | overrides)), skipped

    def skipped(self) -> tuple[str, dict[str, int]] | None:
        skipped = _read(self, repr(self), self._state())[1]
        return (str(skipped), dict(skipped.causes)) if skipped.causes else None

    def tokens(self) -> Tokens | None:
        """How text is split into words; None for the defaults, and for ``FORMER_DEFAULTS``, which a run on a
        corpus of counts may have stored.

        Raises Refusal for invalid numbers, and for a file of stop words that cannot be read.
        """
        stop_words = STOP_WORDS if self.stop_words is None else stop_words_in(Path(self.stop_words))
        tokens = Tokens(self.min_letters, stop_words, self.min_df, self.max_df, self.max_vocabulary)
        is_default = tokens == Tokens() or (tokens == FORMER_DEFAULTS and not self.is_text)
        return None if self.stop_words is None and is_default else tokens

    def divided(self) -> Split:
        corpus = self.load()
        return Split(*(Subset(corpus, part) for part in self._split(len(corpus))))

    def _split(self, documents: int) -> tuple[NDArray[np.int64], ...]:
        return split_indices(documents, self.validation, self.test, self.split_seed)

    def spec(self, fingerprint: Mapping[str, Any] | None = None) -> EnvSpec:
        """An observation is the counts of a document's words [V]."""
        known = self.fingerprint() if fingerprint is None else fingerprint
        train, _, _ = self._split(int(known["documents"]))
        return EnvSpec("corpus", (int(known["vocabulary_size"]),), torch.int32, 0, examples=len(train))

    def fingerprint(self) -> dict[str, Any]:
        """digest: digest of the documents and words. documents: D. vocabulary_size: V. vocabulary: V words,
        or None where words have only ids. tokeniser: version of the tokeniser, which matters for text."""
        corpus = self.load()
        return {
            "digest": corpus.digest,
            "documents": len(corpus),
            "vocabulary_size": corpus.vocabulary_size,
            "vocabulary": None if corpus.vocabulary is None else list(corpus.vocabulary),
            "tokeniser": VERSION,
        }

    def check_fingerprint(self, fingerprint: Mapping[str, Any], thorough: bool = True) -> None:
        """Raise Refusal if this is another corpus. Cheap: the digest is stored in the cache."""
        now, then = self.fingerprint(), {"tokeniser": 1, **fingerprint}
        if {**now, "tokeniser": None} == {**then, "tokeniser": None}:
            return
        if now["tokeniser"] != then["tokeniser"] and self.is_text:
            raise Refusal(
                f"{self.path} has other words than in the run: an earlier version split them in another way "
                "(combining marks were no part of a word, a <br> in Markdown joined two), or the files have "
                "changed. Restore the files, or fit anew with --out."
            )
        if now["vocabulary"] is None and then["vocabulary"] is not None:
            raise Refusal(
                f"The vocabulary of {self.path}, with which the run was fitted, is not there. Put it beside "
                "the corpus again, or name it: murmurate resume DIR --world.vocabulary FILE."
            )
        raise other_data(
            self.path,
            f"{then['documents']:,} documents over {then['vocabulary_size']:,} words",
            f"{now['documents']:,} over {now['vocabulary_size']:,}",
        )


@functools.lru_cache(maxsize=2)
def _read(world: CorpusWorld, settings: str, state: str) -> tuple[Corpus, Skipped]:
    """settings: the world as text, for the cache: worlds with max_df 1 and 1.0 are equal, but mean different
    corpora. state: that of the files, also for the cache."""
    if not world.path:
        raise Refusal(
            "say which corpus: murmurate topics fit CORPUS, or --world.path CORPUS (in Python "
            "world={'path': 'CORPUS'})."
        )
    return world.read_as()
