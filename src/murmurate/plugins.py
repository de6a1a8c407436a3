"""Finds strategies, agents, worlds, recipes and the like: by listing their folder, and by entry points.

A package of somebody else joins a folder by naming a module of its own under an entry-point group of that
folder's name::

    [project.entry-points."murmurate.strategies"]
    anything = "their_package.their_strategy"

From then on the module counts as one more file of ``murmurate/strategies``.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import pkgutil
from types import ModuleType


@functools.cache
def modules(package: str) -> tuple[ModuleType, ...]:
    """The public modules of ``package`` ("murmurate.strategies", say), then those that joined it."""
    spec = importlib.util.find_spec(package)
    places = [] if spec is None else spec.submodule_search_locations or []
    own = [m.name for m in pkgutil.iter_modules(places) if not m.name.startswith("_")]
    found = [importlib.import_module(f"{package}.{name}") for name in own]
    for entry in importlib.metadata.entry_points(group=package):
        found.append(importlib.import_module(entry.module))
    return tuple(found)
