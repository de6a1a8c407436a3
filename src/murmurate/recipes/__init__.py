"""Recipes: functions that return a full Run. The only place where an agent meets a strategy.

Each file has an ``ALGORITHM`` and a ``recipe(world_name) -> Run``, and ``WORLDS`` if it is not for all of
them; together they are the recipes ``<world>-<algorithm>``. Nothing else has to know of a new file. Where a
field that the user chose decides another one, ``finished(run) -> Run`` says so.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

from murmurate import plugins
from murmurate.errors import unknown
from murmurate.training.run import Run
from murmurate.worlds.registry import world_names


def _modules() -> tuple[ModuleType, ...]:
    return plugins.modules(__name__)


def algorithms() -> dict[str, Callable[[str], Run]]:
    """Recipe functions by algorithm, found by listing this folder."""
    return {module.ALGORITHM: module.recipe for module in _modules()}


def recipe(name: str) -> Run:
    """The Run called ``<world>-<algorithm>``. Raises Refusal with the nearest name for an unknown one."""
    known = algorithms()
    for algorithm in sorted(known, key=len, reverse=True):
        if name.endswith(f"-{algorithm}"):
            return known[algorithm](name.removesuffix(f"-{algorithm}"))
    raise unknown("recipe", name, recipe_names())


def finished(run: Run) -> Run:
    """``run`` with what follows from fields that were changed since its recipe gave it."""
    for module in _modules():
        if run.recipe.endswith(f"-{module.ALGORITHM}") and hasattr(module, "finished"):
            changed: Run = module.finished(run)
            return changed
    return run


def recipe_names() -> list[str]:
    worlds = world_names()
    return sorted(
        f"{world}-{module.ALGORITHM}" for module in _modules() for world in getattr(module, "WORLDS", worlds)
    )
