"""Strategies: how replicas agree on their parameters. They are found by listing the files and packages of
this folder."""

from __future__ import annotations

from murmurate import plugins
from murmurate.errors import unknown
from murmurate.strategies.interface import Strategy


def strategies() -> dict[str, type[Strategy]]:
    """Every strategy by its command-line name (see ``plugins``)."""
    by_name: dict[str, type[Strategy]] = {}
    for module in plugins.modules(__name__):
        for value in vars(module).values():
            if isinstance(value, type) and issubclass(value, Strategy) and value is not Strategy:
                by_name[value.name] = value
    return dict(sorted(by_name.items()))


def strategy(name: str) -> type[Strategy]:
    """The strategy called ``name``. Raises Refusal with the nearest name if there is none."""
    available = strategies()
    if name not in available:
        raise unknown("strategy", name, available)
    return available[name]
