"""The fields of a Run as options: ``--replicas 4``, ``--agent.learning-rate 1e-3``, ``--strategy.period 8``.

They are read from the dataclasses, so each new field of an agent, world or strategy is an option.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, Union

from murmurate.api.aliases import hint
from murmurate.errors import Refusal
from murmurate.ranges import NumberKind, OutOfRange, check_number, number_kinds, numbers_of
from murmurate.training.option_names import option_name

_TRUE, _FALSE = ("true", "yes", "1"), ("false", "no", "0")


@dataclasses.dataclass(frozen=True)
class Option:
    """A field as an option. name: without dashes. path: path of the field in the config. kind: its type.
    about: its documentation. numbers: the kinds of number that it takes, with their ranges."""

    name: str
    path: tuple[str, ...]
    kind: Any
    value: Any
    about: str
    numbers: tuple[NumberKind, ...] = ()

    def type_name(self) -> str:
        return _type_name(self.kind)

    def help(self, with_value: bool = True) -> str:
        """Its documentation, its value and its range."""
        ranges = dict.fromkeys(str(kind.range) for kind in self.numbers if kind.annotated)
        value = _plain(self.value) or "empty"
        facts = [f"default {value}"] * with_value + [" or ".join(ranges)] * bool(ranges)
        about = self.about.replace("``", "").removesuffix(".")
        return f"{about} ({'; '.join(facts)})".strip() if facts else about


def options(config: Any, path: tuple[str, ...] = (), prefix: str = "") -> Iterator[Option]:
    """Every field of ``config`` as an option, with dots in the names of fields of nested dataclasses (except
    ``flat`` ones, see ``Run``).

    Fields that the recipe's name on the command line already fixes are omitted.
    """
    kinds = typing.get_type_hints(type(config))
    docs = field_docs(type(config))
    for field in dataclasses.fields(config):
        field_path = (*path, field.name)
        name = prefix + option_name(field)
        if not field.init or field_path == ("recipe",) or "in_name" in field.metadata:
            continue
        inner = getattr(config, field.name)
        if dataclasses.is_dataclass(inner):
            yield from options(inner, field_path, prefix if field.metadata.get("flat") else f"{name}.")
        elif any(dataclasses.is_dataclass(kind) for kind in typing.get_args(kinds[field.name])):
            continue  # an optional part that this run does not have
        else:
            numbers = numbers_of(config.__class__).get(field.name, ())
            about = docs.get(field.name, "")
            yield Option(name.replace("_", "-"), field_path, kinds[field.name], inner, about, numbers)


def change(config: Any, arguments: Sequence[str], command: str) -> Any:
    """``config`` with the fields named by ``arguments`` replaced.

    Forms: ``--name word``, ``--name=word``, several words for a tuple, ``--name`` alone for true. A field in
    a group may also be given by its bare name, if no other field has that. Raises Refusal for an unknown
    field (with the nearest name), for a bare name that several fields have, and for a word that is not of the
    field's type.
    """
    known = {option.name: option for option in options(config)}
    remaining = list(arguments)
    while remaining:
        word = remaining.pop(0)
        if not word.startswith("--"):
            raise Refusal(f"'{word}' belongs to no option. Options are --name value. See: {command} --help")
        name = full_name(_name(word), known, command)
        _, equals, value = word.partition("=")
        words = [value] if equals else []
        takes_several = _tuple_in(known[name].kind) is not None
        while not equals and remaining and not remaining[0].startswith("--") and (takes_several or not words):
            words.append(remaining.pop(0))
        new = _read(known[name], words)
        check_number(f"--{name}", new, known[name].numbers, known[name].value)
        try:
            config = _with_value(config, known[name].path, new)
        except OutOfRange:
            raise
        except ValueError as error:  # a dataclass that checks its own fields
            raise Refusal(f"--{name}: {error}.") from error
    return config


def given(arguments: Sequence[str], config: Any, command: str) -> set[str]:
    """The full names, without dashes, of ``config``'s options in ``arguments``; raises as ``full_name``."""
    known = {option.name: option for option in options(config)}
    return {full_name(_name(word), known, command) for word in arguments if word.startswith("--")}


