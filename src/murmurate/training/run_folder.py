"""The run folder: what is written once, and reading it back."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import platform
import shutil
import socket
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch

import murmurate
from murmurate.errors import Refusal
from murmurate.strategies import strategy as strategy_class
from murmurate.training.option_names import option_name
from murmurate.training.run import Run


def claim(folder: Path) -> None:
    """Make the folder of a new run. Raises Refusal if it holds one, or anything else."""
    if (folder / "run.json").exists():
        raise Refusal(
            f"{folder} already holds a run. Go on with it: murmurate resume {folder}; "
            "or choose another folder with --out."
        )
    try:
        if folder.exists() and any(folder.iterdir()):
            raise Refusal(f"{folder} is not empty and holds no run. Choose another folder with --out.")
        (folder / "checkpoints").mkdir(parents=True)
    except OSError as error:
        raise Refusal(
            f"{folder} cannot be made: {error.strerror}. Choose another folder with --out."
        ) from error


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Hold a run folder against a second process. Raises Refusal if another holds it.

    The kernel releases the lock when the process ends, however it ends.
    """
    descriptor = os.open(folder / "checkpoints", os.O_RDONLY)
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
    shutil.rmtree(folder, ignore_errors=True)
    if existed:
        folder.mkdir(exist_ok=True)


def write_run(folder: Path, run: Run, **extra_fields: Any) -> None:
    """``run.json``: the whole resolved Run, versions and hardware; and ``extra_fields``, unchanged."""
    write_json(
        folder / "run.json",
        {
            **plain(run),
            **extra_fields,
            "unit": run.unit,
            "curves": [dataclasses.asdict(curve) for curve in run.evaluation.curves],
            "versions": versions(),
            "hardware": hardware(run),
            "command": ["murmurate", *sys.argv[1:]],
        },
    )


def read_run(folder: Path, recipe: Callable[[str], Run]) -> Run:
    """The Run of a folder; ``recipe`` resolves its name. Raises Refusal if there is none."""
    path = folder / "run.json"
    try:
        stored = json.loads(path.read_text())
        name, strategy_name = str(stored["recipe"]), str(stored["strategy"]["name"])
    except OSError as error:
        raise Refusal(f"{folder} holds no run (run.json: {error.strerror}). Check the path.") from None
    except (ValueError, KeyError, TypeError):
        raise Refusal(
            f"{path} is corrupt or was not written by murmurate. Name another run, or train anew with --out."
        ) from None
    base = dataclasses.replace(recipe(name), strategy=strategy_class(strategy_name)())
    try:
        rebuilt: Run = restore(base, stored)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise Refusal(
            f"{path} does not fit this version of murmurate ({error}). Train anew with --out."
        ) from error
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


def restore(like: Any, stored: Any) -> Any:
    """``stored`` in the shape of ``like``: dataclasses and tuples as they were.

    Raises TypeError for a value of another type than a field has.
    """
    if not dataclasses.is_dataclass(like) or isinstance(like, type):
        return tuple(stored) if isinstance(like, tuple) else stored
    kinds = typing.get_type_hints(type(like))
    changes = {}
    for field in dataclasses.fields(like):
        name, flat = option_name(field), field.metadata.get("flat")
        if not field.init or (name not in stored and not flat):
            continue
        value = restore(getattr(like, field.name), stored if flat else stored[name])
        if not _is(kinds[field.name], value):
            raise TypeError(f"{name} is {value!r}")
        changes[field.name] = value
    return dataclasses.replace(like, **changes)


def _is(kind: Any, value: Any) -> bool:
    """Whether a plain ``value`` is valid for a field of type ``kind``; nested ones are already checked."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return any(_is(inner, value) for inner in typing.get_args(kind))
    if kind is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return kind not in (bool, str, type(None)) or isinstance(value, kind)


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` so that a reader sees the old file or the new one."""
    fresh = path.with_name(path.name + ".new")
    with fresh.open("w") as file:
        file.write(json.dumps(value, indent=1) + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(fresh, path)


def versions() -> dict[str, str]:
    return {
        "murmurate": murmurate.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def hardware(run: Run | None = None) -> dict[str, Any]:
    """The hardware of this host, as stored with every run and every benchmark result."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "cpu": _cpu_name(),
        "cores": psutil.cpu_count() or 1,
        "memory_bytes": psutil.virtual_memory().total,
        "gpus": gpus,
        "system": f"{platform.system()} {platform.machine()}",
    }


def write_roles(
    folder: Path, pids: dict[int, int | None], replicas: int, hosts: Mapping[int, str] | None = None
) -> None:
    """``roles.jsonl``: which process on which host is which role (None: a thread of the launcher).

    hosts: names by rank; the others are on this one.
    """
    lines = [
        {
            "role": "replica" if rank < replicas else "center",
            "index": rank if rank < replicas else rank - replicas,
            "pid": pid or os.getpid(),
            "host": (hosts or {}).get(rank) or socket.gethostname(),
        }
        for rank, pid in pids.items()
    ]
    (folder / "roles.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"
