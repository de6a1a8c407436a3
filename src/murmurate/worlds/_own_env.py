"""Environments made by a user's own class or function.

Imports no torch, so that the game server (``_game_server.py``) can use it.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
from gymnasium.wrappers import TimeLimit

from murmurate.errors import Refusal
from murmurate.worlds import modules
from murmurate.worlds._gym_env import without_checks

PREFIX = "env:"
UNNAMED = "unnamed:"
# target -> (callable of this process, folder of its module)
_callables: dict[str, tuple[Callable[..., Any], str]] = {}
_NOTHING_RETURNED = " Does the function return the environment that it makes?"
_VECTOR_ADVICE = " To make several at once, let it take their number: def {0}(num_envs)."


def target_of(function: Callable[..., Any]) -> tuple[str, str]:
    """(target, folder): the target names ``function`` in any process; the folder is that of its module, empty
    if the module is installed.

    The target is ``FILE.py:NAME`` or ``module:NAME``; or, for a lambda, a nested function or another callable
    that is not found by its name, ``unnamed:...``, which is known in this process only.
    """
    path, module_name = getattr(function, "__qualname__", ""), getattr(function, "__module__", "") or ""
    module = sys.modules.get(module_name)
    target = folder = ""
    # equal, and not the same: a class method is another object each time
    if path and module is not None and modules.attribute_at(module, path) == function:
        file, spec = getattr(module, "__file__", None) or "", getattr(module, "__spec__", None)
        if module_name == "__main__" and spec is not None:  # started by python -m
            module_name = spec.name
            target, folder = f"{module_name}:{path}", modules.folder_of(module_name, module)
        elif module_name == "__main__" or module_name.startswith(modules.FILE):
            target = f"{os.path.abspath(file)}:{path}" if file.endswith(".py") else ""
        else:
            target, folder = f"{module_name}:{path}", modules.folder_of(module_name, module)
    if not target:
        target = f"{UNNAMED}{path or type(function).__name__}"
        number = 1
        while _callables.get(target, (function, ""))[0] is not function:
            number += 1
            target = f"{target.partition('#')[0]}#{number}"
    _callables[target] = function, folder
    return target, folder


def provide(target: str, function: Callable[..., Any]) -> None:
    """Let ``target`` mean ``function`` in this process, whatever it meant where the target was recorded."""
    _callables[target] = function, ""


@contextlib.contextmanager
def restored() -> Iterator[None]:
    """After this context, every target means what it meant before."""
    before = dict(_callables)
    try:
        yield
    finally:
        _callables.clear()
        _callables.update(before)


def find_callable(target: str, folder: str, name: str) -> tuple[Callable[..., Any], str]:
    """(the class or function called ``target``, the folder of its module: see ``modules.import_module``).

    name: name of the world, for the message of the ``Refusal`` if there is no such class or function.
    """
    modules.import_triton()
    if target in _callables:
        return _callables[target]
    purpose = f"The world {name}"
    if target.startswith(UNNAMED):
        raise Refusal(
            f"{purpose} was made by a lambda, a nested function or an object, which only the process that "
            "began the run can call. Pass one that makes the same: murmurate.load(folder, env=...). Train "
            "with a function at the top level of a module, and it is found by its name."
        )
    source, _, path = target.rpartition(":")
    if source.endswith(".py"):
        if (function := _imported(source, path)) is not None:
            return function, ""
        return modules.attribute(modules.load_file(source, purpose), path, purpose), ""
    module, folder = modules.import_module(source, folder, purpose)
    return modules.attribute(module, path, purpose), folder


def has_parameter(function: Callable[..., Any], name: str) -> bool:
    """Whether ``function`` has a parameter ``name``."""
    try:
        return name in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False


def takes(function: Callable[..., Any], name: str) -> bool:
    """Whether ``function`` can be given ``name=``: it has that parameter, or takes any (``**kwargs``), as
    ``functools.partial(gymnasium.make, ...)`` does.

    For ``num_envs``, by which the kind of the environment is told, see ``has_parameter``.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    return any(each.name == name or each.kind is each.VAR_KEYWORD for each in parameters)


def make(
    target: str,
    folder: str,
    name: str,
    max_episode_steps: int | None = None,
    picture: bool = False,
    training: bool = True,
) -> Any:
    """The environment as the user made it, with a time limit around it if one is given.

    picture, training: see ``call``.

    Raises ``Refusal`` if it cannot be made or is not a ``gymnasium.Env``.
    """
    function, _ = find_callable(target, folder, name)
    env = call(function, name, picture, training)
    if not isinstance(env, gymnasium.Env):
        function_name = getattr(function, "__name__", "make_env")
        raise Refusal(
            f"The world {name} is of type {type(env).__name__}, and it must be a gymnasium.Env."
            + (_NOTHING_RETURNED if env is None else "")
            + (_VECTOR_ADVICE.format(function_name) if isinstance(env, gymnasium.vector.VectorEnv) else "")
        )
    for attribute in ("observation_space", "action_space"):
        if not isinstance(getattr(env, attribute, None), gymnasium.Space):
            raise Refusal(
                f"The world {name} has no {attribute}: set it in its class or its __init__, to a space of "
                "gymnasium.spaces."
            )
    if picture and env.render_mode != "rgb_array":
        raise Refusal(
            f"{name} has no pictures: its function must take render_mode (or **kwargs), which is then "
            "'rgb_array', and pass it on to the environment."
        )
    return env if max_episode_steps is None else TimeLimit(env, max_episode_steps)


def call(
    function: Callable[..., Any], name: str, picture: bool, training: bool = True, **arguments: Any
) -> Any:
    """What ``function(**arguments)`` returns; with ``picture`` it also gets ``render_mode``, if it takes
    that, and ``training`` if it has that parameter. Raises ``Refusal`` if the function raises."""
    if has_parameter(function, "training"):  # with **kwargs, it might not know what to do with it
        arguments["training"] = training
    if picture and takes(function, "render_mode"):
        modules.draw_without_screen()
        arguments["render_mode"] = "rgb_array"
    try:
        return function(**arguments)
    except Refusal:
        raise
    except (Exception, SystemExit) as problem:
        raise Refusal(
            f"The world {name} cannot be made: its function raised {type(problem).__name__}: {problem}. It "
            "is called without arguments, except for num_envs, training and render_mode where it takes these."
        ) from problem


def make_without_checks(**options: Any) -> tuple[Any, int]:
    """(what ``make`` returns, without gymnasium's checks and time limits; its time limit): see
    ``without_checks``."""
    return without_checks(make(**options))


def _imported(file: str, path: str) -> Callable[..., Any] | None:
    """The callable at ``path`` of a module that this process has imported from ``file``, which need not be
    executed again; None if there is none. What ``modules.load_file`` loaded is its own to find."""
    for name, module in list(sys.modules.items()):
        if getattr(module, "__dict__", {}).get("__file__") == file and not name.startswith(modules.FILE):
            function = modules.attribute_at(module, path)
            return function if callable(function) else None
    return None
