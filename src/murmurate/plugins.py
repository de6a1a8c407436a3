"""Finds strategies, agents, worlds, recipes and the like: by listing their folder, and by entry points.

A package of somebody else joins a folder by naming a module of its own under an entry-point group of that
folder's name::

    [project.entry-points."murmurate.strategies"]
    anything = "their_package.their_strategy"

From then on the module counts as one more file of ``murmurate/strategies``.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import os
import pkgutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any


@functools.cache
def modules(package: str) -> tuple[ModuleType, ...]:
    """The public modules of ``package`` ("murmurate.strategies", say), then those that joined it."""
    spec = importlib.util.find_spec(package)
    places = [] if spec is None else spec.submodule_search_locations or []
    own = [m.name for m in pkgutil.iter_modules(places) if not m.name.startswith("_")]
    found = [importlib.import_module(f"{package}.{name}") for name in own]
    for entry in importlib.metadata.entry_points(group=package):
        found.append(importlib.import_module(entry.module))
    return tuple(found)


def absolute(name: str) -> str:
    """``FILE.py:FUNCTION`` with an absolute path, so that a run can be resumed from other folders; any other
    name as it is."""
    file, _, function = name.rpartition(":")
    return f"{os.path.abspath(file)}:{function}" if file.endswith(".py") else name


def lasting(name: str) -> str:
    """``FILE.py:NAME`` with an absolute path; so is ``module:NAME`` of a file in the working folder."""
    module, _, path = name.rpartition(":")
    file = os.path.abspath(f"{module}.py")
    return f"{file}:{path}" if module.isidentifier() and os.path.isfile(file) else absolute(name)


def named(name: str, kind: str, option: str) -> Callable[..., Any]:
    """The class or function called ``FILE.py:NAME`` or ``module:NAME``; a module may also be in the working
    folder. kind, option: see ``function_in_file``.

    Raises ``ValueError`` where there is none.
    """
    source, _, path = name.rpartition(":")
    if source.endswith(".py"):
        return function_in_file(name, kind, option)
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        found: Any = importlib.import_module(source)
    except ImportError as problem:
        raise ValueError(
            f"the module '{source}' of the {kind} {name} cannot be imported ({problem}): install it, or put "
            "its folder on PYTHONPATH"
        ) from problem
    for part in path.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        raise ValueError(f"there is no class or function '{path}' in the module {source}")
    called: Callable[..., Any] = found
    return called


def made(name: str, kind: str, option: str, *arguments: Any) -> Any:
    """What the class or function called ``name`` (see ``named``) makes of ``arguments``.

    Raises ``ValueError`` if it is not there, or raises anything but that.
    """
    make = named(name, kind, option)
    try:
        return make(*arguments)
    except ValueError:
        raise
    except Exception as problem:
        raise ValueError(f"the {kind} {name} raised {type(problem).__name__}: {problem}") from problem


def function_in_file(name: str, kind: str, option: str) -> Callable[..., Any]:
    """The function called ``FILE.py:FUNCTION``.

    kind, option: what it is and where it is named, for the ``ValueError`` where there is no such function.
    """
    file, _, function = name.rpartition(":")
    spec = importlib.util.spec_from_file_location(f"murmurate_file_{Path(file).stem}", file)
    if spec is None or spec.loader is None or not Path(file).is_file():
        raise ValueError(f"there is no file {file} with a {kind}: use {option} FILE.py:FUNCTION")
    if (folder := os.path.dirname(os.path.abspath(file))) not in sys.path:
        sys.path.append(folder)  # it may import its neighbours
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # where dataclasses look for it
    spec.loader.exec_module(module)
    found: Callable[..., Any] | None = getattr(module, function, None)
    if not callable(found):
        raise ValueError(f"there is no class or function '{function}' in {file}")
    return found
