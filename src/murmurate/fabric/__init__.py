"""Fabrics, through which members exchange vectors: each package or module that defines ``run_members``."""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType


def fabrics() -> dict[str, ModuleType]:
    """Every fabric's module, by the fabric's name; its ``run_members`` starts members on the fabric."""
    by_name = {}
    for entry in pkgutil.iter_modules(__path__):
        path = f"{__name__}.{entry.name}"
        module = importlib.import_module(f"{path}.fabric" if entry.ispkg else path)
        if hasattr(module, "run_members"):
            by_name[entry.name] = module
    return by_name
