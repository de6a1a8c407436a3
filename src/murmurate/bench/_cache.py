"""Results on disk: a finished run is not run again, and a computed value is not computed again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
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

    The folder of an interrupted run is renamed, and the run starts anew. Raises RunFailed if the run fails.
    """
    if not _finished(folder):
        set_aside(folder)
        run_murmurate(["train", recipe, *options, "--out", str(folder)])
        summary = json.loads((folder / "summary.json").read_text())
        rate, mean = summary["env_steps_per_second"], summary["eval_return_mean"]
        evaluation = "" if mean is None else f", evaluation {mean:.1f}"
        log(f"{folder.name}: {rate:,.0f} env steps/s{evaluation}")
    return open_run(folder)


def _finished(folder: Path) -> bool:
    try:
        return bool(json.loads((folder / "summary.json").read_text())["exit"] == "finished")
    except FileNotFoundError:
        return False


def cached_value(where: Path, name: str, key: Any, compute: Callable[[], Any]) -> Any:
    """The JSON value that ``compute`` returns, computed once for each ``name`` and ``key`` (a JSON
    value); the folder ``where`` keeps it, and is made if needed.

    Raises RunFailed for a value that was computed on another processor or with another version of torch: a
    result has one of each.
    """
    where.mkdir(parents=True, exist_ok=True)
    path = where / f"{keyed(name, key)}.json"
    here = {"cpu": hardware()["cpu"], "torch": versions()["torch"]}
    if not path.exists():
        write_json(path, {"value": compute(), **here})
    stored = {**here, **read_object(path)}  # files of earlier versions say neither
    if any(stored[fact] != here[fact] for fact in here):
        raise RunFailed(
            f"{path} was computed on {stored['cpu']} with torch {stored['torch']}, and here are "
            f"{here['cpu']} and torch {here['torch']}. Choose another folder with --where, or remove it."
        )
    return stored["value"]


def keyed(name: str, key: Any) -> str:
    """The name of a file for ``name`` and ``key`` (a JSON value)."""
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:12]
    return f"{name.replace(' ', '-')}-{digest}"
