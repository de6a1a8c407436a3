"""What a study searches: fields of a Run, with the values that they may have."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from murmurate.errors import Refusal

MOST_COMBINATIONS = 10_000


@dataclass(frozen=True)
class Dimension:
    """A field and its values: those from ``low`` to ``high``, or ``choices`` (words of the command line).

    name: name of the option, without dashes. log: drawn uniformly on a logarithmic scale. whole: integers.
    """

    name: str
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    whole: bool = False
    choices: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.choices:
            return f"{self.name}={','.join(self.choices)}"
        low, high = (f"{int(x) if self.whole else x:g}" for x in (self.low, self.high))
        return f"{self.name}={low}..{high}{':log' * self.log}"

    def ends(self) -> list[str]:
        """The words to check before a study begins: every choice, or both ends."""
        return list(self.choices) or [self.word(self.low), self.word(self.high)]

    def word(self, value: Any) -> str:
        """A drawn value as a word of the command line, exactly."""
        if self.choices:
            return str(value)
        return str(int(value)) if self.whole else repr(float(value))

    def values(self) -> Sequence[Any]:
        """All values: the choices, or the integers of a range. Raises Refusal for any other range."""
        if self.choices:
            return self.choices
        if self.whole and not self.log:
            return range(int(self.low), int(self.high) + 1)
        raise Refusal(
            f"--sampler grid tries every combination of values, and {self} is a range of numbers. Name its "
            f"values: --search {self.name}=A,B,C"
        )

    def distribution(self) -> Any:
        from optuna import distributions

        if self.choices:
            return distributions.CategoricalDistribution(self.choices)
        if self.whole:
            return distributions.IntDistribution(int(self.low), int(self.high), log=self.log)
        return distributions.FloatDistribution(self.low, self.high, log=self.log)

    def plain(self) -> dict[str, Any]:
        return {**asdict(self), "choices": list(self.choices)}


def combinations(space: Sequence[Dimension]) -> list[dict[str, Any]]:
    """Every combination of values of ``space``; of the last dimension they change first. Raises Refusal if
    there are too many, and as ``Dimension.values``."""
    values = [dimension.values() for dimension in space]
    if (count := math.prod(map(len, values))) > MOST_COMBINATIONS:
        raise Refusal(
            f"--sampler grid would try {count:,} combinations, and at most {MOST_COMBINATIONS:,} are "
            "possible. Name fewer values with --search."
        )
    names = [dimension.name for dimension in space]
    return [dict(zip(names, each, strict=True)) for each in itertools.product(*values)]


def words(space: Sequence[Dimension], values: Mapping[str, Any]) -> list[str]:
    """The options of ``murmurate train`` that set the fields of ``space`` to drawn values."""
    return [
        word
        for dimension in space
        for word in (f"--{dimension.name}", dimension.word(values[dimension.name]))
    ]
