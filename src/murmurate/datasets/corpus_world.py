"""A corpus as what is learned from."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch

from murmurate.datasets.corpus import Corpus
from murmurate.datasets.interface import Split, Subset, divide, other_data
from murmurate.datasets.reading import Skipped, kind_of, read
from murmurate.datasets.tokens import STOP_WORDS, VERSION, Tokens, stop_words_in
from murmurate.errors import Refusal
from murmurate.spec import EnvSpec, World


@dataclass(frozen=True)
class CorpusWorld(World):
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

    path: str = field(default="", metadata={"place": True})
    kind: str | None = None
    vocabulary: str | None = field(default=None, metadata={"place": True})
    validation: float = 0.02
    test: float = 0.05
    split_seed: int = 0
    skip_bad: bool = False
    cache: str | None = field(default=None, metadata={"place": True})
    transpose: bool = False
    one_based: bool | None = None
    vocabulary_size: int | None = None
    min_letters: int = Tokens.min_letters
    stop_words: str | None = field(default=None, metadata={"place": True})
    min_df: int | float = Tokens.min_df
    max_df: int | float = Tokens.max_df
    max_vocabulary: int | None = Tokens.max_vocabulary

    name: ClassVar[str] = "corpus"
    unit: ClassVar[str] = "documents"

    def __post_init__(self) -> None:
        for name in ("path", "vocabulary", "cache", "stop_words"):
            if getattr(self, name):  # a run goes on from other folders too; links keep their telling names
                object.__setattr__(self, name, os.path.abspath(getattr(self, name)))

    @property
    def is_text(self) -> bool:
        """Whether its words are what a tokeniser found. Raises Refusal for a file of no known kind."""
        return (self.kind or kind_of(Path(self.path))) == "text"

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

    def skipped(self) -> tuple[str, dict[str, int]] | None:
        skipped = _read(self, repr(self))[1]
        return (str(skipped), dict(skipped.causes)) if skipped.causes else None

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

    def divided(self) -> Split:
        corpus = self.whole()
        return Split(*(Subset(corpus, part) for part in divide(self, len(corpus))))

    def spec(self, fingerprint: Mapping[str, Any] | None = None) -> EnvSpec:
        """What a topic model must know: an observation is a document's counts [V]."""
        known = self.fingerprint() if fingerprint is None else fingerprint
        train, _, _ = divide(self, int(known["documents"]))
        return EnvSpec("corpus", (int(known["vocabulary_size"]),), torch.int32, 0, examples=len(train))

    def fingerprint(self) -> dict[str, Any]:
        """digest: of its documents and words. documents: D. vocabulary_size: V. vocabulary: V words, or None
        where there are only ids. tokeniser: the version that made words of it, if it was text."""
        corpus = self.whole()
        return {
            "digest": corpus.digest,
            "documents": len(corpus),
            "vocabulary_size": corpus.vocabulary_size,
            "vocabulary": None if corpus.vocabulary is None else list(corpus.vocabulary),
            "tokeniser": VERSION,
        }

    def check_fingerprint(self, fingerprint: Mapping[str, Any], thorough: bool = True) -> None:
        """Raises Refusal where this is another corpus, or none. Its digest costs nothing."""
        now, then = self.fingerprint(), {"tokeniser": 1, **fingerprint}
        if {**now, "tokeniser": None} == {**then, "tokeniser": None}:
            return
        if now["tokeniser"] != then["tokeniser"] and self.is_text:
            raise Refusal(
                f"{self.path} falls into other words since murmurate counts the signs on letters to their "
                "word, and the run knows the old ones. Fit anew with --out."
            )
        if now["vocabulary"] is None and then["vocabulary"] is not None:
            raise Refusal(
                f"The words of {self.path} are not there, with which the run was fitted. Put the vocabulary "
                "beside it again, or say where it is: murmurate resume DIR --world.vocabulary FILE."
            )
        raise other_data(
            self.path,
            f"{then['documents']:,} documents over {then['vocabulary_size']:,} words",
            f"{now['documents']:,} over {now['vocabulary_size']:,}",
        )


@functools.lru_cache(maxsize=2)
def _read(world: CorpusWorld, said: str) -> tuple[Corpus, Skipped]:
    """said: a world that says max_df 1 equals one that says 1.0, which is another corpus."""
    if not world.path:
        raise Refusal("say which corpus: murmurate topics fit CORPUS, or --world.path CORPUS.")
    return world.read_as()
