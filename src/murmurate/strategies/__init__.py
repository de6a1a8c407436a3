"""Ways of agreeing. Each file holds one; nothing else has to know of it."""

from __future__ import annotations

import importlib
import pkgutil

from murmurate.errors import unknown
from murmurate.strategies.interface import Strategy


def strategies() -> dict[str, type[Strategy]]:
    """Every strategy by its command-line name, found by listing this folder."""
    found: dict[str, type[Strategy]] = {}
    for module in pkgutil.iter_modules(__path__):
        for thing in vars(importlib.import_module(f"{__name__}.{module.name}")).values():
            if isinstance(thing, type) and issubclass(thing, Strategy) and thing is not Strategy:
                found[thing.name] = thing
    return dict(sorted(found.items()))


def strategy(name: str) -> type[Strategy]:
    """Raises Refusal with the nearest name if there is none called ``name``."""
    known = strategies()
    if name not in known:
        raise unknown("strategy", name, known)
    return known[name]
