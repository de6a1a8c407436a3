"""Imports a user's own modules, also from the working folder, and also when a run is later read in another
working folder.

Imports no torch, so that the game server (``_game_server.py``) can use it.
"""

from __future__ import annotations

import ast
import contextlib
import filecmp
import functools
import importlib
import importlib.util
import os
import site
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from murmurate.errors import Refusal, did_you_mean

FILE = "murmurate_file_"  # prefix of the names of modules that are loaded from files
_loading: list[str] = []  # files and modules that are being executed, the innermost last
_searched: list[str] = []  # folders of the enclosing ``search`` contexts


def import_triton() -> None:
    """Import Triton, if it is installed and torch is imported. Must be called before an environment is made.

    An environment that draws by software loads Mesa, which contains another version of LLVM than Triton. If
    Triton is imported after Mesa, as torch's compiler would do, the process crashes.
    """
    if "torch" in sys.modules:
        with contextlib.suppress(ImportError):
            importlib.import_module("triton")


@contextlib.contextmanager
def search(folder: object) -> Iterator[None]:
    """Within this context, modules are also looked for in ``folder``, which a run folder has recorded;
    anything that is no folder here is ignored."""
    if not isinstance(folder, str) or not os.path.isdir(folder):
        yield
        return
    _searched.append(folder)
    try:
        yield
    finally:
        _searched.pop()


def import_module(name: str, folder: str, purpose: str) -> tuple[ModuleType, str]:
    """(the module called ``name``, the folder where it was found; "" where it is installed).

    It is looked for where Python looks, then in ``folder``, in the folders of ``search``, and in the working
    folder; folders that were tried stay on ``sys.path``. purpose: what needs the module, for the message of
    the ``Refusal`` if it cannot be imported, or if ``folder`` or one of ``search`` has another of that name.
    """
    missing: ModuleNotFoundError | None = None
    for place in ("", folder, *_searched, os.getcwd()):
        if place and place not in sys.path:
            sys.path.append(place)
            importlib.invalidate_caches()
        _loading.append(name)
        try:
            module = importlib.import_module(name)
        except Refusal:
            raise
        except ModuleNotFoundError as problem:
            if problem.name and (name == problem.name or name.startswith(f"{problem.name}.")):
                missing = problem
                continue
            raise _unusable(name, purpose, problem) from problem
        except (Exception, SystemExit) as problem:
            raise _unusable(name, purpose, problem) from problem
        finally:
            _loading.pop()
        for place in (folder, *_searched):
            _refuse_another(name, module, place, purpose)
        return module, folder_of(name, module)
    raise Refusal(
        f"{purpose} needs the module '{name}', which cannot be imported ({missing}). Install it, or put its "
        "folder on PYTHONPATH, as in: PYTHONPATH=. murmurate train ..."
    ) from missing


def draw_without_screen() -> None:
    """Where there is no screen, let SDL, with which gymnasium draws, look for none: it would complain on
    stderr."""
    if not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")


def load_file(file: str, purpose: str) -> ModuleType:
    """The module in ``file``, executed once, and again after it has changed; its folder is added to
    ``sys.path``, so that it can import the modules beside it.

    Raises ``Refusal`` if there is no such file, if Python cannot load it, if it raises, or if it imports a
    module that lies beside it and gets one of another folder.
    """
    if not os.path.isfile(file):
        raise Refusal(
            f"{purpose} needs the file {file}, which is not there. Check the path, or put it back. A run "
            "that was made with it takes another environment: --env of murmurate resume, eval, report and "
            "export, or env of murmurate.load and murmurate.resume."
        )
    return _execute(os.path.abspath(file), os.stat(file).st_mtime_ns, purpose)


@functools.lru_cache(maxsize=64)
def _execute(file: str, mtime_ns: int, purpose: str) -> ModuleType:
    """The module in ``file``. mtime_ns: time of its last change, for the cache: a changed file is executed
    again."""
    name = FILE + Path(file).stem
    while getattr(sys.modules.get(name), "__file__", file) != file:  # a file of that name elsewhere has it
        name += "_"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise Refusal(f"{purpose} needs the file {file}, which Python cannot load. Give it the ending .py.")
    if (folder := os.path.dirname(file)) not in sys.path:
        sys.path.append(folder)
    # in sys.modules, because dataclasses look up their module there
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    _loading.append(file)
    try:
        spec.loader.exec_module(module)
    except Refusal:
        raise
    except (Exception, SystemExit) as problem:
        raise Refusal(
            f"{purpose} needs the file {file}, which raised {type(problem).__name__}: {problem}. Mend it."
        ) from problem
    finally:
        _loading.pop()
    for imported in _imports(Path(file)):
        if imported in sys.modules:
            _refuse_another(imported, sys.modules[imported], folder, purpose)
    return module


def _imports(file: Path) -> set[str]:
    """The names of the modules that ``file`` imports, without relative ones."""
    names = set()
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module)
    return names


def _refuse_another(name: str, module: ModuleType, folder: str, purpose: str) -> None:
    """Raise ``Refusal`` if ``folder`` has another file for the module ``name`` than ``module``, which is not
    installed: a process can have one of that name alone. A copy is no other."""
    file = getattr(module, "__file__", None) or ""
    depth = name.count(".") + 1 + (os.path.basename(file) == "__init__.py")
    there = os.path.join(folder, *Path(file).parts[-depth:])
    if not (folder and folder_of(name, module) and os.path.isfile(file) and os.path.isfile(there)):
        return
    if not filecmp.cmp(file, there, shallow=False):
        raise Refusal(
            f"{purpose} needs the module {there}, and this process has imported {file} under the same name. "
            "Use a process for each, with its folder first on PYTHONPATH, or rename one of the two."
        )


def being_loaded() -> str:
    """The file or module that ``load_file`` or ``import_module`` is executing at present; "" for none."""
    return _loading[-1] if _loading else ""


def attribute(module: ModuleType, path: str, purpose: str) -> Callable[..., Any]:
    """The callable at ``path`` ("make_env", "Outer.Inner") in ``module``. Raises ``Refusal`` if there is
    none."""
    value = attribute_at(module, path)
    if not callable(value):
        place = getattr(module, "__file__", None) or module.__name__
        known = [name for name, each in vars(module).items() if callable(each)]
        raise Refusal(
            f"{purpose} needs the class or function '{path}', and there is none in {place}."
            f"{did_you_mean(path, known)}"
        )
    function: Callable[..., Any] = value
    return function


def attribute_at(module: Any, path: str) -> Any:
    """None where there is none."""
    for name in path.split("."):
        module = getattr(module, name, None)
    return module


def folder_of(name: str, module: ModuleType) -> str:
    """The folder that must be on ``sys.path`` to import ``module``; "" if the module is installed."""
    file = getattr(module, "__file__", None)
    if file is None:
        return ""
    is_package = os.path.basename(file) == "__init__.py"
    folder = Path(os.path.abspath(file)).parents[name.count(".") + is_package]
    is_installed = folder.name in ("site-packages", "dist-packages") or str(folder) in _install_folders()
    return "" if is_installed else str(folder)


@functools.cache
def _install_folders() -> frozenset[str]:
    folders = [*sysconfig.get_paths().values(), *site.getsitepackages(), site.getusersitepackages()]
    return frozenset(os.path.abspath(folder) for folder in folders)


def _unusable(name: str, purpose: str, problem: BaseException) -> Refusal:
    return Refusal(
        f"{purpose} needs the module '{name}', which cannot be imported "
        f"({type(problem).__name__}: {problem}). Mend it, or install what it needs."
    )
