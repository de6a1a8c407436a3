"""Recipes: functions that return a full Run. The only place where an agent meets a strategy.

Each file has an ``ALGORITHM`` and a ``recipe(world_name) -> Run``, and ``WORLDS`` if it is not for all
worlds; these are the recipes ``<world>-<algorithm>`` (both parts may contain hyphens). A new file needs no
registration.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

from murmurate import plugins
from murmurate.errors import Refusal, unknown
from murmurate.training.run import Run
from murmurate.training.run_folder import read_run
from murmurate.worlds.own import lasting, world_name
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
        lines[module.ALGORITHM] = line + _limits(getattr(module, "WORLDS", ()))
    return dict(sorted(lines.items()))


def _limits(worlds: Sequence[str]) -> str:
    if len(worlds) > _FEW:
        return (
            " (worlds with vector actions)"
            if tuple(worlds) == vector_worlds()
            else f" ({len(worlds)} worlds)"
        )
    return f" (world: {', '.join(worlds)})" if worlds else ""


def recipe(name: str) -> Run:
    """The Run called ``<world>-<algorithm>``. Raises Refusal with the nearest name for an unknown one."""
    module = _module_of(name)
    if module is None:
        raise unknown("recipe", name, recipe_names())
    run: Run = module.recipe(lasting(name.removesuffix(f"-{module.ALGORITHM}")))
    return run


def recipe_of(env: str, algorithm: str) -> Run:
    """The Run of an algorithm in an environment of the user's own, named as ``worlds.own.world_name`` reads
    it. Raises Refusal."""
    if algorithm not in algorithms():
        near = difflib.get_close_matches(algorithm, algorithms(), n=1, cutoff=0.5)
        hint = f" Did you mean '{near[0]}'?" if near else ""
        raise Refusal(f"There is no algorithm called '{algorithm}'.{hint} See: murmurate list recipes")
    return recipe(f"{world_name(env)}-{algorithm}")


def stored(folder: Path) -> Run:
    """The Run of a run folder. Raises Refusal if there is none, or its recipe is unknown."""
    return read_run(folder, recipe)


def pairs() -> dict[str, tuple[str, str]]:
    """(world, algorithm) of every recipe for a named world, by the recipe's name, sorted."""
    worlds = world_names()
    combinations = [(world, m.ALGORITHM) for m in _modules() for world in getattr(m, "WORLDS", worlds)]
    return dict(sorted((f"{world}-{algorithm}", (world, algorithm)) for world, algorithm in combinations))


def recipe_names() -> list[str]:
    return list(pairs())


def _module_of(name: str) -> ModuleType | None:
    """The module with the longest algorithm that ``name`` ends with: apex-dqn before dqn."""
    matching = [module for module in _modules() if name.endswith(f"-{module.ALGORITHM}")]
    return max(matching, key=lambda module: len(module.ALGORITHM), default=None)
