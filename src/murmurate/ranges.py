"""The types of the fields of configs, and the ranges of their numbers: annotations that one function checks.

    discount: UnitInterval = 0.99
    period: PositiveInt = 10
    rate: Annotated[float, Range(0, 10)] = 0.1

A float without an annotation is from -1e30 to 1e30, an integer without one must fit in 64 bits.
"""

from __future__ import annotations

import dataclasses
import decimal
import functools
import inspect
import math
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Annotated, Any, Union

from murmurate.errors import Refusal

# Upper bounds of ranges that set none: integers up to 2**53 are exact as floats, products of a few numbers up
# to 1e30 do not overflow float64, and functions that wait accept up to 1e9 seconds.
_LARGEST_COUNT, _LARGEST_NUMBER, _LARGEST_SECONDS = 2**53, 1e30, 1e9
_INTEGER_LIMIT = 2**1000  # integers must be smaller in magnitude, so that they can be converted to float


@dataclass(frozen=True)
class Range:
    """Numbers from ``least`` to ``most``; infinity is in the range only if it is one of these bounds.

    exclude_least, exclude_most: whether the bound itself is outside.
    """

    least: float
    most: float = _LARGEST_COUNT
    exclude_least: bool = False
    exclude_most: bool = False

    def __contains__(self, number: float) -> bool:
        return (self.least < number if self.exclude_least else self.least <= number) and (
            number < self.most if self.exclude_most else number <= self.most
        )

    def __str__(self) -> str:
        return self.demand(self.least)

    def demand(self, number: float) -> str:
        """The range in words; a bound that only prevents overflow is left out unless ``number`` exceeds
        it."""
        low = f"{'above' if self.exclude_least else 'at least'} {_shortened(self.least)}"
        high = f"{'below' if self.exclude_most else 'at most'} {_shortened(self.most)}"
        if self.most >= _LARGEST_COUNT:
            if number > self.most:
                return high
            is_below = -math.inf < number < self.least
            return low if is_below or self.least > -_LARGEST_COUNT else "finite"
        if self.exclude_least or self.exclude_most:
            return f"{low} and {high}"
        return f"from {_shortened(self.least)} to {_shortened(self.most)}"


PositiveInt = Annotated[int, Range(1)]
NonNegativeInt = Annotated[int, Range(0)]
StackLength = Annotated[int, Range(1, 1000)]  # observations in a stack
ReturnSteps = Annotated[int, Range(1, 1000)]  # n of n-step returns
RepeatCount = Annotated[int, Range(1, 10_000)]  # times that an update repeats something
Widths = PositiveInt | tuple[PositiveInt, ...]  # of hidden layers; one number: of two layers (layer_widths)
Seed = Annotated[int, Range(0, 2**63 - 1)]
UnitInterval = Annotated[float, Range(0, 1)]
OpenUnitInterval = Annotated[float, Range(0, 1, exclude_least=True, exclude_most=True)]
PositiveShare = Annotated[float, Range(0, 1, exclude_least=True)]
PositiveFloat = Annotated[float, Range(0, _LARGEST_NUMBER, exclude_least=True)]
PositiveOrInfinite = Annotated[float, Range(0, math.inf, exclude_least=True)]
NonNegativeFloat = Annotated[float, Range(0, _LARGEST_NUMBER)]
AnyFloat = Annotated[float, Range(-_LARGEST_NUMBER, _LARGEST_NUMBER)]
Seconds = Annotated[float, Range(0, _LARGEST_SECONDS)]
PositiveSeconds = Annotated[float, Range(0, _LARGEST_SECONDS, exclude_least=True)]

_UNANNOTATED = {int: Range(-(2**63), 2**63 - 1), float: Range(-_LARGEST_NUMBER, _LARGEST_NUMBER)}


class OutOfRange(Refusal, ValueError):
    """The number of a field is outside its range."""


@dataclass(frozen=True)
class NumberKind:
    """One of the kinds of number that a field may have. annotated: whether the field states its range."""

    type: type
    range: Range
    annotated: bool

    def holds(self, value: object) -> bool:
        if isinstance(value, bool) or not isinstance(value, Integral if self.type is int else Real):
            return False
        return value in self.range  # type: ignore[operator]  # mypy takes no int for a Real

    def demand(self, value: Any) -> str:
        """What the number must be, in words, for the message about an invalid ``value``."""
        kind = "an integer " * (self.type is int and not isinstance(value, Integral))
        return kind + self.range.demand(value)


