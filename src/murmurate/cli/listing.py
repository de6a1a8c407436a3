"""``murmurate list``: recipes, worlds, strategies, agents, fabrics, launchers, as text or JSON."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Callable
from types import ModuleType
from typing import Any

import rich.console
import rich.table

from murmurate import fabric, plugins
from murmurate.bench import benches
from murmurate.errors import unknown
from murmurate.launch import launchers
from murmurate.recipes import pairs, summaries
from murmurate.strategies import strategies
from murmurate.worlds.registry import world_names

_COLUMNS = 100


def listing(what: str) -> list[dict[str, Any]]:
    """The rows of a list, each with at least ``name``. Raises Refusal for an unknown list."""
    if what not in _LISTS:
        raise unknown("list", what, _LISTS)
    return _LISTS[what]()


def show(what: str, rows: list[dict[str, Any]]) -> None:
    """Print the rows as a table, or names alone in columns."""
    console = rich.console.Console()
    if what == "recipes":
        print("Recipes are <world>-<algorithm>, for example cartpole-a2c. Algorithms:")
        algorithms = summaries()
        width = max(map(len, algorithms)) + 2
        print("".join(f"  {name:<{width}}{line}\n" for name, line in algorithms.items()))
        show("worlds", _worlds())
        return
    if what == "worlds":
        print("Worlds:")
        print(textwrap.fill("  ".join(row["name"] for row in rows), _COLUMNS, break_on_hyphens=False))
        print(
            "gym:<Id> of any registered Gymnasium environment; gym:my_module:MyEnv-v0 imports my_module;\n"
            "and env:FILE.py:NAME or env:module:NAME of a class or function that makes one"
        )
        return
    if what == "strategies":
        print("\n".join(_block(row) for row in rows), end="")
        return
    table = rich.table.Table(box=None, pad_edge=False, header_style="bold")
    keys = list(rows[0])
    for key in keys:
        table.add_column(key.replace("_", " "))
    for row in rows:
        table.add_row(*(", ".join(v) if isinstance(v, list) else str(v) for v in row.values()))
    console.print(table)


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
    }
    lines = [
        textwrap.fill(value, _COLUMNS, initial_indent=f"  {key:<22}", subsequent_indent=" " * 24)
        for key, value in entries.items()
        if value
    ]
    # the step is on the line of the name
    return f"{row['name']:<24}{lines[0].strip()}\n" + "\n".join(lines[1:]) + "\n"


def _recipes() -> list[dict[str, Any]]:
    return [
        {"name": name, "world": world, "algorithm": algorithm} for name, (world, algorithm) in pairs().items()
    ]


def _worlds() -> list[dict[str, Any]]:
    """The simulators, and the data sets that a recipe names."""
    of_recipes = {world for world, _ in pairs().values()}
    return [{"name": name} for name in sorted(of_recipes.union(world_names()))]


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
        }
        for name, kind in strategies().items()
    ]


def _agents() -> list[dict[str, Any]]:
    rows = []
    for module in plugins.modules("murmurate.agents"):
        for kind in vars(module).values():
            if dataclasses.is_dataclass(kind) and isinstance(kind, type) and hasattr(kind, "summary"):
                rows.append({"name": vars(kind)["name"], "summary": vars(kind)["summary"]})
    return rows


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


_LISTS: dict[str, Callable[[], list[dict[str, Any]]]] = {
    "recipes": _recipes,
    "worlds": _worlds,
    "strategies": _strategies,
    "agents": _agents,
    "fabrics": _fabrics,
    "launchers": _launchers,
    "benches": _benches,
}
