"""Launchers: they start roles and hand each a fabric. They know no strategy by name.

A launcher is a module with ``CAPABILITIES`` (what its fabric can offer at best) and ``start``; where it can
know before the start that it cannot run, also ``check``. One that adopts ranks which somebody else started
has ``offered``, ``dictated_replicas``, ``crew`` and ``follow`` besides (see ``torchrun``).
"""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType

from murmurate.errors import unknown
from murmurate.fabric.interface import Capability


def launchers() -> list[str]:
    """Launchers by name: the modules of this folder that have a ``start``."""
    names = [m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_")]
    return sorted(n for n in names if hasattr(importlib.import_module(f"{__name__}.{n}"), "start"))


def launcher(name: str) -> ModuleType:
    """Raises Refusal with the nearest name if there is none called ``name``."""
    if name not in launchers():
        raise unknown("launcher", name, launchers())
    return importlib.import_module(f"{__name__}.{name}")


def offered(module: ModuleType) -> frozenset[Capability]:
    """What the launcher's fabric can do here and now. Raises Refusal where it cannot run at all."""
    here = getattr(module, "offered", None)
    found: frozenset[Capability] = module.CAPABILITIES if here is None else here()
    return found


def dictated_replicas(name: str) -> int | None:
    """How many replicas the launcher's surroundings call for; None where that is the user's choice."""
    dictated = getattr(launcher(name), "dictated_replicas", None)
    return None if dictated is None else dictated()
