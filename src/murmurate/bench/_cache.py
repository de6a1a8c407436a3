"""Results on disk: a finished run is not run again, and a computed value is not computed again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from murmurate.bench._commands import run_murmurate
from murmurate.bench._result import Log
from murmurate.errors import RunFailed
from murmurate.record.runs import RecordedRun, open_run
from murmurate.record.stored import read_object
from murmurate.training.run_folder import hardware, set_aside, versions, write_json


def cached_run(folder: Path, recipe: str, options: Sequence[str], log: Log) -> RecordedRun:
    """``murmurate train RECIPE OPTIONS --out FOLDER``, unless the folder already holds a finished run.

    The folder of an interrupted run is renamed, and the run starts anew. Raises RunFailed if the run fails,
    and for one that another machine has made (see ``_refuse_elsewhere``).
    """
    if not _finished(folder):
        set_aside(folder)
        run_murmurate(["train", recipe, *options, "--out", str(folder)])
        summary = json.loads((folder / "summary.json").read_text())
        rate, mean = summary["env_steps_per_second"], summary["eval_return_mean"]
        evaluation = "" if mean is None else f", evaluation {mean:.1f}"
        log(f"{folder.name}: {rate:,.0f} env steps/s{evaluation}")
    run = open_run(folder)
    _refuse_elsewhere(folder, run.run)
    return run


def _finished(folder: Path) -> bool:
    try:
        return bool(json.loads((folder / "summary.json").read_text())["exit"] == "finished")
    except FileNotFoundError:
        return False


def cached_value(where: Path, name: str, key: Any, compute: Callable[[], Any]) -> Any:
    """The JSON value that ``compute`` returns, computed once for each ``name`` and ``key`` (a JSON
    value); the folder ``where`` keeps it, and is made if needed. Raises RunFailed for a value that another
    machine has computed (see ``_refuse_elsewhere``)."""
    where.mkdir(parents=True, exist_ok=True)
    path = where / f"{keyed(name, key)}.json"
    if not path.exists():
        write_json(path, {"value": compute(), "hardware": hardware(), "versions": versions()})
    stored = read_object(path)
    _refuse_elsewhere(path, stored)
    return stored["value"]


def _refuse_elsewhere(path: Path, stored: Mapping[str, Any]) -> None:
    """Raise RunFailed for what was made on another processor or with another version of torch: a result names
    one of each.

    stored: may have ``hardware`` and ``versions``, as in ``run.json``; values of earlier versions lack them.
    """
    here = (hardware()["cpu"], versions()["torch"])
    there = (
        stored.get("hardware", {}).get("cpu", here[0]),
        stored.get("versions", {}).get("torch", here[1]),
    )
    if there != here:
        raise RunFailed(
            f"{path} is from {there[0]} with torch {there[1]}, and here are {here[0]} and torch {here[1]}. "
            "Choose another folder with --where, or remove it."
        )


def keyed(name: str, key: Any) -> str:
    """The name of a file for ``name`` and ``key`` (a JSON value)."""
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:12]
    return f"{name.replace(' ', '-')}-{digest}"