def divide(
    arguments: Sequence[str], config: Any, other_config: Any, command: str
) -> tuple[list[str], list[str]]:
    """``arguments`` split into the options of ``config``'s fields and those of ``other_config``'s.

    Raises Refusal for a field that neither has, with the nearest name of both, and for a bare name that
    several fields have.
    """
    names = {option.name: option for option in options(config)}
    other_names = {option.name: option for option in options(other_config)}
    config_arguments: list[str] = []
    other_arguments: list[str] = []
    target = other_arguments
    for word in arguments:
        if word.startswith("--"):
            name = full_name(_name(word), names | other_names, command)
            target = config_arguments if name in names else other_arguments
        target.append(word)
    return config_arguments, other_arguments


def _name(word: str) -> str:
    """``--group.a_name=value`` as ``group.a-name``."""
    return word[2:].partition("=")[0].replace("_", "-")


def full_name(name: str, known: Mapping[str, Option], command: str) -> str:
    """The option that ``name`` stands for: itself, or the only one of that name in a group
    (``learning-rate``: ``agent.learning-rate``). Raises Refusal where there is none, or more than one."""
    if name in known:
        return name
    matching = [option for option in known if option.endswith(f".{name}")]
    if name == "alpha":  # also what other packages call the temperature of soft actor-critic
        matching += [option for option in known if option.endswith(".temperature")]
    if len(matching) == 1:
        return matching[0]
    if matching:
        raise Refusal(f"--{name} may be {' or '.join(f'--{option}' for option in matching)}. Say which.")
    meant = hint(name, known, "--{}".format)
    raise Refusal(f"There is no field called '{name}'.{meant} See: {command} --help")


def _read(option: Option, words: list[str]) -> Any:
    if not words and option.kind is bool:
        return True
    if not words:
        raise Refusal(
            f"--{option.name} needs a value ({option.type_name()}), as in --{option.name} {_example(option)}."
        )
    if (tuple_kind := _tuple_in(option.kind)) is not None and [word.lower() for word in words] != ["none"]:
        kind, *others = typing.get_args(tuple_kind)
        if Ellipsis not in others:
            return _convert(option, option.kind, ",".join(words).replace(",", ":"))
        takes_one = option.kind != tuple_kind and kind in typing.get_args(option.kind)  # such as ``Widths``
        if takes_one and len(words) == 1 and not {",", " "} & set(words[0]):
            return _convert(option, kind, words[0])
        return tuple(_convert(option, kind, w) for word in words for w in word.replace(",", " ").split())
    return _convert(option, option.kind, words[0])


def _tuple_in(kind: Any) -> Any:
    """The tuple's type if ``kind`` is one, or may be one; else None."""
    kinds = typing.get_args(kind) if typing.get_origin(kind) in (Union, types.UnionType) else (kind,)
    return next((each for each in kinds if typing.get_origin(each) is tuple), None)


def _convert(option: Option, kind: Any, word: str) -> Any:
    try:
        return _value(kind, word)
    except ValueError:
        usage = f"--{option.name} {_example(option)}"
        raise Refusal(
            f"--{option.name} takes {option.type_name()}, not '{word}'; for example {usage}."
        ) from None


def _value(kind: Any, word: str) -> Any:
    """``word`` as a ``kind``. Raises ValueError."""
    if typing.get_origin(kind) in (Union, types.UnionType):
        inner = [k for k in typing.get_args(kind) if k is not type(None)]
        if word.lower() == "none" and len(inner) < len(typing.get_args(kind)):
            return None
        for alternative in inner[:-1]:
            with contextlib.suppress(ValueError):
                return _value(alternative, word)
        return _value(inner[-1], word)
    if typing.get_origin(kind) is tuple:  # an item of several parts, such as 10:30:7
        kinds = typing.get_args(kind)
        parts = word.rsplit(":", len(kinds) - 1)  # only the first may be a name, which may have a colon
        return tuple(_value(part_kind, part) for part_kind, part in zip(kinds, parts, strict=True))
    if typing.get_origin(kind) is Literal:
        if word not in typing.get_args(kind):
            raise ValueError
        return word
    if kind is bool:
        return parse_bool(word)
    if kind in (int, float) and not word.isascii():  # Python reads digits of all scripts
        raise ValueError
    if kind is int and word.lower().count("e") == 1:
        number = float(word)  # 1e6 is a natural way to write a number of steps
        if not number.is_integer():
            raise ValueError
        return int(number)
    return kind(word)


