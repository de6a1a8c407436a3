"""The fields of a Run by nested names: ``{"agent": {"learning_rate": 1e-3}, "simulators": 16}``."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from murmurate.api.aliases import hint
from murmurate.errors import Refusal
from murmurate.ranges import (
    OutOfRange,
    check_number,
    in_words,
    is_valid,
    number_kinds,
    numbers_of,
    plain_value,
)
from murmurate.training.data_record import places
from murmurate.training.option_names import option_name
from murmurate.training.run import Run


def with_fields(config: Any, values: Mapping[str, Any], place: str = "") -> Any:
    """``config``, a frozen dataclass, with the fields in ``values`` replaced.

    A field that is a dataclass takes a mapping of its own fields, or another dataclass. Fields of ``flat``
    parts are named without the part, as on the command line. place: where ``config`` is in the run, for
    messages.

    Raises Refusal for an unknown name, with the nearest one; a value of another type; and one that is out of
    range.
    """
    fields, flat_parts = _fields(config), _flat_parts(config)
    for name, value in values.items():
        if name in fields:
            new = _new_value(config, fields[name], value, f"{place}{name}")
            config = _replaced(config, {fields[name].name: new}, f"{place}{name}")
            continue
        part = next((part for part in flat_parts if name in _fields(getattr(config, part))), None)
        if part is None:
            raise _unknown(config, name, place)
        inner = with_fields(getattr(config, part), {name: value}, place)
        config = _replaced(config, {part: inner}, f"{place}{name}")
    return config


def with_places(
    run: Any, values: Mapping[str, Any], written: Callable[[str], str] = "world.{}".format
) -> Any:
    """``run``, with new values of fields of its world that do not change what was learned: paths, and whether
    broken images are left out.

    written: how a field is given, for messages. Raises Refusal for other fields, and as ``with_fields``.
    """
    if not values:
        return run
    known = [name for name, _ in places(run.world)]
    for name in values:
        if name not in known:
            may = f"{', '.join(map(written, known))} may be given" if known else "it has no such fields"
            raise Refusal(f"{written(name)} cannot be given for the world {run.world.name}: {may}.")
    return dataclasses.replace(run, world=with_fields(run.world, values, "world."))


def _fields(config: Any) -> dict[str, dataclasses.Field[Any]]:
    """The fields that may be given, by name; not those that the recipe's name determines."""
    return {
        option_name(field): field
        for field in dataclasses.fields(config)
        if field.init
        and not field.metadata.get("flat")
        and not field.metadata.get("in_name")
        and field.name != "recipe"
    }


def _flat_parts(config: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(config) if field.metadata.get("flat")]


def _new_value(config: Any, field: dataclasses.Field[Any], value: Any, place: str) -> Any:
    current = getattr(config, field.name)
    if dataclasses.is_dataclass(current):
        if isinstance(value, Mapping):
            return with_fields(current, value, f"{place}.")
        if isinstance(value, type(current)):
            return value
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            raise Refusal(
                f"{place} is a {type(value).__name__}, and this recipe has a {type(current).__name__}, as "
                "which its run folder would be read. Use another recipe: murmurate list recipes."
            )
        raise Refusal(
            f"{place} is {value!r}; it takes a mapping of its fields, or an object such as "
            f"{type(current).__name__}(...)."
        )
    kind = typing.get_type_hints(type(config))[field.name]
    plain = plain_value(value)
    if isinstance(current, Path) and isinstance(plain, str):
        plain = Path(plain)
    if not is_valid(kind, plain):
        whole = isinstance(plain, float) and plain.is_integer() and is_valid(kind, int(plain))
        remedy = f" Write {int(plain)}." if whole else ""
        if isinstance(plain, str) and is_valid(kind, (plain,)):
            remedy = f" Write [{plain!r}]."
        if isinstance(value, type | types.FunctionType) and is_valid(kind, ""):
            # a run folder has names, by which classes are found again
            remedy = f' Give its name: "FILE.py:{value.__name__}", or "module:{value.__name__}".'
        raise Refusal(f"{place} is {value!r}; it must be {in_words(kind)}.{remedy}")
    check_number(place, plain, numbers_of(config.__class__).get(field.name, ()), current)
    return plain


def integer(name: str, value: Any, kind: Any) -> int | None:
    """The argument ``name`` as Python's own integer, or None. kind: its type and range. Raises Refusal for
    another value."""
    plain: int | None = plain_value(value)
    if not is_valid(int | None, plain):
        raise Refusal(f"{name} is {value!r}; it must be int or None.")
    check_number(name, plain, number_kinds(kind))
    return plain


def _replaced(config: Any, changes: Mapping[str, Any], place: str) -> Any:
    try:
        return dataclasses.replace(config, **changes)
    except OutOfRange:
        raise
    except (ValueError, TypeError) as error:  # a dataclass that checks its own fields
        raise Refusal(f"{place}: {error}.") from error


def _unknown(config: Any, name: str, place: str) -> Refusal:
    known = list(_paths(config))
    where = f"{place.rstrip('.')} has" if place else "a run has"
    meant = hint(name, known, lambda path: _written(path, is_keyword=not place))
    meant = meant or f" It has {', '.join(sorted(path for path in known if '.' not in path)) or 'none'}."
    if place == "strategy.":
        meant += " Choose another strategy by its name, as in strategy={'name': 'gala', ...}."
    return Refusal(f"{where} no field '{name}'.{meant}")


def _paths(config: Any, outer: str = "") -> Iterator[str]:
    """Every field, with the names of the fields that it is in before dots."""
    for name, field in _fields(config).items():
        yield f"{outer}{name}"
        if dataclasses.is_dataclass(inner := getattr(config, field.name)):
            yield from _paths(inner, f"{outer}{name}.")
    for part in _flat_parts(config):
        yield from _paths(getattr(config, part), outer)


def _written(path: str, is_keyword: bool) -> str:
    """How to give the field ``path``: as a keyword argument, or as an item of a mapping."""
    first, *inner = path.split(".")
    if not inner:
        return f"'{first}'"
    value = "..."
    for name in reversed(inner):
        value = f"{{'{name}': {value}}}"
    return f"{first}={value}" if is_keyword else f"'{first}': {value}"


def in_float32(run: Run) -> Run:
    """``run`` with a learner that computes in float32, where it has the choice."""
    learner: Any = run.learner
    if isinstance(getattr(learner, "precision", None), str):  # a mixture's is a number, of its prior
        learner = dataclasses.replace(learner, precision="float32")
    elif isinstance(getattr(getattr(learner, "policy", None), "precision", None), str):
        policy = dataclasses.replace(learner.policy, precision="float32")
        learner = dataclasses.replace(learner, policy=policy)
    return dataclasses.replace(run, learner=learner)
