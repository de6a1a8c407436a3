"""Launchers, which start the workers of a run and give each a fabric (see ``murmurate.training.launcher``).

Each is a class in a module of this folder, or in a module that an entry point adds to it.
"""

from __future__ import annotations

from murmurate import plugins
from murmurate.errors import unknown
from murmurate.training.launcher import Launcher


def launchers() -> dict[str, Launcher]:
    """Every launcher by its command-line name (see ``plugins``)."""
    found: dict[str, Launcher] = {}
    for module in plugins.modules(__name__):
        for thing in vars(module).values():
            if isinstance(thing, type) and issubclass(thing, Launcher) and thing is not Launcher:
                found[thing.name] = thing()
    return dict(sorted(found.items()))


def launcher(name: str) -> Launcher:
    """The launcher called ``name``. Raises Refusal, with the nearest name, if there is none."""
    available = launchers()
    if name not in available:
        raise unknown("launcher", name, available)
    return available[name]
