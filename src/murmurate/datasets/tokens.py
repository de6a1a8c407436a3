"""Counts the words of plain text: splits it into words, and chooses which words the vocabulary keeps."""

from __future__ import annotations

import functools
import math
import re
import sys
import unicodedata
from array import array
from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from murmurate.datasets._record_errors import not_utf8, refuse_unreadable
from murmurate.datasets.corpus import Corpus, RemappedCorpus, blocks
from murmurate.errors import Refusal
from murmurate.ranges import NonNegativeInt, PositiveInt, UnitInterval, check_ranges, plain_value

_STOP_TEXT = """
a about above across after afterwards again against all almost alone along already also although always am
among an and another any anybody anyone anything anyway anywhere are aren around as at away back be became
because become becomes been before beforehand behind being below beside besides between beyond both but by
can cannot could couldn did didn do does doesn doing don done down during each either else elsewhere enough
etc even ever every everybody everyone everything everywhere except few for from further furthermore gave
get gets getting give given gives go goes going gone got had hadn has hasn have haven having he hence her
here hers herself him himself his how however i if in indeed instead into is isn it its itself just keep
kept last latter least less let lets like ll made make makes making many may maybe me meanwhile might mine
more moreover most mostly much must my myself namely near neither never nevertheless next no nobody none nor
not nothing now nowhere of off often on once one only onto or other others otherwise ought our ours
ourselves out over own per perhaps please put quite rather re really s said same saw say says see seem
seemed seems seen several shall she should shouldn since so some somebody somehow someone something
sometimes somewhere still such t take taken takes than that the their theirs them themselves then there
thereafter thereby therefore these they thing things this those though through throughout thus to together
too took toward towards two under unless until up upon us use used uses using usually ve very via want was
wasn way we well went were weren what whatever when whenever where whereas whereby wherever whether which
while who whoever whole whom whose why will with within without won would wouldn yet you your yours yourself
yourselves
"""
DocumentFrequency = NonNegativeInt | UnitInterval  # a number of documents, or a share of them
# of the tokeniser: 1 did not treat combining marks on letters as part of words; until 3 a <br> in Markdown
# joined the words beside it
VERSION = 3
STOP_WORDS = frozenset(_STOP_TEXT.split())
PAIR = "_"  # joins the two words of a pair; no word contains it
_LETTER = r"[^\W\d_]"
_LETTERS = rf"{_LETTER}+"
_ASCII_WORD = re.compile(_LETTERS)
_JOINERS = "\u200c\u200d"  # occur within words of Persian and of Indic scripts


@dataclass(frozen=True)
class Tokens:
    """How text is split into words, and which of them a vocabulary keeps.

    A word is a run of letters of any script with their combining marks (accents, vowel signs), in lower case
    and composed form (Unicode's NFC). It is counted if it has at least ``min_letters`` characters and is none
    of ``stop_words``. The vocabulary keeps counted words that occur in ``min_df`` documents or more, and in
    ``max_df`` at most; either is a number of documents (int) or a share of them (float). Of these words it
    keeps the ``max_vocabulary`` most frequent (None: all).
    """

    min_letters: PositiveInt = 3
    stop_words: frozenset[str] = STOP_WORDS
    min_df: DocumentFrequency = 2
    max_df: DocumentFrequency = 0.5
    max_vocabulary: PositiveInt | None = None

    def __post_init__(self) -> None:
        for name in ("min_letters", "min_df", "max_df", "max_vocabulary"):
            object.__setattr__(self, name, plain_value(getattr(self, name)))  # float32 is no float
        check_ranges(self)

    def words_of(self, text: str, pairs: Set[str] = frozenset()) -> list[str]:
        """The words of ``text`` that are counted, in order. Two adjacent words whose pair (``first_second``)
        is in ``pairs`` are one word."""
        stop, shortest, words = self.stop_words, self.min_letters, _all_words(text)
        if pairs:
            words = _joined(words, pairs)
        return [w for w in words if len(w) >= shortest and w not in stop]

    def all_words_of(self, text: str) -> list[str]:
        """All words of ``text`` in order, also those that are not counted."""
        return _all_words(text)

    def counts(self, word: str) -> bool:
        """Whether a word is counted."""
        return len(word) >= self.min_letters and word not in self.stop_words


# the defaults of earlier versions, whose bounds were less strict
FORMER_DEFAULTS = Tokens(min_letters=2, max_df=0.95)


def _joined(words: list[str], pairs: Set[str]) -> list[str]:
    """The words, with adjacent words whose pair is in ``pairs`` joined, from left to right."""
    joined, position = [], 0
    while position < len(words):
        pair = PAIR.join(words[position : position + 2])
        joined.append(pair if pair in pairs else words[position])
        position += 1 + (pair in pairs)
    return joined


def _all_words(text: str) -> list[str]:
    if text.isascii():
        return _ASCII_WORD.findall(text.lower())
    return _any_word().findall(unicodedata.normalize("NFC", text.lower()))


@functools.cache
def _any_word() -> re.Pattern[str]:
    """The pattern of a word of any script, with combining marks on its letters, such as vowel signs of Hindi,
    which Python's ``\\w`` does not match."""
    marks = "".join(c for c in map(chr, range(sys.maxunicode + 1)) if unicodedata.category(c)[0] == "M")
    inside = rf"(?:[{marks}]+|[{_JOINERS}](?={_LETTER}|[{marks}]))"
    # the look-ahead spares ASCII characters a test against the long class: five times as fast on text with
    # few accents
    return re.compile(rf"{_LETTERS}(?:(?=[^\x00-\x7f]){inside}(?:{_LETTERS})?)*")