def number_argument(kind: Any) -> Callable[[str], Any]:
    """A converter for argparse, of a word to a number of an annotated type, such as ``PositiveInt``."""
    (number,) = number_kinds(kind)

    def convert(word: str) -> Any:
        demand = str(number.range)
        try:
            if number.holds(value := _value(number.type, word)):
                return value
            demand = number.range.demand(value)  # names the upper bound that a huge number exceeds
        except ValueError:
            pass
        type_name = "integer" if number.type is int else "number"
        demanded = f"finite {type_name}" if demand == "finite" else f"{type_name} {demand}"
        raise argparse.ArgumentTypeError(f"'{word}' is no {demanded}")

    return convert


def option(parser: Any, name: str, convert: Callable[[str], Any], default: Any, help: str) -> None:
    """Add an option whose help ends with its default value."""
    parser.add_argument(name, type=convert, default=default, help=f"{help} (default %(default)s)")


def parse_bool(word: str) -> bool:
    """Whether ``word`` means true. Raises ValueError for a word that is neither true nor false."""
    if word.lower() not in (*_TRUE, *_FALSE):
        raise ValueError(f"'{word}' is neither true nor false")
    return word.lower() in _TRUE


def bool_argument(word: str) -> bool:
    """``parse_bool`` as a converter for argparse."""
    try:
        return parse_bool(word)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _type_name(kind: Any) -> str:
    origin, type_arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (Union, types.UnionType):
        return " or ".join("none" if k is type(None) else _type_name(k) for k in type_arguments)
    if origin is Literal:
        return "|".join(map(str, type_arguments))
    if origin is tuple and type_arguments[-1] is Ellipsis:
        return f"{_type_name(type_arguments[0])},..."
    if origin is tuple:
        return ":".join(_type_name(k) for k in type_arguments)
    return {int: "integer", float: "number", str: "name", bool: "true|false"}.get(kind, str(kind))


def _example(option: Option) -> str:
    if option.value is not None and (example := _plain(option.value)):
        return example  # an empty list is none
    if "|" in option.type_name():
        return option.type_name().partition("|")[0]
    if ":" in option.type_name():
        return "20:10"
    if "name" in option.type_name():
        return "NAME"
    usual = 100_000 if "integer" in option.type_name() else 10
    kinds = option.numbers
    return next((str(n) for n in (usual, 10, 1) if any(kind.holds(n) for kind in kinds)), str(usual))


def _plain(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(":".join(map(str, v)) if isinstance(v, tuple) else str(v) for v in value)
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _with_value(value: Any, path: tuple[str, ...], new: Any) -> Any:
    name, *rest = path
    inner = _with_value(getattr(value, name), tuple(rest), new) if rest else new
    return dataclasses.replace(value, **{name: inner})


def field_docs(kind: type) -> dict[str, str]:
    """The documentation of each field: the sentences after ``name:``, or ``name, other name:``, in the
    docstring of the dataclass or of a base, up to those of the next fields, or to the end of the
    paragraph."""
    name = "|".join(re.escape(field.name) for field in dataclasses.fields(kind))
    names = rf"(?:{name})(?:,\s+(?:{name}))*"
    docs: dict[str, str] = {}
    texts = [base.__doc__ or "" for base in reversed(kind.__mro__) if dataclasses.is_dataclass(base)]
    for paragraph in re.split(r"\n\s*\n", "\n\n".join(texts)) if name else ():
        pieces = re.split(rf"(?:^|(?<=[.:;)] ))({names}): ", " ".join(paragraph.split()))
        for listed, text in zip(pieces[1::2], pieces[2::2], strict=True):
            docs |= dict.fromkeys(re.split(r",\s+", listed), text.strip())
    return docs
