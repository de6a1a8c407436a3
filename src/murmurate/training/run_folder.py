"""The run folder: writes the files that are written once, and reads them back."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import itertools
import json
import os
import re
import reprlib
import shutil
import socket
import time
import typing
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from murmurate import plugins
from murmurate.errors import Refusal, cause_of, did_you_mean, quoted, refuse_not_utf8
from murmurate.ranges import is_valid
from murmurate.record.reader import read_metrics
from murmurate.record.stored import (
    FORMAT,
    UNSOUND,
    Changed,
    read_object,
    refuse_foreign,
    replacing,
    write_json,
)
from murmurate.strategies import strategies
from murmurate.training.command import commands
from murmurate.training.host import hardware, versions
from murmurate.training.option_names import option_name
from murmurate.training.own_files import digests
from murmurate.training.run import Run
from murmurate.worlds.modules import search

# keys of run.json beside the fields of the Run
_OTHER_KEYS = frozenset(
    {
        "format",
        "unit",
        "curves",
        "headline",
        "versions",
        "hardware",
        "files",
        "command",
        "simulated",
        "imports",
    }
)


def refuse_taken(folder: Path) -> None:
    """Raise Refusal if ``folder`` holds a run or anything else, or is no folder."""
    if os.path.exists(folder / "run.json"):  # not by ``Path``, which raises for a path that is too long
        if _is_simulated(folder):
            raise Refusal(f"{folder} already holds a simulated run. Choose another folder with --out.")
        if not _has_saved(folder):
            with locked(folder):  # refuses while the run goes on, and may still save
                raise Refusal(
                    f"{folder} already holds a run, which saved no checkpoint to go on from. "
                    "Delete the folder, or choose another with --out."
                )
        raise Refusal(
            f"{folder} already holds a run. Go on with it: murmurate resume {quoted(folder)}; "
            "or choose another folder with --out."
        )
    try:
        if folder.exists() and any(folder.iterdir()):
            raise Refusal(f"{folder} is not empty and holds no run. Choose another folder with --out.")
    except OSError as error:
        raise _cannot_be_made(folder, error) from error


def claim(folder: Path) -> None:
    """Make the folder of a new run. Raises Refusal if it is taken (``refuse_taken``), or cannot be made."""
    refuse_taken(folder)
    existed = folder.exists()
    try:
        (folder / "checkpoints").mkdir(parents=True)
    except OSError as error:
        if not existed:
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise _cannot_be_made(folder, error) from error


def _cannot_be_made(folder: Path, error: OSError) -> Refusal:
    return Refusal(f"{folder} cannot be made: {cause_of(error)}. Choose another folder with --out.")


def _is_simulated(folder: Path) -> bool:
    """Whether the run in a folder is a simulated one, which cannot be resumed."""
    try:
        return "simulated" in read_object(folder / "run.json")
    except (OSError, ValueError):  # ``resume`` reports what is wrong with it
        return False


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a run folder against other processes, where its file system has locks. Raises Refusal if another
    process has locked it, or if it has no folder ``checkpoints``.

    The kernel releases the lock when the process ends, however it ends.
    """
    try:
        descriptor = os.open(folder / "checkpoints", os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise Refusal(
            f"{folder} holds no checkpoint ({cause_of(error)}). Start again with murmurate train and another "
            "--out."
        ) from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Refusal(
                f"another process is training in {folder}. Wait for its end, stop it with Ctrl-C, or choose "
                "another folder with --out."
            ) from None
        except OSError:
            pass  # a file system without locks
        yield
    finally:
        os.close(descriptor)


def unclaim(folder: Path, existed: bool) -> None:
    """Undo ``claim`` for a run that never started. existed: the folder existed before, empty."""
    if not existed:
        shutil.rmtree(folder, ignore_errors=True)
        return
    with contextlib.suppress(OSError):
        for entry in folder.iterdir():  # the folder itself stays, as it may be a link
            if entry.is_dir():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                entry.unlink()


def has_begun(folder: Path) -> bool:
    """Whether the run in a folder has saved a checkpoint, or a replica has recorded anything."""
    if _has_saved(folder):
        return True
    path = folder / "metrics.jsonl"
    records = read_metrics(path) if path.exists() else ()
    return any(record["replica"] is not None and record.get("kind") != "event" for record in records)


def _has_saved(folder: Path) -> bool:
    return any((folder / "checkpoints").glob("*/state.json"))


def claim_new(name: str) -> Path:
    """Make a ``new_folder``, which is returned; another command may choose the same one in this second."""
    while True:
        try:
            claim(folder := new_folder(name))
            return folder
        except Refusal:
            if not folder.exists():
                raise


def new_folder(name: str) -> Path:
    """A folder below ``runs`` that does not exist yet, named after a recipe and the time: without slashes and
    colons, and without the folder of an environment's file."""
    short = re.sub("[^A-Za-z0-9._+-]", "-", re.sub("^env:(.*/)?", "", name))[-100:].lstrip("-.")
    stem = f"{short}-{time.strftime('%Y%m%d-%H%M%S')}"
    numbered = (Path("runs") / (stem if n == 1 else f"{stem}-{n}") for n in itertools.count(1))
    return next(folder for folder in numbered if not folder.exists())


def write_run(folder: Path, run: Run, **extra_fields: Any) -> None:
    """Write ``run.json``: the resolved Run, ``extra_fields`` (JSON values), its evaluation's curves, the
    commands that made it, this process's versions, hardware and imported modules, and digests of the user's
    own files. Raises Refusal for a path that is not UTF-8."""
    settings = plain(run)
    content = {
        "format": FORMAT,
        **settings,
        **extra_fields,
        "unit": run.unit,
        "curves": [dataclasses.asdict(curve) for curve in run.evaluation.curves],
        "headline": None if run.evaluation.headline is None else dataclasses.asdict(run.evaluation.headline),
        "versions": versions(),
        "hardware": hardware(),
        "command": commands(folder),
        **({"files": files} if (files := digests(run)) else {}),
        **({"imports": imports} if (imports := plugins.imports()) else {}),
    }
    refuse_not_utf8(content, "run.json")
    write_json(folder / "run.json", content)


def read_run(folder: Path, recipe: Callable[[str], Run]) -> Run:
    """The Run of a folder; ``recipe`` finds a recipe's Run by name. Raises Refusal if none can be restored.

    ``run.json`` must be as it was written (see ``stored``). A field that no part of the Run has is refused. A
    field that is missing is refused, too, unless it is newer than the file (``since`` in its metadata is the
    ``format`` that first has it), or the file is from before format 2: such files have no checksum and name
    no format. The fields that may be missing get the defaults, with a warning that names them.
    """
    path = folder / "run.json"
    refuse_foreign(folder)
    try:
        stored = read_object(path)
        number = stored.get("format", 1)
        if not isinstance(number, int) or not 1 <= number <= FORMAT:
            raise Refusal(f"{path} has format {number!r}, and this version reads up to {FORMAT}.")
        name, strategy_name = str(stored["recipe"]), str(stored["strategy"]["name"])
        imports = [str(module) for module in list(stored.get("imports", ()))]
    except OSError as error:
        raise Refusal(f"{folder} holds no run (run.json: {cause_of(error)}). Check the path.") from None
    except Changed:
        raise Refusal(
            f"{path} was changed since murmurate wrote it. Restore it, and give what shall change as an "
            f"option, as in murmurate resume {quoted(folder)} --env-steps 100000; or train anew with --out."
        ) from None
    except UNSOUND:
        raise Refusal(
            f"{path} is corrupt or was not written by murmurate. Name another run, or train anew with --out."
        ) from None
    if imports:
        plugins.add_imports(imports)
    known = strategies()
    if strategy_name not in known:
        raise Refusal(
            f"{path} names the strategy '{strategy_name}', which no module that is known here defines."
            f"{did_you_mean(str(strategy_name), known)} Name the file that does: --import FILE.py, or "
            f"{plugins.IMPORTS}=FILE.py in the environment (for Python, too); or install its package."
        )
    fields = stored.get("world")
    with search(fields.get("folder") if isinstance(fields, dict) else None):
        base = dataclasses.replace(recipe(name), strategy=known[strategy_name]())
    missing: list[str] = []
    try:
        rebuilt: Run = restore(base, stored, number, missing, beside=_OTHER_KEYS)
    except UNSOUND as error:
        raise Refusal(
            f"{path} does not fit this version of murmurate ({error}). Train anew with --out."
        ) from error
    if missing:
        warnings.warn(
            f"{path} is of an earlier version and has no {', '.join(missing)}: the default is taken.",
            stacklevel=2,
        )
    return rebuilt


def plain(value: Any) -> Any:
    """A dataclass as JSON values; a strategy or a learner carries its name. Fields of a Run have
    the names of their options (see ``Run``)."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields: dict[str, Any] = {}
        for field in dataclasses.fields(value):
            if not field.init:
                continue
            inner = plain(getattr(value, field.name))
            if field.metadata.get("flat"):
                fields |= inner
            else:
                fields[option_name(field)] = inner
        has_name = hasattr(type(value), "summary")
        return {"name": type(value).name, **fields} if has_name else fields  # type: ignore[attr-defined]
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    return str(value) if isinstance(value, Path) else value


def restore(
    like: Any,
    stored: Any,
    number: int = FORMAT,
    missing: list[str] | None = None,
    *,
    beside: frozenset[str] = frozenset(),
) -> Any:
    """``stored`` in the shape of ``like``: dataclasses and tuples as they were.

    number: the format of the file. missing: filled with the fields that a file of an earlier format lacks.
    beside: names in ``stored`` that are not fields. Raises TypeError for a value of a type other than its
    field's, for a name that is not a field's, or for a field of the format that ``stored`` lacks.
    """
    if not isinstance(stored, dict):
        raise TypeError(f"there is {reprlib.repr(stored)} for the fields of {type(like).__name__}")
    names = set(_names(like))
    if unknown_names := sorted(stored.keys() - names - beside):
        raise TypeError(f"no field is called {reprlib.repr(unknown_names)[1:-1]}")
    if "name" in names and stored.get("name", like.name) != like.name:
        raise TypeError(f"name is {reprlib.repr(stored['name'])} and not '{like.name}'")
    field_types = typing.get_type_hints(type(like))
    changes = {}
    for field in dataclasses.fields(like):
        if not field.init:
            continue
        name, inner = option_name(field), getattr(like, field.name)
        if field.metadata.get("flat"):
            stored_inner = {key: value for key, value in stored.items() if key in _names(inner)}
            changes[field.name] = restore(inner, stored_inner, number, missing)
        elif name not in stored:
            if number > 1 and number >= field.metadata.get("since", 0):
                raise TypeError(f"{name} is missing")
            if missing is not None:
                missing.append(name)
        elif dataclasses.is_dataclass(inner):
            changes[field.name] = restore(inner, stored[name], number, missing)
        else:
            value, field_type = stored[name], field_types[field.name]
            if isinstance(value, list) and not is_valid(field_type, value):
                value = tuple(value)
            if isinstance(inner, Path) and isinstance(value, str):
                value = Path(value)
            if not is_valid(field_type, value):
                raise TypeError(f"{name} is {reprlib.repr(stored[name])}")
            changes[field.name] = value
    return dataclasses.replace(like, **changes)


def _names(like: Any) -> Iterator[str]:
    """The names under which ``plain`` writes what is in ``like``."""
    if hasattr(type(like), "summary"):
        yield "name"
    for field in dataclasses.fields(like):
        if field.metadata.get("flat"):
            yield from _names(getattr(like, field.name))
        elif field.init:
            yield option_name(field)


def command_for(verb: str, folder: Path, command_prefix: str = "") -> str:
    """The command of this verb for a run folder. command_prefix: what a command that
    resumes the run begins with (see ``Launcher``)."""
    return f"{command_prefix if verb == 'resume' else ''}murmurate {verb} {quoted(folder)}"


def unit_of(folder: Path) -> str:
    """The unit of a run's ``env_steps``: documents, for example."""
    try:
        return str(read_object(folder / "run.json")["unit"])
    except (OSError, *UNSOUND):  # it is damaged, or of a version that had no such text
        return "env steps"


def set_aside(folder: Path) -> Path:
    """Rename ``folder``, which an interrupted run left, if it exists; returns its new name, which patterns
    such as ``trial-*`` do not fit."""
    if not folder.exists():
        return folder
    return folder.rename(folder.with_name(f"cut-off-{folder.name}-{folder.stat().st_mtime_ns}"))


@contextmanager
def restored_if_refused(folder: Path, *names: str) -> Iterator[None]:
    """Restores these files if the code inside raises Refusal, or OSError, which is raised as Refusal."""
    contents = {folder / name: (folder / name).read_bytes() for name in names if (folder / name).exists()}
    try:
        yield
    except (Refusal, OSError) as error:
        for path, content in contents.items():
            with contextlib.suppress(OSError), replacing(path) as fresh:
                fresh.write_bytes(content)
        if isinstance(error, Refusal):
            raise
        raise Refusal(f"{folder} cannot be written: {cause_of(error)}. Make room, or copy it.") from error


def write_roles(
    folder: Path, pids: dict[int, int | None], replicas: int, hosts: Mapping[int, str] | None = None
) -> None:
    """Write ``roles.jsonl``: the role, process and host of each rank. pids: by rank; None for a thread of the
    launcher. hosts: names by rank; ranks without a name are on this host."""
    lines = [
        {
            "role": "replica" if rank < replicas else "center",
            "index": rank if rank < replicas else rank - replicas,
            "pid": pid or os.getpid(),
            "host": (hosts or {}).get(rank) or socket.gethostname(),
        }
        for rank, pid in pids.items()
    ]
    with replacing(folder / "roles.jsonl") as fresh:
        fresh.write_text("".join(json.dumps(line) + "\n" for line in lines))
