"""Fabrics, through which members exchange vectors: each package or module that defines ``run_members``."""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType


def fabrics() -> dict[str, ModuleType]:
    """Every fabric's module, by the fabric's name; its ``run_members`` starts members on the fabric."""
    found = {}
    for entry in pkgutil.iter_modules(__path__):
        name = f"{__name__}.{entry.name}"
        module = importlib.import_module(f"{name}.fabric" if entry.ispkg else name)
        if hasattr(module, "run_members"):
            found[entry.name] = module
    return found
