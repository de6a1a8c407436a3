"""Cases that cover a cross product by its pairs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any


def pairwise(
    *axes: Iterable[Any], possible: Callable[..., bool] = lambda *case: True
) -> list[tuple[Any, ...]]:
    """Few cases of the cross product of ``axes`` that hold every pair of two axes' values.

    For tests where a fault lies in one value, or in how two of them meet. Greedy and in the order of the
    product, so that the cases are always the same. possible: leaves out those that cannot be.
    """
    values = [list(axis) for axis in axes]
    pairs = {
        case: set(itertools.combinations(enumerate(case), 2))
        for case in itertools.product(*(range(len(axis)) for axis in values))
        if possible(*(axis[k] for axis, k in zip(values, case, strict=True)))
    }
    left, found = set().union(*pairs.values()), []
    while left:
        case = max(pairs, key=lambda case: len(pairs[case] & left))
        left -= pairs.pop(case)
        found.append(tuple(axis[k] for axis, k in zip(values, case, strict=True)))
    return found
