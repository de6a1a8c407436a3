"""Strategies: how replicas agree on their parameters. They are found by listing the files and packages of
this folder."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from numbers import Real
from typing import Any

from murmurate import plugins
from murmurate.errors import Refusal, did_you_mean, unknown
from murmurate.ranges import in_words, is_valid, numbers_of, plain_value
from murmurate.strategies.interface import Strategy

# names of the same algorithms elsewhere
_ELSEWHERE = {
    "ddp": "all-reduce", "diloco": "local-sgd", "downpour": "parameter-server", "easgd": "elastic",
}  # fmt: skip


def strategies() -> dict[str, type[Strategy]]:
    """Every strategy by its command-line name (see ``plugins``). Raises Refusal where two have one name, and
    where a field of one has no default."""
    by_name: dict[str, type[Strategy]] = {}
    for module in plugins.modules(__name__):
        for value in vars(module).values():
            if isinstance(value, type) and issubclass(value, Strategy) and value is not Strategy:
                plugins.refuse_clash("strategies", value.name, by_name.setdefault(value.name, value), value)
                _refuse_field_without_default(value)
    return dict(sorted(by_name.items()))


def _refuse_field_without_default(kind: type[Strategy]) -> None:
    for field in dataclasses.fields(kind):
        if field.init and field.default is field.default_factory is dataclasses.MISSING:
            raise Refusal(
                f"the field {field.name} of the strategy '{kind.name}' ({kind.__module__}.{kind.__name__}) "
                "has no default: give it one, as a strategy is made from its name."
            )


def strategy(name: str) -> type[Strategy]:
    """The strategy called ``name``. Raises Refusal with the nearest name if there is none."""
    available = strategies()
    if (ours := _ELSEWHERE.get(name.lower())) and name not in available:
        raise Refusal(
            f"There is no strategy called '{name}'. Did you mean '{ours}'? Run: murmurate list strategies"
        )
    if name not in available:
        raise unknown("strategy", name, available)
    return available[name]


def strategy_from(value: Any) -> Strategy:
    """``value``, or the strategy of that name with its defaults, or of a mapping of ``name`` and fields.
    Raises Refusal for anything else."""
    if isinstance(value, str):
        return strategy(value)()
    if isinstance(value, Mapping):
        return _from_mapping(dict(value))
    if isinstance(value, type) and issubclass(value, Strategy):
        name = value.__name__
        raise Refusal(f"strategy is the class {name}: give an object, {name}(), or its name, {value.name!r}")
    if not isinstance(value, Strategy):
        raise Refusal(
            f"strategy is {value!r}; it takes a name, a mapping of a name and fields, or an object of a "
            "strategy: give a name that murmurate list strategies prints."
        )
    return value


def _from_mapping(fields: dict[str, Any]) -> Strategy:
    name = fields.pop("name", None)
    if not isinstance(name, str):
        raise Refusal("strategy has no name: give it one, as in {'name': 'gala', 'staleness_bound': 2}.")
    kind: Any = strategy(name)
    known = [field.name for field in dataclasses.fields(kind) if field.init]
    hints, numbers = typing.get_type_hints(kind), numbers_of(kind)
    for field, value in fields.items():
        if field not in known:
            all_fields = ", ".join(known) or "none"
            raise Refusal(
                f"the strategy '{name}' has no field '{field}'.{did_you_mean(str(field), known)} It has: "
                f"{all_fields}."
            )
        given = fields[field] = plain_value(value)
        has_range = field in numbers and isinstance(given, Real)  # which the strategy checks itself
        if not has_range and not is_valid(hints[field], given):
            wanted = in_words(hints[field])
            raise Refusal(f"{field} of the strategy '{name}' is {given!r}; it must be {wanted}.")
    made: Strategy = kind(**fields)
    return made
