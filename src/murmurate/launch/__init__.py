"""Launchers: they start roles and hand each a fabric. They know no strategy by name."""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType

from murmurate.errors import unknown


def launchers() -> list[str]:
    """Launchers by name: the modules of this folder that have a ``start``."""
    names = [m.name for m in pkgutil.iter_modules(__path__)]
    return sorted(n for n in names if hasattr(importlib.import_module(f"{__name__}.{n}"), "start"))


def launcher(name: str) -> ModuleType:
    """Raises Refusal with the nearest name if there is none called ``name``."""
    if name not in launchers():
        raise unknown("launcher", name, launchers())
    return importlib.import_module(f"{__name__}.{name}")
