"""Fabrics, through which members exchange vectors. Each package, or file, holds one."""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType


def fabrics() -> dict[str, ModuleType]:
    """By name: the modules whose ``run_members`` starts members on their fabric."""
    found = {}
    for entry in pkgutil.iter_modules(__path__):
        name = f"{__name__}.{entry.name}"
        module = importlib.import_module(f"{name}.fabric" if entry.ispkg else name)
        if hasattr(module, "run_members"):
            found[entry.name] = module
    return found
