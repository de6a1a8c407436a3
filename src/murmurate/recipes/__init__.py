"""Recipes: functions that return a full Run. The only place where an agent meets a strategy.

Each file defines the name ``ALGORITHM`` and a function ``recipe(world_name) -> Run``; its recipes are called
``<world>-<algorithm>`` (both parts may contain hyphens). A file whose recipe is not for all worlds also
defines ``WORLDS``, their names, or ``ACTIONS``, ``discrete`` or ``vector``. A new file needs no registration.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

from murmurate import plugins
from murmurate.errors import Refusal, did_you_mean, unknown
from murmurate.training.run import Run
from murmurate.training.run_folder import read_run
from murmurate.worlds import own
from murmurate.worlds.own import absolute_name, world_name
from murmurate.worlds.registry import vector_worlds, world_names

_MOST_LISTED = 4  # at most so many worlds of an algorithm are listed by name; more are counted


def _modules() -> tuple[ModuleType, ...]:
    """The modules with a recipe. Raises Refusal where two have one ``ALGORITHM``."""
    found: dict[str, ModuleType] = {}
    for module in _all_modules():
        plugins.refuse_clash("recipes", module.ALGORITHM, found.setdefault(module.ALGORITHM, module), module)
    return tuple(found.values())


def _all_modules() -> tuple[ModuleType, ...]:
    return tuple(module for module in plugins.modules(__name__) if hasattr(module, "ALGORITHM"))


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
    """The worlds that the algorithm is limited to, in brackets; empty if it is for all."""
    worlds = getattr(module, "WORLDS", ())
    if len(worlds) > _MOST_LISTED:
        return f" ({len(worlds)} worlds)"
    if worlds:
        return f" (world: {', '.join(worlds)})"
    return f" ({module.ACTIONS} actions)" if hasattr(module, "ACTIONS") else ""


def _worlds_of(module: ModuleType, named: Sequence[str], vectors: frozenset[str]) -> Sequence[str]:
    """The named worlds that an algorithm can be trained on. named: all; vectors: those whose actions are
    vectors."""
    if hasattr(module, "WORLDS"):
        return tuple(module.WORLDS)
    actions = getattr(module, "ACTIONS", "")
    if actions == "vector":
        return [name for name in named if name in vectors]
    return [name for name in named if name not in vectors] if actions == "discrete" else named


def recipe(name: str) -> Run:
    """The Run of the recipe ``<world>-<algorithm>``, or of a file's recipe, ``FILE.py`` or
    ``FILE.py:<world>``. The file is added to the modules with recipes.

    Raises Refusal for an unknown name, with the nearest name, and for a file without a recipe.
    """
    file, has_world, world = name.partition(".py:")
    if not name.startswith("env:"):  # after "env:" the file is that of a world
        if has_world:
            name = _name_in_file(f"{file}.py", world)
        elif name.endswith(".py"):
            name = _name_in_file(name, "")
    module = _module_of(name)
    if module is None:
        import gymnasium  # takes long

        if name in gymnasium.registry:
            raise Refusal(f"{name} is an environment of Gymnasium. Use --env {name} --algorithm ppo")
        raise unknown("recipe", name, recipe_names())
    run: Run = module.recipe(absolute_name(name.removesuffix(f"-{module.ALGORITHM}")))
    return run


def recipe_of(env: str, algorithm: str) -> Run:
    """The Run of an algorithm in an environment of the user's own, named as ``worlds.own.world_name`` reads
    it. Raises Refusal."""
    check_algorithm(algorithm)
    return recipe(f"{world_name(env)}-{algorithm}")


def check_algorithm(name: str) -> None:
    """Raise Refusal, with the nearest name, if no recipes are of an algorithm of that name."""
    if name not in algorithms():
        hint = did_you_mean(str(name), algorithms())
        raise Refusal(f"There is no algorithm called '{name}'.{hint} See: murmurate list recipes")


def stored(folder: Path) -> Run:
    """The Run of a run folder. Raises Refusal if there is none, or its recipe is unknown."""
    return read_run(folder, recipe)


def relocated(run: Run, replacement: own.OwnWorld | None) -> Run:
    """``run`` with the environments of ``replacement`` (of ``replaced_by``), where those that it names are
    gone; None changes nothing."""
    if replacement is None:
        return run
    world = own.relocated(run.world, replacement)
    return dataclasses.replace(run, world=world, recipe=run.recipe.replace(run.world.name, world.name, 1))


def pairs() -> dict[str, tuple[str, str]]:
    """(world, algorithm) of every recipe for a named world, by the recipe's name, sorted."""
    named, vectors = world_names(), frozenset(vector_worlds())
    combinations = [(world, m.ALGORITHM) for m in _modules() for world in _worlds_of(m, named, vectors)]
    return dict(sorted((f"{world}-{algorithm}", (world, algorithm)) for world, algorithm in combinations))


def recipe_names() -> list[str]:
    return list(pairs())


def _name_in_file(file: str, world: str) -> str:
    """The name of the file's recipe on ``world``, or, if that is empty, on the first of its ``WORLDS``."""
    if not Path(file).is_file():
        raise Refusal(
            f"there is no file {file} with a recipe. Check the path; or see: murmurate list recipes"
        )
    (module,) = plugins.add_imports([file])
    if not hasattr(module, "ALGORITHM") or not callable(getattr(module, "recipe", None)):
        raise Refusal(
            f"{file} holds no recipe: it needs ALGORITHM = 'a name' and a function recipe(world_name) -> Run."
        )
    twins = [m for m in _all_modules() if m.ALGORITHM == module.ALGORITHM and m is not module]
    if twins:
        plugins.forget(file)
        raise Refusal(
            f"ALGORITHM in {file} is '{module.ALGORITHM}', as in {twins[0].__name__}: choose another name."
        )
    worlds = list(getattr(module, "WORLDS", ()))
    if not world and not worlds:
        raise Refusal(f"{file} names no WORLDS: say on which it shall run, as in {file}:cartpole")
    return f"{world or worlds[0]}-{module.ALGORITHM}"


def _module_of(name: str) -> ModuleType | None:
    """The module whose algorithm ``name`` ends with; the longest, if several do: apex-dqn before dqn."""
    matching = [module for module in _modules() if name.endswith(f"-{module.ALGORITHM}")]
    return max(matching, key=lambda module: len(module.ALGORITHM), default=None)
