"""Finds strategies, agents, worlds, recipes and the like: the modules of their folder, and plug-ins.

A third-party package adds a module to a folder by an entry point in the group of that folder's name
(``murmurate.strategies``, ``.agents``, ``.workloads``, ``.worlds``, ``.datasets``, ``.sources``,
``.evaluation``, ``.recipes``, ``.nets``, ``.launch``; ``.topologies`` for the file ``topology.py``)::

    [project.entry-points."murmurate.strategies"]
    anything = "their_package.their_strategy"

From then on the module counts as one more file of ``murmurate/strategies``. A module that is not installed is
added to all folders by ``add_imports``: by ``--import my_module`` on the command line, or by the variable
MURMURATE_IMPORT, which the processes of a run inherit.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import os
import pkgutil
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from murmurate.errors import Refusal

IMPORTS = "MURMURATE_IMPORT"
_OWN = os.path.dirname(__file__) + os.sep
_STANDARD_LIBRARY = sysconfig.get_path("stdlib")
_added: set[str] = set()  # what ``add_imports`` has been given


@functools.cache
def modules(package: str) -> tuple[ModuleType, ...]:
    """The public modules of ``package`` ("murmurate.strategies", say), then the modules of plug-ins. Raises
    Refusal for a plug-in that cannot be imported."""
    spec = importlib.util.find_spec(package)
    folders = [] if spec is None else spec.submodule_search_locations or []
    names = [m.name for m in pkgutil.iter_modules(folders) if not m.name.startswith("_")]
    imported = [importlib.import_module(f"{package}.{name}") for name in names]
    for entry in importlib.metadata.entry_points(group=package):
        imported.append(_import_entry(entry))
    imported += [module for module in map(_import, imports()) if module not in imported]
    return tuple(imported)


def _import_entry(entry: importlib.metadata.EntryPoint) -> ModuleType:
    """The module of an entry point. Raises Refusal, naming it and its package, if it cannot be imported."""
    try:
        return importlib.import_module(entry.module)
    except (Exception, SystemExit) as error:
        package = "another package" if entry.dist is None else entry.dist.name
        raise Refusal(
            f"{entry.module}, which {package} registers as '{entry.name}' of {entry.group}, cannot be "
            f"imported ({type(error).__name__}: {error}). Correct it, or remove it: pip uninstall {package}"
        ) from error


def refuse_clash(kind: str, name: str, one: Any, other: Any) -> None:
    """Raise Refusal where ``one`` and ``other``, two modules, classes or functions, are both called ``name``.

    kind: what they are, in the plural. What one file defines, though it was imported under two names, is no
    clash.
    """
    if one is other or _place(one) == _place(other):
        return
    raise Refusal(
        f"two {kind} are called '{name}', that of {_written(one)} and that of {_written(other)}: give the "
        "second another name, or do not import it."
    )


def _place(value: Any) -> tuple[Any, str]:
    """The file that defines a module, class or function, and its name there."""
    module = value if isinstance(value, ModuleType) else sys.modules.get(getattr(value, "__module__", ""))
    file = getattr(module, "__file__", None)
    return os.path.realpath(file) if file else value, getattr(value, "__qualname__", "")


def _written(value: Any) -> str:
    if isinstance(value, ModuleType):
        return value.__name__
    return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', repr(value))}"


def classes(package: str, base: type) -> tuple[type, ...]:
    """The subclasses of ``base`` that the ``modules`` of ``package`` define, in the order of modules."""
    subclasses = [
        value
        for module in modules(package)
        for value in vars(module).values()
        if isinstance(value, type) and base in value.__mro__[1:] and value.__module__ == module.__name__
    ]
    return tuple(dict.fromkeys(subclasses))


def imports() -> list[str]:
    """The modules that MURMURATE_IMPORT adds, by name or as FILE.py."""
    return [name for name in os.environ.get(IMPORTS, "").split(os.pathsep) if name]


def inherited_imports() -> list[str]:
    """The modules of MURMURATE_IMPORT that this process was started with, without those that ``add_imports``
    was given too: those are in the command or in the run folder."""
    return [name for name in imports() if name not in _added]


def packages() -> dict[str, str]:
    """The versions of the installed packages that have plug-ins, by name."""
    found: dict[str, str] = {}
    for each in importlib.metadata.distributions():
        if any(entry.group.startswith("murmurate.") for entry in each.entry_points):
            found.setdefault(each.name, each.version)  # of two, Python imports the first
    return found


def add_imports(names: Iterable[str]) -> list[ModuleType]:
    """Add modules, by name or as FILE.py, to all folders, here and in processes that are started later.

    A module is also looked for in the current folder. Raises Refusal if it cannot be imported.
    """
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # at the end, so that it hides no other module
    paths = [os.path.abspath(name) if name.endswith(".py") else name for name in names]
    imported = [_import(path) for path in paths]
    paths = [_absolute_file(path, module) for path, module in zip(paths, imported, strict=True)]
    _added.update(paths)
    os.environ[IMPORTS] = os.pathsep.join(dict.fromkeys([*imports(), *paths]))
    modules.cache_clear()
    return imported


def forget(path: str) -> None:
    """Undo ``add_imports([path])``."""
    gone = (path, os.path.abspath(path))
    _added.difference_update(gone)
    os.environ[IMPORTS] = os.pathsep.join(name for name in imports() if name not in gone)
    modules.cache_clear()


def _absolute_file(name: str, module: ModuleType) -> str:
    """``name``, or the path of a module in the current folder: runs can then be resumed in other folders."""
    file = getattr(module, "__file__", None) or ""
    return file if os.path.dirname(file) == os.getcwd() and file.endswith(".py") else name


def _import(name: str) -> ModuleType:
    is_file = name.endswith(".py")
    module_name = Path(name).stem if is_file else name
    if is_file and (folder := str(Path(name).parent)) not in sys.path:
        # other processes inherit sys.path, and import the classes of a run by the name of their module
        sys.path.append(folder)
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        package = "" if is_file else module_name.partition(".")[0]
        if isinstance(error, ModuleNotFoundError) and error.name in (module_name, package):
            raise Refusal(
                f"{name} cannot be imported (there is no such module). Give --import (or {IMPORTS}) a module "
                "that is installed or in the current folder, or a path that ends in .py."
            ) from error
        raise Refusal(
            f"{name} cannot be imported ({type(error).__name__}: {error}). Correct {_line_of(error)}, or "
            f"leave {name} out of --import and {IMPORTS}."
        ) from error
    source = getattr(module, "__file__", None)
    if is_file and (source is None or not Path(name).exists() or not os.path.samefile(source, name)):
        raise Refusal(f"another module is called {module_name} ({source}): rename the file {name}")
    return module


def _line_of(error: BaseException) -> str:
    """The innermost line outside of libraries where ``error`` was raised: "line 7 of /path/to/file.py"; "it"
    if there is none, and for a SyntaxError, whose text names the line."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not (frame.filename.startswith(_OWN) or is_in_library(frame.filename))
    ]
    if isinstance(error, SyntaxError) or not frames:
        return "it"
    return f"line {frames[-1].lineno} of {frames[-1].filename}"


