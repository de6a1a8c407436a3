"""Strategies, by which replicas agree. They are found by listing the files and packages of this
folder."""

from __future__ import annotations

from murmurate import plugins
from murmurate.errors import unknown
from murmurate.strategies.interface import Strategy


def strategies() -> dict[str, type[Strategy]]:
    """Every strategy by its command-line name (see ``plugins``)."""
    found: dict[str, type[Strategy]] = {}
    for module in plugins.modules(__name__):
        for thing in vars(module).values():
            if isinstance(thing, type) and issubclass(thing, Strategy) and thing is not Strategy:
                found[thing.name] = thing
    return dict(sorted(found.items()))


def strategy(name: str) -> type[Strategy]:
    """The strategy called ``name``. Raises Refusal with the nearest name if there is none."""
    available = strategies()
    if name not in available:
        raise unknown("strategy", name, available)
    return available[name]