def stop_words_in(path: Path) -> frozenset[str]:
    """Every word of a UTF-8 file, as the tokeniser splits it: ``Don't`` is ``don`` and ``t``. Raises Refusal
    for a file that cannot be read."""
    try:
        with refuse_unreadable(path):
            text = path.read_bytes()
        return frozenset(_all_words(text.decode()))
    except UnicodeDecodeError as error:
        raise Refusal(f"{path} cannot be read as stop words: {not_utf8(text, error.start)}.") from error


class WordCounter:
    """Counts the words of documents, one document at a time. An entry (a word of a document) takes 8 bytes of
    memory, 24 in ``finish``.

    vocabulary: the words that are counted, instead of those that ``tokens`` keeps. bigrams: whether the pairs
    of words in ``vocabulary`` are counted as one word. pairs: pairs of words that are counted as one word
    where ``bigrams`` does not apply.
    """

    def __init__(
        self,
        tokens: Tokens,
        vocabulary: Sequence[str] | None = None,
        *,
        bigrams: bool = False,
        pairs: Set[str] = frozenset(),
    ) -> None:
        # every word of a given vocabulary counts, however the vocabulary was chosen
        self._tokens = tokens if vocabulary is None else Tokens(min_letters=1, stop_words=frozenset())
        self._given_vocabulary = vocabulary
        self._pairs = {word for word in vocabulary if PAIR in word} if bigrams and vocabulary else pairs
        self._ids: dict[str, int] = {} if vocabulary is None else {w: i for i, w in enumerate(vocabulary)}
        self._words, self._counts, self._lengths = array("i"), array("i"), array("q")

    def add(self, text: str) -> None:
        """Count one more document."""
        ids, words = self._ids, self._tokens.words_of(text, self._pairs)
        if self._given_vocabulary is not None:
            words = [word for word in words if word in ids]
        counts = Counter(words)
        self._words.extend([ids.setdefault(word, len(ids)) for word in counts])
        self._counts.extend(counts.values())
        self._lengths.append(len(counts))

    def unreachable(self) -> int:
        """How many words of the given vocabulary the tokeniser never finds, such as words with capitals or
        digits."""
        given_words = self._given_vocabulary or ()
        return sum(self._tokens.words_of(word, self._pairs) != [word] for word in given_words)

    def finish(self) -> Corpus:
        """The corpus of all documents, empty ones included. The vocabulary is in alphabetical order, or as
        given.

        Raises Refusal if no word is kept.
        """
        starts = np.cumsum([0, *self._lengths], dtype=np.int64)
        given = self._given_vocabulary
        names = list(self._ids) if given is None else list(given)
        corpus = Corpus(starts, np.asarray(self._words), np.asarray(self._counts), None, len(names))
        kept = list(range(len(names))) if given is not None else self._kept(names, corpus)
        new_ids = np.full(len(names), -1, np.int32)
        new_ids[kept] = np.arange(len(kept))
        return RemappedCorpus(corpus, tuple(names[word] for word in kept), new_ids).to_corpus()

    def _kept(self, names: Sequence[str], corpus: Corpus) -> list[int]:
        """The ids of the words that the vocabulary keeps, in alphabetical order of the words. corpus: counts
        of all words ``names``."""
        tokens, total = self._tokens, len(corpus)
        if not names:
            raise Refusal(
                f"No word is kept: none of {total:,} documents has a word of {tokens.min_letters} letters or "
                "more that is no stop word. Check the text, lower --min-letters, or give fewer --stop-words "
                "(in Python min_letters and stop_words)."
            )
        df, frequency = np.zeros(len(names), np.int64), np.zeros(len(names))
        for begin, end in blocks(corpus.starts):
            part = slice(corpus.starts[begin], corpus.starts[end])
            df += np.bincount(corpus.words[part], minlength=len(names))
            frequency += np.bincount(corpus.words[part], corpus.counts[part], minlength=len(names))
        low, high = document_bound(tokens.min_df, total), document_bound(tokens.max_df, total)
        kept = np.flatnonzero((df >= low) & (df <= high))
        if not len(kept):
            fewest, most = math.ceil(low), math.floor(high)
            if fewest > most:
                raise Refusal(
                    f"No word is kept: of {total:,} documents, --min-df {tokens.min_df} asks for words of at "
                    f"least {fewest:,}, and --max-df {tokens.max_df} for words of at most {most:,}. Lower "
                    "--min-df, raise --max-df, or both (in Python min_df and max_df)."
                )
            raise Refusal(
                f"No word is kept: {len(names):,} words occur in {total:,} documents, and none in {fewest:,} "
                f"to {most:,} of them. Lower --min-df, raise --max-df, or give fewer --stop-words (in Python "
                "min_df, max_df and stop_words)."
            )
        alphabetical = sorted(kept.tolist(), key=lambda w: names[w])
        if tokens.max_vocabulary is not None:
            most_frequent = sorted(alphabetical, key=lambda w: -frequency[w])[: tokens.max_vocabulary]
            alphabetical = sorted(most_frequent, key=lambda w: names[w])
        return alphabetical


def document_bound(bound: int | float, total: int) -> float:
    """A bound on document frequency as a number of ``total`` documents."""
    # 0.07 * 100 is 7.000000000000001, which is more than 7 documents
    return round(bound * total, 6) if isinstance(bound, float) else bound
