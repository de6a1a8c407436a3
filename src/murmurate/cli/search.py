"""The search space of ``murmurate tune``: defaults from a recipe's fields, and what ``--search`` names."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from murmurate.cli.options import Option, change, full_name, options
from murmurate.errors import Refusal
from murmurate.tuning.space import Dimension


def search_space(run: Any, texts: Sequence[str], command: str) -> list[Dimension]:
    """The fields named by ``texts`` (``NAME=1e-4..1e-2:log``, ``NAME=a,b,c``, ``default``); if empty, the
    default space of the run's learner. Raises Refusal for fields and values that the run does not have."""
    known = {option.name: option for option in options(run)}
    space: dict[str, Dimension] = {}
    named: set[str] = set()
    for text in texts or ["default"]:
        dimensions = default_space(known) if text == "default" else [_parse(text, known, command)]
        if text != "default" and (name := dimensions[0].name) in named:
            raise Refusal(f"--search {name} is given twice. Name all its values once.")
        named |= {dimension.name for dimension in dimensions if text != "default"}
        # what is named counts, whether it stands before or after the default
        space |= {each.name: each for each in dimensions if text != "default" or each.name not in named}
    if not space:
        raise Refusal(
            f"There is no default of what to search for {run.recipe}. Name the fields, as in --search "
            f"{next((name for name in known if name.startswith('agent.')), 'replicas')}=LOW..HIGH:log"
        )
    for dimension in space.values():
        for word in dimension.ends():
            change(run, [f"--{dimension.name}", word], command)  # raises Refusal for a value out of range
    return list(space.values())


# -- defaults ---------------------------------------------------------------------------------------------


def default_space(known: dict[str, Option]) -> list[Dimension]:
    """For each field of the learner that ``_RULES`` knows: values around the recipe's, within its range."""
    dimensions = []
    for name, option in known.items():
        rule = _RULES.get(name.removeprefix("agent.")) if name.startswith("agent.") else None
        is_number = isinstance(option.value, (int, float)) and math.isfinite(option.value)
        if rule is not None and is_number and (dimension := rule(name, option.value)) is not None:
            dimensions.append(_within_range(dimension, option))
    return dimensions


_Rule = Callable[[str, float], Dimension | None]


def _around(factor: float, most: float | None = None) -> _Rule:
    """From a ``factor``-th of the recipe's value to ``factor`` times it; where that is 0, from 0 to ``most``,
    or nothing without ``most``."""

    def rule(name: str, value: float) -> Dimension | None:
        if value > 0:
            return Dimension(name, value / factor, value * factor, log=True)
        return None if most is None else Dimension(name, 0.0, most)

    return rule


def _choices(*values: float) -> _Rule:
    """``values`` and the recipe's own value."""
    return lambda name, value: Dimension(name, choices=tuple(f"{x:g}" for x in sorted({*values, value})))


def _multiples(name: str, value: float) -> Dimension:
    """0.5, 1, 2 and 4 times the recipe's value."""
    return Dimension(
        name, choices=tuple(str(n) for n in sorted({max(1, int(value * x)) for x in (0.5, 1, 2, 4)}))
    )


def _range(low: float, high: float) -> _Rule:
    """From ``low`` to ``high``, extended so far that the recipe's value is in it."""
    return lambda name, value: Dimension(name, min(low, value), max(high, value))


_RULES: dict[str, _Rule] = {
    **dict.fromkeys(
        ("learning-rate", "value-learning-rate", "policy-rate", "critic-rate", "temperature-rate"),
        _around(10),
    ),
    "entropy-coefficient": _around(10, 0.02),
    "steps": _multiples,
    "n-step": _choices(1, 3, 5),
    "discount": _choices(0.95, 0.98, 0.99, 0.995),
    "gae-lambda": _range(0.8, 1.0),
    "trace-lambda": _range(0.8, 1.0),
    "ratio-clip": _around(3),
    "max-kl": _around(5),
    "clip": _around(4),
    "target-rate": _around(5),
}


def _within_range(dimension: Dimension, option: Option) -> Dimension:
    if dimension.choices or not option.numbers:
        return dimension
    allowed = option.numbers[0].range
    low, high = max(dimension.low, allowed.least), min(dimension.high, allowed.most)
    return Dimension(dimension.name, low, high, dimension.log, option.numbers[0].type is int)


# -- what --search names ----------------------------------------------------------------------------------


def _parse(text: str, known: dict[str, Option], command: str) -> Dimension:
    name, equals, values = text.partition("=")
    option = known[full_name(name.removeprefix("--").replace("_", "-"), known, command)]
    usage = f"--search {option.name}=LOW..HIGH, LOW..HIGH:log or A,B,C"
    if not equals or not values:
        raise Refusal(f"--search {text} names no values. Use {usage}.")
    low, dots, rest = values.partition("..")
    if not dots or "," in values:  # words of a list may have dots in them: ../runs/a
        choices = tuple(dict.fromkeys(word.strip() for word in values.split(",")))
        if "" in choices:
            raise Refusal(f"--search {text} has an empty value. Use {usage}.")
        return Dimension(option.name, choices=choices)
    high, colon, scale = rest.partition(":")
    if not option.numbers:
        raise Refusal(f"{option.name} is no number. Name its values: --search {option.name}=A,B,C")
    if colon and scale != "log":
        raise Refusal(f"--search {text}: there is no scale '{scale}'. Use {usage}.")
    is_integer = all(kind.type is int for kind in option.numbers)
    try:
        ends = [float(word) for word in (low, high)]
    except ValueError:
        raise Refusal(f"--search {text}: '{low}' and '{high}' are no two numbers. Use {usage}.") from None
    if not (math.isfinite(ends[0]) and math.isfinite(ends[1]) and ends[0] < ends[1]):
        raise Refusal(f"--search {text}: the first number must be below the second, and both finite.")
    if is_integer and not (ends[0].is_integer() and ends[1].is_integer()):
        raise Refusal(f"--search {text}: {option.name} is an integer.")
    if scale and ends[0] <= 0:
        raise Refusal(f"--search {text}: a logarithmic scale begins above 0. Leave out :log.")
    return Dimension(option.name, ends[0], ends[1], bool(scale), is_integer)
