"""Environments made by a user's own class or function.

Imports no torch, so that the game server (``_game_server.py``) can use it.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable
from typing import Any

import gymnasium
from gymnasium.wrappers import TimeLimit

from murmurate import plugins
from murmurate.errors import MissingExtra, Refusal
from murmurate.worlds import modules
from murmurate.worlds._gym_env import without_checks

PREFIX = "env:"
UNNAMED = "unnamed:"
# target -> (callable of this process, folder of its module)
_here: dict[str, tuple[Callable[..., Any], str]] = {}
_VECTOR_ADVICE = "To make several at once, let it take their number: def {0}(num_envs)."


def named(function: Callable[..., Any]) -> tuple[str, str]:
    """(target, folder): the target names ``function`` in any process; the folder is that of its module, empty
    if the module is installed.

    The target is ``FILE.py:NAME`` or ``module:NAME``; or, for a lambda, a nested function or the like,
    ``unnamed:...``, which is known in this process only.
    """
    path, module = getattr(function, "__qualname__", ""), getattr(function, "__module__", "") or ""
    source = sys.modules.get(module)
    target = folder = ""
    if path and "<" not in path and source is not None:
        file, spec = getattr(source, "__file__", None) or "", getattr(source, "__spec__", None)
        if module == "__main__" and spec is not None:  # started by python -m
            module = spec.name
            target, folder = f"{module}:{path}", modules.folder_of(module, source)
        elif module == "__main__" or module.startswith(modules.FILE):
            target = f"{os.path.abspath(file)}:{path}" if file.endswith(".py") else ""
        elif _attribute(source, path) is function:
            target, folder = f"{module}:{path}", modules.folder_of(module, source)
    if not target:
        target = f"{UNNAMED}{path or type(function).__name__}"
        number = 1
        while _here.get(target, (function, ""))[0] is not function:
            number += 1
            target = f"{target.partition('#')[0]}#{number}"
    _here[target] = function, folder
    return target, folder


def absolute(target: str) -> str:
    return plugins.absolute(target)


def provide(target: str, function: Callable[..., Any]) -> None:
    """Let ``target`` mean ``function`` in this process, whatever it meant where the target was recorded."""
    _here[target] = function, ""


def found(target: str, folder: str, name: str) -> tuple[Callable[..., Any], str]:
    """(the class or function called ``target``, the folder of its module: see ``modules.import_module``).

    name: name of the world, for the message of the ``Refusal`` if there is no such class or function.
    """
    modules.import_triton()
    if target in _here:
        return _here[target]
    purpose = f"The world {name}"
    if target.startswith(UNNAMED):
        raise Refusal(
            f"{purpose} was made by a lambda, a nested function or an object, which only the process that "
            "began the run can call. Pass one that makes the same: murmurate.load(folder, env=...). Train "
            "with a function at the top level of a module, and it is found by its name."
        )
    source, _, path = target.rpartition(":")
    if source.endswith(".py"):
        return modules.attribute(modules.load_file(source, purpose), path, purpose), ""
    module, folder = modules.import_module(source, folder, purpose)
    return modules.attribute(module, path, purpose), folder


def takes(function: Callable[..., Any], name: str) -> bool:
    """Whether ``function`` has a parameter ``name``."""
    try:
        return name in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False


def make(
    target: str,
    folder: str,
    name: str,
    max_episode_steps: int | None = None,
    picture: bool = False,
) -> Any:
    """The environment as the user made it, with a time limit around it if one is given.

    Raises ``Refusal`` if it cannot be made or is not a ``gymnasium.Env``.
    """
    function, _ = found(target, folder, name)
    made = called(function, name, picture)
    if not isinstance(made, gymnasium.Env):
        called_name = getattr(function, "__name__", "make_env")
        raise Refusal(
            f"The world {name} is a {type(made).__name__}, and it must be a gymnasium.Env. "
            + (_VECTOR_ADVICE.format(called_name) if isinstance(made, gymnasium.vector.VectorEnv) else "")
        )
    if picture and made.render_mode != "rgb_array":
        raise Refusal(
            f"{name} has no pictures: its function must take render_mode, which is then 'rgb_array', and "
            "pass it on to the environment."
        )
    return made if max_episode_steps is None else TimeLimit(made, max_episode_steps)


def called(function: Callable[..., Any], name: str, picture: bool, **arguments: Any) -> Any:
    """What ``function(**arguments)`` returns; with ``picture`` it also gets ``render_mode``, if it takes
    that."""
    if picture and takes(function, "render_mode"):
        modules.draw_without_screen()
        arguments["render_mode"] = "rgb_array"
    try:
        return function(**arguments)
    except (Refusal, MissingExtra):
        raise
    except Exception as problem:
        raise Refusal(
            f"The world {name} cannot be made: its function raised {type(problem).__name__}: {problem}. It "
            "is called without arguments, except for num_envs and render_mode where it takes these."
        ) from problem


def make_limited(**options: Any) -> tuple[Any, int]:
    """What ``make`` returns, freed of gymnasium's checks: see ``without_checks``."""
    return without_checks(make(**options))


def _attribute(module: Any, path: str) -> Any:
    for name in path.split("."):
        module = getattr(module, name, None)
    return module
