"""Recipes: functions that return a full Run. The only place where an agent meets a strategy.

Each file has an ``ALGORITHM`` and a ``recipe(world_name) -> Run``, and ``WORLDS`` if it is not for all of
them; together they are the recipes ``<world>-<algorithm>`` (either may have hyphens of its own). Nothing else
has to know of a new file.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from murmurate import plugins
from murmurate.errors import unknown
from murmurate.training.run import Run
from murmurate.training.run_folder import read_run
from murmurate.worlds.registry import world_names


def _modules() -> tuple[ModuleType, ...]:
    return plugins.modules(__name__)


def algorithms() -> dict[str, Callable[[str], Run]]:
    """Recipe functions by algorithm, found by listing this folder."""
    return {module.ALGORITHM: module.recipe for module in _modules()}


def summaries() -> dict[str, str]:
    """A line about each algorithm, from its module's docstring, and its worlds where it is not for all."""
    found = {}
    for module in _modules():
        line = (module.__doc__ or "").strip().splitlines()[0].partition(": ")[2].rstrip(".")
        only = f" (world: {', '.join(module.WORLDS)})" if hasattr(module, "WORLDS") else ""
        found[module.ALGORITHM] = line + only
    return dict(sorted(found.items()))


def recipe(name: str) -> Run:
    """The Run called ``<world>-<algorithm>``. Raises Refusal with the nearest name for an unknown one."""
    module = _module_of(name)
    if module is None:
        raise unknown("recipe", name, recipe_names())
    run: Run = module.recipe(name.removesuffix(f"-{module.ALGORITHM}"))
    return run


def stored(folder: Path) -> Run:
    """The Run of a run folder. Raises Refusal if there is none, or its recipe is not known here."""
    return read_run(folder, recipe)


def pairs() -> dict[str, tuple[str, str]]:
    """(world, algorithm) of every recipe of a world that has a name, by the recipe's, sorted."""
    worlds = world_names()
    found = [(world, m.ALGORITHM) for m in _modules() for world in getattr(m, "WORLDS", worlds)]
    return dict(sorted((f"{world}-{algorithm}", (world, algorithm)) for world, algorithm in found))


def recipe_names() -> list[str]:
    return list(pairs())


def _module_of(name: str) -> ModuleType | None:
    """The one with the longest algorithm that ``name`` ends with: apex-dqn before dqn."""
    fit = [module for module in _modules() if name.endswith(f"-{module.ALGORITHM}")]
    return max(fit, key=lambda module: len(module.ALGORITHM), default=None)
