"""``murmurate list``: recipes, worlds, strategies, agents, fabrics, launchers, as text or JSON."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Callable
from types import ModuleType
from typing import Any

import rich.console
import rich.table
import rich.text

from murmurate import fabric, plugins
from murmurate.bench import benches
from murmurate.errors import unknown
from murmurate.launch import launchers
from murmurate.recipes import pairs, summaries
from murmurate.replicator.learner import LearnerConfig
from murmurate.strategies import strategies
from murmurate.strategies.interface import Strategy
from murmurate.worlds.registry import families, vector_worlds

_COLUMNS = 100  # characters of a line
_DATA_SETS = "data sets"
_TITLES = {
    "adroit": "Adroit hand",
    "atari": "Atari",
    "dm_control": "DeepMind Control",
    "gym": "Gymnasium",
    "mazes": "mazes",
    "vizdoom": "Doom",
}
_OTHER_WORLDS = (
    "and gym:<Id> of any registered Gymnasium environment; gym:my_module:MyEnv-v0 imports my_module;\n"
    "and env:FILE.py:NAME or env:module:NAME of a class or function that makes one"
)


def listing(what: str) -> list[dict[str, Any]]:
    """The rows of a list, each with at least ``name``. Raises Refusal for an unknown list."""
    if what not in LISTS:
        raise unknown("list", what, LISTS)
    return LISTS[what]()


def show(what: str, rows: list[dict[str, Any]]) -> None:
    """Print the rows: as a table, or, for some lists, as text."""
    if what == "recipes":
        _show_recipes()
        return
    if what == "worlds":
        for family, names in _by_family(rows).items():
            print(f"{_TITLES.get(family, family)}:")
            text = textwrap.fill("  ".join(names), _COLUMNS, break_on_hyphens=False)
            print(textwrap.indent(text, "  "))
        print(_OTHER_WORLDS)
        return
    if what == "strategies":
        print("\n".join(_block(row) for row in rows), end="")
        return
    console = rich.console.Console()
    table = rich.table.Table(box=None, pad_edge=False, header_style="bold")
    keys = list(rows[0])
    for key in keys:
        table.add_column(key.replace("_", " "))
    for row in rows:
        texts = (", ".join(v) if isinstance(v, list) else str(v) for v in row.values())
        table.add_row(*map(rich.text.Text, texts))
    console.print(table)


def _show_recipes() -> None:
    """Print two tables: algorithms, and worlds by family."""
    print("A recipe is <world>-<algorithm>, for example cartpole-a2c.\n\nAlgorithms")
    algorithms = summaries()
    width = max(map(len, algorithms)) + 2
    for name, line in algorithms.items():
        print(f"  {name:<{width}}{line}")
    print("\nWorlds (all of them: murmurate list worlds)")
    families = _by_family(_worlds())
    titles = {family: f"{_TITLES.get(family, family)} ({len(names)})" for family, names in families.items()}
    width = max(map(len, titles.values())) + 2
    for family, names in families.items():
        text = textwrap.shorten("  ".join(names), _COLUMNS - width, placeholder="  …", break_on_hyphens=False)
        # shorten leaves one space between names
        print(f"  {titles[family]:<{width}}{text.replace(' ', '  ').replace('    ', '  ')}")
    print(_OTHER_WORLDS)


def _by_family(rows: list[dict[str, Any]]) -> dict[str, list[str]]:
    families: dict[str, list[str]] = {}
    for row in rows:
        families.setdefault(row["family"], []).append(row["name"])
    return dict(sorted(families.items()))


def _block(row: dict[str, Any]) -> str:
    """One strategy: its name and step, and below them a line for each of its properties."""
    rounds = "synchronous" if row["synchronous"] else "asynchronous"
    entries = {
        "": row["step"],
        "rounds": rounds + (", with a centre" if row["centre"] else ""),
        "needs": ", ".join(row["needs"]) or "nothing",
        "messages carry": row["carries"],
        "staleness bounded by": row["bounded_by"],
        "a peer dies": row["on_death"],
        "a peer is slow": row["on_slow"],
        "a peer joins": row["on_join"],
        "paper": row["paper"],
        "fields": ", ".join(f"{name}={value}" for name, value in row["fields"].items()) or "none",
        "class": row["class"],
    }
    lines = [
        textwrap.fill(value, _COLUMNS, initial_indent=f"  {key:<22}", subsequent_indent=" " * 24)
        for key, value in entries.items()
        if value
    ]
    # the first property, the step, is on the line of the name
    return f"{row['name']:<24}{lines[0].strip()}\n" + "\n".join(lines[1:]) + "\n"


def _recipes() -> list[dict[str, Any]]:
    return [
        {"name": name, "world": world, "algorithm": algorithm} for name, (world, algorithm) in pairs().items()
    ]


def _worlds() -> list[dict[str, Any]]:
    """The simulators, and the data sets that a recipe names."""
    family_of = {name: family for family, names in families().items() for name in names}
    vectors = frozenset(vector_worlds())
    names = sorted({world for world, _ in pairs().values()}.union(family_of))
    return [
        {
            "name": name,
            "family": family_of.get(name, _DATA_SETS),
            "actions": "none" if name not in family_of else "vector" if name in vectors else "discrete",
        }
        for name in names
    ]


def _strategies() -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "step": kind.summary,
            "needs": sorted(need.value for need in kind().needs),
            "carries": kind.behaviour.carries,
            "synchronous": kind.synchronous,
            "centre": kind.centre,
            "bounded_by": kind.behaviour.bounded_by,
            "on_death": kind.behaviour.on_death,
            "on_slow": kind.behaviour.on_slow,
            "on_join": kind.behaviour.on_join,
            "paper": kind.paper,
            "fields": _fields(kind()),
            "class": f"{kind.__module__}.{kind.__name__}",
        }
        for name, kind in strategies().items()
    ]


def _fields(strategy: Strategy) -> dict[str, Any]:
    return {field.name: getattr(strategy, field.name) for field in dataclasses.fields(strategy) if field.init}


def _agents() -> list[dict[str, Any]]:
    return [
        {"name": vars(kind)["name"], "summary": vars(kind)["summary"]}
        for kind in plugins.classes("murmurate.agents", LearnerConfig)
        if dataclasses.is_dataclass(kind) and "summary" in vars(kind)
    ]


def _fabrics() -> list[dict[str, Any]]:
    return [
        {"name": name, "summary": _first_line(module)} for name, module in sorted(fabric.fabrics().items())
    ]


def _launchers() -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "summary": _first_line(type(engine)),
            "offers": sorted(offer.value for offer in engine.offers),
        }
        for name, engine in launchers().items()
    ]


def _benches() -> list[dict[str, Any]]:
    return [{"name": name, "summary": module.SUMMARY} for name, module in benches().items()]


def _first_line(described: ModuleType | type) -> str:
    return (described.__doc__ or "").strip().splitlines()[0]


LISTS: dict[str, Callable[[], list[dict[str, Any]]]] = {
    "recipes": _recipes,
    "worlds": _worlds,
    "strategies": _strategies,
    "agents": _agents,
    "fabrics": _fabrics,
    "launchers": _launchers,
    "benches": _benches,
}
