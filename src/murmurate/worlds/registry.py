"""Worlds by their names on the command line: ``cartpole``, ``space-invaders``, ``gym:Acrobot-v1``.

They come from the modules of this folder (see ``murmurate.worlds.interface``).
"""

from __future__ import annotations

import difflib
import re
from types import ModuleType

from murmurate import errors, plugins
from murmurate.worlds import _gym_env
from murmurate.worlds.interface import SimulatorWorld


def world(name: str) -> SimulatorWorld:
    """The world of that name.

    Raises ``Refusal`` with the nearest name for an unknown name or id, and where two modules offer a world of
    that name; ``MissingExtra`` if it may be a world of a package that is not installed.
    """
    missing: errors.MissingExtra | None = None
    for module in _modules():
        try:
            chosen: SimulatorWorld | None = module.world(name)
        except errors.MissingExtra as problem:
            missing = problem
            continue
        if chosen is not None:
            _refuse_twins(name, module)
            return chosen
    known = world_names()
    if missing is not None and not difflib.get_close_matches(name, known, n=1, cutoff=0.8):
        raise missing
    if re.search(r"-v\d+$", name):
        package = str(_gym_env.registered(name).entry_point).partition(".")[0]
        written = _gym_env.PREFIX + (name if package == "gymnasium" else f"{package}:{name}")
        raise errors.Refusal(f"There is no world called '{name}'. The environment of that id is {written}.")
    raise errors.unknown("world", name, known)


def _refuse_twins(name: str, module: ModuleType) -> None:
    """Raise Refusal if a module of another package offers a world of the same name as ``module``."""
    for other in _modules():
        if not other.__name__.startswith(f"{__package__}.") and name in other.names():
            plugins.refuse_clash("worlds", name, module, other)


def world_names() -> list[str]:
    """The named worlds that can be opened here, sorted."""
    return sorted(name for module in _modules() for name in module.names())


def families() -> dict[str, list[str]]:
    """The named worlds that can be opened here, by the module that opens them."""
    by_module = {module.__name__.rpartition(".")[2]: sorted(module.names()) for module in _modules()}
    return {family: names for family, names in sorted(by_module.items()) if names}


def vector_worlds() -> tuple[str, ...]:
    """The worlds of ``world_names`` whose actions are vectors: what each module's ``vector_names`` lists."""
    lists = (module.vector_names() for module in _modules() if hasattr(module, "vector_names"))
    return tuple(sorted(name for names in lists for name in names))


def _modules() -> list[ModuleType]:
    return [m for m in plugins.modules("murmurate.worlds") if hasattr(m, "names")]
