"""Finds pairs of words that belong together, such as machine_learning (collocations)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise

from murmurate.datasets.tokens import PAIR, Tokens, document_bound

_LEAST_COUNT, _LEAST_NPMI = 5, 0.5
_MOST_PAIRS = 1_000_000  # different pairs that are counted at a time


def find_collocations(texts: Iterable[str], tokens: Tokens) -> frozenset[str]:
    """The collocations of ``texts``, each as its two words joined by ``_``.

    They are pairs of adjacent, different words that ``tokens`` counts, which occur 5 times or more (and often
    enough to be in ``min_df`` documents) with a normalised pointwise mutual information of 0.5 or more (Bouma
    2009, section 4.1): ln(p(ab) / p(a) p(b)) / -ln p(ab), which is 1 for two words that occur only together,
    and 0 for independent words. p are shares of all words. If there are more than a million different pairs,
    the rarest are forgotten, which bounds memory.
    """
    alone: Counter[str] = Counter()
    together: Counter[tuple[str, str]] = Counter()
    total, documents = 0, 0
    forgotten = 0  # pairs counted at most so often have been forgotten
    for text in texts:
        documents += 1
        words = tokens.all_words_of(text)
        total += len(words)
        alone.update(words)
        counted = {word for word in set(words) if tokens.counts(word)}
        together.update((a, b) for a, b in pairwise(words) if a in counted and b in counted and a != b)
        while len(together) > _MOST_PAIRS:
            forgotten += 1
            together = Counter({pair: n for pair, n in together.items() if n > forgotten})
    least_count = max(_LEAST_COUNT, math.ceil(document_bound(tokens.min_df, documents)))
    return frozenset(
        PAIR.join(pair)
        for pair, n in together.items()
        if n >= least_count and _npmi(n, alone[pair[0]], alone[pair[1]], total) >= _LEAST_NPMI
    )


def _npmi(both: int, first: int, second: int, total: int) -> float:
    """See ``find_collocations``. both, first, second: how often the pair and each of its words occur among
    ``total``."""
    if both >= total:
        return 1.0
    return math.log(both * total / (first * second)) / -math.log(both / total)
