"""``--help`` of every verb: its own options, and the fields of a config, which are options too."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from murmurate.cli.options import Option, options
from murmurate.errors import Refusal, printable

_HELP_WORDS = ("-h", "--help")
_TITLES = {
    "placement": "where it runs",
    "learner": "the agent",
    "strategy": "the strategy",
    "source": "where the batches come from",
    "evaluation": "the evaluation",
    "world": "the world",
}


class Misused(Refusal):
    """Words that the parser does not take, such as an option without its value."""


@dataclass(frozen=True)
class Fields:
    """The fields that a verb takes as options.

    usage: the command. configs: (title of the config's own fields, config) pairs. general: show only fields
    that every recipe has, without their values. note: text below the options. only: names of the config's
    fields that are options here; empty: all.
    """

    usage: str
    configs: Sequence[tuple[str, Any]] = field(default=())
    general: bool = False
    note: str = ""
    only: frozenset[str] = frozenset()


def asks_for_help(words: Sequence[str]) -> bool:
    return any(word in _HELP_WORDS for word in words)


def show_help(
    parser: argparse.ArgumentParser, words: Sequence[str], order: Callable[[Sequence[str]], list[str]]
) -> int:
    """Print the help of the verb that ``words`` begin with, with the fields of the recipe, folder or
    benchmark that they name. order: puts the name in front of the options. Returns the exit code, always 0.
    """
    rest = [word for word in words if word not in _HELP_WORDS]
    verb = parser
    for word in rest:
        verbs = verbs_of(verb)
        if word not in verbs:
            break
        verb = verbs[word]
    if (fields_of := verb.get_default("fields")) is not None:
        try:
            options, others = parser.parse_known_args(order(rest))
            fields = fields_of(options, others)
        except Refusal as refusal:
            if not isinstance(refusal, Misused):  # an unknown name, a folder that holds no run
                print(f"murmurate: {printable(str(refusal))}\n", file=sys.stderr)
            fields = fields_of(None, [])
        add_fields(verb, fields)
    print(verb.format_help(), end="")
    return 0


def verbs_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The verbs of a parser, by name."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def add_fields(parser: argparse.ArgumentParser, fields: Fields) -> None:
    """Add the fields to a parser's help."""
    parser.usage, parser.epilog = fields.usage, fields.note
    for own_title, config in fields.configs:
        groups: dict[str, Any] = {}
        for option in sorted(options(config), key=_sort_key):
            is_nested = len(option.path) > 1
            if fields.general and is_nested and option.path[0] != "placement":
                continue
            if fields.only and not {option.path[0], ".".join(option.path)} & fields.only:
                continue
            title, about = _title(config, option.path[0], fields.general) if is_nested else (own_title, None)
            if f"--{option.name}" in parser._option_string_actions:  # the verb's own option comes first
                continue
            if title not in groups:
                groups[title] = parser.add_argument_group(title, about)
            groups[title].add_argument(
                f"--{option.name}",
                metavar=option.type_name(),
                help=option.help(with_value=not fields.general).replace("%", "%%"),
            )


def _sort_key(option: Option) -> int:
    """Fields of the config itself and of parts without a title first, then the parts in ``_TITLES``."""
    parts = list(_TITLES)
    return parts.index(option.path[0]) if len(option.path) > 1 and option.path[0] in parts else -1


def _title(config: Any, part: str, general: bool) -> tuple[str, str | None]:
    """Title and description of the group of a part's options."""
    inner, title = getattr(config, part), _TITLES.get(part, part)
    name = "" if general else getattr(inner, "name", "")
    return title + f", {name}" * bool(name), getattr(type(inner), "summary", None)