def is_in_library(filename: str) -> bool:
    """Whether a traceback's file belongs to Python or to an installed package."""
    # by name, as the packages of a user or of another environment may be on the path, too
    installed = {"site-packages", "dist-packages"} & set(Path(filename).parts)
    # the frames of compiled code name its source as it was where it was built: numpy/random/_generator.pyx
    is_python = os.path.isabs(filename) and filename.endswith(".py")
    return bool(installed) or not is_python or filename.startswith(_STANDARD_LIBRARY)


def absolute(name: str) -> str:
    """``FILE.py:FUNCTION`` with an absolute path, so that a run can be resumed anywhere; else ``name``."""
    file, _, function = name.rpartition(":")
    return f"{os.path.abspath(file)}:{function}" if file.endswith(".py") else name


def resumable_name(name: str) -> str:
    """As ``absolute``; also turns ``module:NAME`` of a file in the working folder into ``FILE.py:NAME``."""
    module, _, path = name.rpartition(":")
    file = os.path.abspath(f"{module}.py")
    return f"{file}:{path}" if module.isidentifier() and os.path.isfile(file) else absolute(name)


def load_callable(name: str, kind: str, option: str) -> Callable[..., Any]:
    """The class or function that ``name`` (``FILE.py:NAME`` or ``module:NAME``) refers to; the module may
    also be in the working folder. kind, option: see ``function_in_file``.

    Raises ``ValueError`` if there is none, or if its module raises; a Refusal of the module is passed on.
    """
    source, _, path = name.rpartition(":")
    if source.endswith(".py"):
        return function_in_file(name, kind, option)
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        target: Any = importlib.import_module(source)
    except ImportError as problem:
        raise ValueError(
            f"the module '{source}' of the {kind} {name} cannot be imported ({problem}): install it, or put "
            "its folder on PYTHONPATH"
        ) from problem
    except Refusal:
        raise
    except (Exception, SystemExit) as problem:
        raise ValueError(
            f"the module '{source}' of the {kind} {name} raised {type(problem).__name__}: {problem}. Correct "
            f"{_line_of(problem)}."
        ) from problem
    for attribute in path.split("."):
        target = getattr(target, attribute, None)
    if not callable(target):
        raise ValueError(f"there is no class or function '{path}' in the module {source}")
    function: Callable[..., Any] = target
    return function


def call_named(name: str, kind: str, option: str, *arguments: Any) -> Any:
    """The result of calling the class or function ``name`` (see ``load_callable``) with ``arguments``.

    Raises ``ValueError`` if there is no such callable, or if the call raises any exception.
    """
    make = load_callable(name, kind, option)
    try:
        return make(*arguments)
    except ValueError:
        raise
    except (Exception, SystemExit) as problem:
        raise ValueError(f"the {kind} {name} raised {type(problem).__name__}: {problem}") from problem


def function_in_file(name: str, kind: str, option: str) -> Callable[..., Any]:
    """The class or function that ``name`` (``FILE.py:NAME``) refers to.

    kind, option: what the function is, and the option that names it, for the message of the ``ValueError``
    that is raised if there is none, or if the file raises; a Refusal of the file is passed on.
    """
    file, _, function = name.rpartition(":")
    spec = importlib.util.spec_from_file_location(f"murmurate_file_{Path(file).stem}", file)
    if spec is None or spec.loader is None or not Path(file).is_file():
        raise ValueError(f"there is no file {file} with a {kind}: use {option} FILE.py:FUNCTION")
    if (folder := os.path.dirname(os.path.abspath(file))) not in sys.path:
        sys.path.append(folder)  # the file may import other files beside it
    # dataclasses look for their module in ``sys.modules``
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Refusal:
        raise
    except (Exception, SystemExit) as problem:
        raise ValueError(
            f"the file {file} of the {kind} {function} raised {type(problem).__name__}: {problem}. Correct "
            f"{_line_of(problem)}."
        ) from problem
    target: Callable[..., Any] | None = getattr(module, function, None)
    if not callable(target):
        raise ValueError(f"there is no class or function '{function}' in {file}")
    return target