def number_kinds(kind: Any) -> tuple[NumberKind, ...]:
    """The kinds of number that a type hint, with its annotations, allows as the value or a tuple's items."""
    if typing.get_origin(kind) is Annotated:
        base, *extras = typing.get_args(kind)
        ranges = [extra for extra in extras if isinstance(extra, Range)]
        if base in _UNANNOTATED:
            return (NumberKind(base, ranges[0] if ranges else _UNANNOTATED[base], bool(ranges)),)
        return number_kinds(base)
    if kind in _UNANNOTATED:
        return (NumberKind(kind, _UNANNOTATED[kind], False),)
    if typing.get_origin(kind) in (Union, types.UnionType, tuple):
        return tuple(found for inner in typing.get_args(kind) for found in number_kinds(inner))
    return ()


def is_valid(kind: Any, value: Any) -> bool:
    """Whether a plain ``value`` is valid for a field of type ``kind``."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return any(is_valid(member, value) for member in arguments)
    if origin is typing.Literal:
        return any(value == known and type(value) is type(known) for known in arguments)
    if origin is tuple and isinstance(value, tuple):
        elements = arguments[:1] * len(value) if arguments[-1] is Ellipsis else arguments
        return len(elements) == len(value) and all(map(is_valid, elements, value))
    if kind in (int, float) and isinstance(value, int):
        return not isinstance(value, bool) and abs(value) < _INTEGER_LIMIT
    if kind is str:
        return isinstance(value, str) and "\0" not in value
    return kind is Any or isinstance(value, origin or kind)


def plain_value(value: Any) -> Any:
    """``value`` with NumPy numbers as Python's and lists as tuples."""
    import numpy as np

    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, (list, tuple)):
        return tuple(map(plain_value, value))
    return value


def in_words(kind: Any) -> str:
    """A type hint in words: "int or None"."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return " or ".join(map(in_words, typing.get_args(kind)))
    if typing.get_origin(kind) is typing.Literal:
        return " or ".join(map(repr, typing.get_args(kind)))
    if kind is types.NoneType:
        return "None"
    text = inspect.formatannotation(kind).replace(" | ", " or ")
    return text.replace("typing.", "")


@functools.cache
def numbers_of(config: Any) -> dict[str, tuple[NumberKind, ...]]:
    """The kinds of number of each field of a dataclass that holds numbers."""
    hints = typing.get_type_hints(config, include_extras=True)
    fields = [field.name for field in dataclasses.fields(config) if field.init]
    return {name: kinds for name in fields if (kinds := number_kinds(hints[name]))}


def check_ranges(config: Any, prefix: str = "") -> None:
    """Raise OutOfRange for the first number of a dataclass, or of a dataclass nested in it, that is outside
    its field's range. Messages name fields as the command line does, after ``prefix``."""
    for field in dataclasses.fields(config):
        if not field.init:
            continue
        name, value = prefix + str(field.metadata.get("option", field.name)), getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            check_ranges(value, prefix if field.metadata.get("flat") else f"{name}.")
        else:
            check_number(name, value, numbers_of(config.__class__).get(field.name, ()), field.default)


def check_number(name: str, value: Any, kinds: Sequence[NumberKind], default: Any = None) -> None:
    """Raise OutOfRange if ``value``, or an item of it, is a number that fits none of ``kinds``."""
    if isinstance(value, tuple):
        for item in value:
            check_number(name, item, kinds, default)
    elif kinds and isinstance(value, Real) and not any(kind.holds(value) for kind in kinds):
        demands = " or ".join(dict.fromkeys(kind.demand(value) for kind in kinds))
        has_default = any(kind.holds(default) for kind in kinds)
        remedy = f" Use --{name.removeprefix('--').replace('_', '-')} {default}." if has_default else ""
        raise OutOfRange(f"{name} is {_shortened(value)}; it must be {demands}.{remedy}")


def rounded_down(value: float, digits: int) -> float:
    """The greatest number of so many decimal digits that is at most ``value``, which is above 0."""
    return float(decimal.Context(prec=digits, rounding=decimal.ROUND_DOWN).create_decimal(str(value)))


def _shortened(number: object) -> str:
    text = str(number)
    return text if len(text) < 25 else f"{text[:6]}... ({len(text)} digits)"
