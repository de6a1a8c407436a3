"""The reference of the command line: what each ``--help`` prints, and each field of a run as an option."""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import os
from collections.abc import Iterator
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from murmurate.cli.main import _parser, main
from murmurate.cli.options import Option, options
from murmurate.errors import MissingExtra, Refusal
from murmurate.recipes import pairs, recipe
from murmurate.strategies import strategies
from murmurate.training.run import Run

_EXAMPLE = "cartpole-a2c"
_WIDTH = "100"
_OPTION_LISTS = ("Fields", "The cluster")  # headings of lists that the page of options shows instead


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
    """What ``murmurate WORDS --help`` prints, up to a list of options; "" if the command refuses."""
    os.environ["COLUMNS"] = _WIDTH
    printed = io.StringIO()
    code: Any = 0
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()):
        try:
            code = main([*words, "--help"])
        except SystemExit as exit_request:
            code = exit_request.code
    lines = printed.getvalue().splitlines()
    end = next((i for i, line in enumerate(lines) if line.startswith(_OPTION_LISTS)), len(lines))
    return "" if code else "\n".join(lines[:end]).strip()


class _Commands(SphinxDirective):
    """``{commands}``: each verb of the command line."""

    def run(self) -> list[nodes.Node]:
        sections = []
        for verb, line in _verbs(_parser()):
            text = _help(verb.split()) or _help([*verb.split(), _EXAMPLE]).replace(_EXAMPLE, "RECIPE")
            sections.append(f"## murmurate {verb}\n\n{line[:1].upper()}{line[1:]}.\n\n```text\n{text}\n```\n")
        return self.parse_text_to_nodes("\n".join(sections), allow_section_headings=True)


@functools.cache
def _runs() -> tuple[Run, ...]:
    """A run of each algorithm, and of each family of worlds."""
    runs: dict[Any, Run] = {}
    families: set[str] = set()
    algorithms: set[str] = set()
    for name, (world, algorithm) in pairs().items():
        family = world.partition("-")[0]
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


def _default(config: Any) -> Any:
    """The defaults of ``config``'s class, or ``config`` itself if some fields have none."""
    with contextlib.suppress(TypeError, ValueError):
        return type(config)()
    return config


def _table(rows: list[Option]) -> str:
    lines = ["| option | value | meaning | default |", "|---|---|---|---|"]
    for row in rows:
        ranges = "; ".join(dict.fromkeys(str(kind.range) for kind in row.numbers if kind.annotated))
        value = row.value if not isinstance(row.value, tuple) else ",".join(map(str, row.value))
        cells = (
            f"`--{row.name}`",
            f"{row.type_name()} {f'({ranges})' * bool(ranges)}",
            row.about,
            f"`{value}`",
        )
        lines.append("| " + " | ".join(c.replace("|", "\\|").replace("``", "`") for c in cells) + " |")
    return "\n".join(lines) + "\n"


def _sections(configs: dict[str, Any], prefix: str) -> str:
    """A section with a table of options for each config; prefix: what the options' names begin with."""
    text = ""
    for name, config in configs.items():
        rows = list(options(config, prefix=prefix))
        text += f"### {name}\n\n{_table(rows) if rows else 'It has no options.'}\n\n"
    return text


def _run_options() -> str:
    """The options of a run itself, without those of its parts, as a table."""
    run = recipe(_EXAMPLE)
    prefixes = ("agent", "world", "strategy")
    of_parts = {o.name for part in (run.source, run.evaluation) for o in options(part)}
    rows = [o for o in options(run) if o.name.partition(".")[0] not in prefixes and o.name not in of_parts]
    return _table(rows)


def _worlds() -> dict[str, Any]:
    """One world of each type, by its class and a name."""
    worlds: dict[type, Any] = {}
    for run in _runs():
        worlds.setdefault(type(run.world), run.world)
    return {f"{type(world).__name__} ({world.name}, ...)": world for world in worlds.values()}


_GROUPS = {
    "run": _run_options,
    "strategies": lambda: _sections({name: kind() for name, kind in strategies().items()}, "strategy."),
    "agents": lambda: _sections({k: _default(v) for k, v in _configs("learner").items()}, "agent."),
    "worlds": lambda: _sections(_worlds(), "world."),
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
