"""The reference of the command line: what each ``--help`` prints, and each field of a run as an option."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import io
import os
from collections.abc import Iterator
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from murmurate.cli.main import _parser, main
from murmurate.cli.options import Option, _plain, options
from murmurate.errors import MissingExtra, Refusal
from murmurate.recipes import pairs, recipe
from murmurate.strategies import strategies
from murmurate.training.run import Run
from murmurate.worlds import registry
from murmurate.worlds.own import OwnWorld

_EXAMPLE = "cartpole-a2c"
_WIDTH = "100"
_OWN_WORLD = OwnWorld("FILE.py:NAME")  # nothing is read from the file
# headings of lists that the page of options shows instead, where the list is not that of options of a resume
_RUN_LISTS = ("options of every run:", "the run:", "where it runs:", "the agent", "the strategy", "the world")
_RESUME_LIST = "what may change:"


def _verbs(parser: argparse.ArgumentParser, prefix: str = "") -> Iterator[tuple[str, str]]:
    """(verb, its line of help) for each verb of ``parser``; a verb's own verbs follow it.

    prefix: the verbs that lead to ``parser``, such as "topics ".
    """
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            help_lines = {choice.dest: choice.help or "" for choice in action._choices_actions}
            for name, verb_parser in action.choices.items():
                if name in help_lines:  # all other names are aliases
                    yield f"{prefix}{name}", help_lines[name]
                    yield from _verbs(verb_parser, f"{prefix}{name} ")


def _help(words: list[str]) -> str:
    """What ``murmurate WORDS --help`` prints, without the lists that the page of options shows.

    Raises ValueError if the command refuses.
    """
    os.environ["COLUMNS"] = _WIDTH
    printed = io.StringIO()
    code: Any = 0
    with contextlib.redirect_stdout(printed):
        try:
            code = main([*words, "--help"])
        except SystemExit as exit_request:
            code = exit_request.code
    if code:
        raise ValueError(f"murmurate {' '.join(words)} --help ends with exit code {code}")
    return without_run_lists(printed.getvalue())


def without_run_lists(text: str) -> str:
    """The help ``text`` without its lists of a run's options; that of ``resume`` keeps them, because it says
    which may change."""
    lines = text.splitlines()
    if _RESUME_LIST in lines:
        return text.strip()
    kept = []
    in_list = False
    for line in lines:
        if line and not line.startswith(" "):
            in_list = line.endswith(":") and line.startswith(_RUN_LISTS)
        if not in_list:
            kept.append(line)
    return "\n".join(kept).strip()


class _Commands(SphinxDirective):
    """``{commands}``: each verb of the command line."""

    def run(self) -> list[nodes.Node]:
        sections = []
        for verb, line in _verbs(_parser()):
            text = _help(verb.split())
            sections.append(f"## murmurate {verb}\n\n{line[:1].upper()}{line[1:]}.\n\n```text\n{text}\n```\n")
        return self.parse_text_to_nodes("\n".join(sections), allow_section_headings=True)


@functools.cache
def _runs() -> tuple[Run, ...]:
    """Runs with all algorithms and all families of worlds."""
    family_of = {name: family for family, names in registry.families().items() for name in names}
    runs: dict[Any, Run] = {}
    families: set[str] = set()
    algorithms: set[str] = set()
    for name, (world, algorithm) in pairs().items():
        family = family_of.get(world, world)  # a data set is a family of its own
        if family in families and algorithm in algorithms:
            continue
        with contextlib.suppress(Refusal, MissingExtra):  # raised if an extra is not installed
            run = recipe(name)
            families.add(family)
            algorithms.add(algorithm)
            runs.setdefault((type(run.world), algorithm), run)
    return tuple(runs.values())


def _configs(part: str) -> dict[str, Any]:
    """One config of each type that runs have as their ``part``, such as "learner", by name or class."""
    configs: dict[str, Any] = {}
    for run in _runs():
        config = getattr(run, part)
        configs.setdefault(getattr(type(config), "name", type(config).__name__), config)
    return dict(sorted(configs.items(), key=lambda pair: pair[0].lower()))


def with_defaults(config: Any) -> Any:
    """``config`` with every field at the default of its class, at any depth; a field without a default keeps
    its value."""
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        if not field.init:
            continue
        value, default = getattr(config, field.name), _default(field)
        if dataclasses.is_dataclass(value) and type(value) is not type(default):
            changes[field.name] = with_defaults(value)
        elif default is not dataclasses.MISSING:
            changes[field.name] = default
    return dataclasses.replace(config, **changes)


def _default(field: dataclasses.Field[Any]) -> Any:
    """The default of a field; MISSING if it has none."""
    factory = field.default_factory
    return field.default if factory is dataclasses.MISSING else factory()


def _table(rows: list[Option]) -> str:
    lines = ["| option | value | meaning | default |", "|---|---|---|---|"]
    for row in rows:
        ranges = "; ".join(dict.fromkeys(str(kind.range) for kind in row.numbers if kind.annotated))
        value = _plain(row.value)
        cells = (
            f"`--{row.name}`",
            f"{row.type_name()} {f'({ranges})' * bool(ranges)}",
            row.about,
            f"`{value}`" if value else "empty",
        )
        lines.append("| " + " | ".join(c.replace("|", "\\|").replace("``", "`") for c in cells) + " |")
    return "\n".join(lines) + "\n"


def _sections(configs: dict[str, Any], prefix: str) -> str:
    """A section with a table of options for each config; prefix: what the options' names begin with."""
    text = ""
    for name, config in configs.items():
        rows = list(options(with_defaults(config), prefix=prefix))
        text += f"### {name}\n\n{_table(rows) if rows else 'It has no options.'}\n\n"
    return text


def _run_options() -> str:
    """The options of a run itself, without those of its parts, as a table."""
    run = with_defaults(recipe(_EXAMPLE))
    prefixes = ("agent", "world", "strategy")
    of_parts = {o.name for part in (run.source, run.evaluation) for o in options(part)}
    rows = [o for o in options(run) if o.name.partition(".")[0] not in prefixes and o.name not in of_parts]
    return _table(rows)


def worlds() -> dict[str, Any]:
    """One world of each type, by its class and a name."""
    named = [registry.world(name) for names in registry.families().values() for name in names]
    by_type: dict[type, Any] = {}
    for world in (*named, *(run.world for run in _runs())):
        by_type.setdefault(type(world), world)
    found = {f"{kind.__name__} ({world.name}, ...)": world for kind, world in by_type.items()}
    found[f"OwnWorld ({_OWN_WORLD.name})"] = _OWN_WORLD
    return dict(sorted(found.items()))


_GROUPS = {
    "run": _run_options,
    "strategies": lambda: _sections({name: kind() for name, kind in strategies().items()}, "strategy."),
    "agents": lambda: _sections(_configs("learner"), "agent."),
    "worlds": lambda: _sections(worlds(), "world."),
    "sources": lambda: _sections(_configs("source"), ""),
    "evaluations": lambda: _sections(_configs("evaluation"), ""),
}


class _Options(SphinxDirective):
    """``{options} agents``: the options of every agent, with their meaning, range and default."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        return self.parse_text_to_nodes(_GROUPS[self.arguments[0]](), allow_section_headings=True)


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("commands", _Commands)
    app.add_directive("options", _Options)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
