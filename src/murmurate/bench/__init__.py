"""Races against peers and physical limits. Each file holds one bench; nothing else has to know of it.

A bench is a module with a ``NAME``, a ``SUMMARY`` and ``measure(full, log) -> dict``. Files whose names
begin with an underscore are what benches share: clocks, racers, the limit.
"""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType
from typing import Any

from murmurate.bench._result import header, show, teller
from murmurate.errors import unknown


def benches() -> dict[str, ModuleType]:
    """Every bench by its command-line name, found by listing this folder."""
    names = [m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_")]
    modules = [importlib.import_module(f"{__name__}.{name}") for name in names]
    return dict(sorted((module.NAME, module) for module in modules))


def bench(name: str, *, full: bool = False, quiet: bool = False) -> dict[str, Any]:
    """Measure; the result as plain JSON values, headed by date, command, hardware and versions.

    full: longer, with more repetitions and all peers. quiet: print nothing; otherwise progress goes to
    standard error and a table to standard output. Raises Refusal for an unknown name.
    """
    known = benches()
    if name not in known:
        raise unknown("bench", name, known)
    result = {**header(name, full), **known[name].measure(full, teller(quiet))}
    if not quiet:
        show(result)
    return result
