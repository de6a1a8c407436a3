"""Words of plain text: a tokeniser, a stop list, and which words a vocabulary keeps."""

from __future__ import annotations

import functools
import re
import sys
import unicodedata
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from murmurate.datasets.corpus import Corpus, Over, blocks
from murmurate.errors import Refusal

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
VERSION = 2  # of how text falls into words; 1 knew no signs on letters
STOP_WORDS = frozenset(_STOP_TEXT.split())
_LETTER = r"[^\W\d_]"
_LETTERS = rf"{_LETTER}+"
_ASCII_WORD = re.compile(_LETTERS)
_JOINERS = "\u200c\u200d"  # stand within words of Persian and of Indic scripts


@dataclass(frozen=True)
class Tokens:
    """How text becomes words, and which of them a vocabulary keeps.

    A word is a run of letters of any script with the signs that are written on them (vowels, accents), in
    lower case and composed form (Unicode's NFC), of at least ``min_letters`` characters. The vocabulary keeps
    words that stand in ``min_df`` documents or more, and in ``max_df`` at most; either is a number of
    documents (int) or a share of them (float). Of those it keeps the ``max_vocabulary`` most frequent ones
    (None: all).
    """

    min_letters: int = 2
    stop_words: frozenset[str] = STOP_WORDS
    min_df: int | float = 2
    max_df: int | float = 0.95
    max_vocabulary: int | None = None

    def __post_init__(self) -> None:
        for name in ("min_df", "max_df"):
            value = getattr(self, name)
            if isinstance(value, bool) or value < 0 or (isinstance(value, float) and value > 1):
                raise Refusal(
                    f"{name} is {value}. Give a number of documents (a whole number), or a share of them "
                    "from 0.0 to 1.0."
                )
        if self.max_vocabulary is not None and self.max_vocabulary < 1:
            raise Refusal(f"max_vocabulary is {self.max_vocabulary}. Give 1 or more, or None for all words.")

    def words_of(self, text: str) -> list[str]:
        stop, least = self.stop_words, self.min_letters
        return [w for w in _all_words(text) if len(w) >= least and w not in stop]


def _all_words(text: str) -> list[str]:
    if text.isascii():
        return _ASCII_WORD.findall(text.lower())
    return _any_word().findall(unicodedata.normalize("NFC", text.lower()))


@functools.cache
def _any_word() -> re.Pattern[str]:
    """For Python's ``re`` a sign on a letter is no part of a word: Hindi and Tamil fell into consonants."""
    signs = "".join(c for c in map(chr, range(sys.maxunicode + 1)) if unicodedata.category(c)[0] == "M")
    # a look ahead spares ASCII the long class: five times as fast where accents are few
    inside = rf"(?:[{signs}]+|[{_JOINERS}](?={_LETTER}|[{signs}]))"
    # a look ahead spares ASCII the long class: five times as fast where accents are few
    return re.compile(rf"{_LETTERS}(?:(?=[^\x00-\x7f]){inside}(?:{_LETTERS})?)*")


def stop_words_in(path: Path) -> frozenset[str]:
    """Every word of a UTF-8 file, as a tokeniser finds it: ``Don't`` is ``don`` and ``t``. Raises Refusal for
    a file that cannot be read."""
    try:
        return frozenset(_all_words(path.read_text("utf-8")))
    except OSError as error:
        raise Refusal(
            f"{path} cannot be read: {error.strerror}. Check the path of the stop words."
        ) from error
    except UnicodeDecodeError as error:
        raise Refusal(f"{path} is not UTF-8, as stop words are. Convert it: iconv -t utf-8.") from error


class Counting:
    """Counts documents one by one; entries lie in memory, 8 bytes each, and 24 in ``finish``."""

    def __init__(self, tokens: Tokens, vocabulary: Sequence[str] | None = None) -> None:
        # of a given vocabulary every word counts, whatever cut it was made by
        self._tokens = tokens if vocabulary is None else Tokens(min_letters=1, stop_words=frozenset())
        self._fixed = vocabulary
        self._ids: dict[str, int] = {} if vocabulary is None else {w: i for i, w in enumerate(vocabulary)}
        self._words, self._counts, self._lengths = array("i"), array("i"), array("q")

    def add(self, text: str) -> int:
        """Count one more document; returns how many words of it count (before the vocabulary's cut)."""
        found = Counter(self._tokens.words_of(text))
        ids = self._ids
        if self._fixed is not None:
            found = Counter({w: n for w, n in found.items() if w in ids})
        else:
            for word in found:
                ids.setdefault(word, len(ids))
        self._words.extend([ids[w] for w in found])
        self._counts.extend(found.values())
        self._lengths.append(len(found))
        return found.total()

    def unreachable(self) -> int:
        """How many words of a given vocabulary no text can have: with capitals, digits or signs, say."""
        return sum(self._tokens.words_of(word) != [word] for word in self._fixed or ())

    def finish(self) -> Corpus:
        """All documents, the empty ones too. The vocabulary is in alphabetical order, or the given one.

        Raises Refusal where the cut leaves no word.
        """
        starts = np.cumsum([0, *self._lengths], dtype=np.int64)
        names = list(self._ids) if self._fixed is None else list(self._fixed)
        seen = Corpus(starts, np.asarray(self._words), np.asarray(self._counts), None, len(names))
        if self._fixed is not None:
            return Over(seen, tuple(names), np.arange(len(names), dtype=np.int32)).whole()
        place = self._places(names, seen)
        vocabulary = sorted(name for name, p in zip(names, place.tolist(), strict=True) if p >= 0)
        return Over(seen, tuple(vocabulary), place).whole()

    def _places(self, names: Sequence[str], seen: Corpus) -> NDArray[np.int32]:
        """[words seen]: a word's number in the vocabulary, or -1 for one that is cut."""
        cut, total = self._tokens, len(seen)
        df, frequency = np.zeros(len(names), np.int64), np.zeros(len(names))
        for begin, end in blocks(seen.starts):
            part = slice(seen.starts[begin], seen.starts[end])
            df += np.bincount(seen.words[part], minlength=len(names))
            frequency += np.bincount(seen.words[part], seen.counts[part], minlength=len(names))
        low, high = _documents(cut.min_df, total), _documents(cut.max_df, total)
        kept = np.flatnonzero((df >= low) & (df <= high))
        if not len(kept):
            raise Refusal(
                f"No word is left: {len(names)} words stand in {total} documents, and none in {low:g} to "
                f"{high:g} of them. Lower min_df, raise max_df, or give fewer stop words."
            )
        alphabetical = sorted(kept.tolist(), key=lambda w: names[w])
        if cut.max_vocabulary is not None:
            first = sorted(alphabetical, key=lambda w: -frequency[w])[: cut.max_vocabulary]
            alphabetical = sorted(first, key=lambda w: names[w])
        place = np.full(len(names), -1, np.int32)
        place[alphabetical] = np.arange(len(alphabetical))
        return place


def count(
    texts: Iterable[str], tokens: Tokens | None = None, vocabulary: Sequence[str] | None = None
) -> Corpus:
    """A corpus of texts, a document each, over the words that ``tokens`` keeps or over a given vocabulary."""
    counting = Counting(tokens or Tokens(), vocabulary)
    for text in texts:
        counting.add(text)
    return counting.finish()


def _documents(bound: int | float, total: int) -> float:
    return bound * total if isinstance(bound, float) else bound
