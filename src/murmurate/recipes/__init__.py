"""Recipes: functions that return a full Run. The only place where an agent meets a strategy.

Each file has an ``ALGORITHM`` and a ``recipe(world_name) -> Run``. If it is not for all worlds, it also has
``WORLDS``, or ``ACTIONS``: ``discrete`` or ``vector``. These are the recipes ``<world>-<algorithm>`` (both
parts may contain hyphens). A new file needs no registration.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

from murmurate import plugins
from murmurate.errors import unknown
from murmurate.training.run import Run
from murmurate.training.run_folder import read_run
from murmurate.worlds.registry import vector_worlds, world_names

_FEW = 4


def _modules() -> tuple[ModuleType, ...]:
    return plugins.modules(__name__)


def algorithms() -> dict[str, Callable[[str], Run]]:
    """Recipe functions by algorithm."""
    return {module.ALGORITHM: module.recipe for module in _modules()}


def summaries() -> dict[str, str]:
    """A line about each algorithm, from its module's docstring, and its worlds where it is not for all."""
    lines = {}
    for module in _modules():
        line = (module.__doc__ or "").strip().splitlines()[0].partition(": ")[2].rstrip(".")
        lines[module.ALGORITHM] = line + _limits(module)
    return dict(sorted(lines.items()))


def _limits(module: ModuleType) -> str:
    worlds = getattr(module, "WORLDS", ())
    if len(worlds) > _FEW:
        return f" ({len(worlds)} worlds)"
    if worlds:
        return f" (world: {', '.join(worlds)})"
    return f" ({module.ACTIONS} actions)" if hasattr(module, "ACTIONS") else ""


def _worlds_of(module: ModuleType) -> Sequence[str]:
    """The named worlds that an algorithm can be trained on."""
    if hasattr(module, "WORLDS"):
        return tuple(module.WORLDS)
    vectors = frozenset(vector_worlds())
    kinds = {"vector": (True,), "discrete": (False,)}.get(getattr(module, "ACTIONS", ""), (True, False))
    return [name for name in world_names() if (name in vectors) in kinds]


def recipe(name: str) -> Run:
    """The Run called ``<world>-<algorithm>``. Raises Refusal with the nearest name for an unknown one."""
    module = _module_of(name)
    if module is None:
        raise unknown("recipe", name, recipe_names())
    run: Run = module.recipe(name.removesuffix(f"-{module.ALGORITHM}"))
    return run


def stored(folder: Path) -> Run:
    """The Run of a run folder. Raises Refusal if there is none, or its recipe is unknown."""
    return read_run(folder, recipe)


def pairs() -> dict[str, tuple[str, str]]:
    """(world, algorithm) of every recipe for a named world, by the recipe's name, sorted."""
    combinations = [(world, m.ALGORITHM) for m in _modules() for world in _worlds_of(m)]
    return dict(sorted((f"{world}-{algorithm}", (world, algorithm)) for world, algorithm in combinations))


def recipe_names() -> list[str]:
    return list(pairs())


def _module_of(name: str) -> ModuleType | None:
    """The module with the longest algorithm that ``name`` ends with: apex-dqn before dqn."""
    matching = [module for module in _modules() if name.endswith(f"-{module.ALGORITHM}")]
    return max(matching, key=lambda module: len(module.ALGORITHM), default=None)
