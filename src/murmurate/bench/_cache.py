"""Results on disk: a finished run is not run again, and a computed value is not computed again.

Both count only on the processor and with the versions that made them, as a result names one of each.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from murmurate.bench._commands import run_murmurate
from murmurate.bench._result import Log
from murmurate.record.runs import RecordedRun, open_run
from murmurate.record.stored import read_object, write_json
from murmurate.training.host import hardware, versions
from murmurate.training.run_folder import set_aside


def cached_run(folder: Path, recipe: str, options: Sequence[str], log: Log) -> RecordedRun:
    """``murmurate train RECIPE OPTIONS --out FOLDER``, unless the folder has a finished run of this machine.

    The folder of any other run is renamed, and the run starts anew. Raises RunFailed if the run fails.
    """
    if not _is_finished_here(folder):
        set_aside(folder)
        run_murmurate(["train", recipe, *options, "--out", str(folder)])
        summary = json.loads((folder / "summary.json").read_text())
        rate, mean = summary["env_steps_per_second"], summary["eval_return_mean"]
        evaluation = "" if mean is None else f", evaluation {mean:.1f}"
        log(f"{folder.name}: {rate:,.0f} env steps/s{evaluation}")
    return open_run(folder)


def _is_finished_here(folder: Path) -> bool:
    try:
        summary, run = (json.loads((folder / name).read_text()) for name in ("summary.json", "run.json"))
    except FileNotFoundError:
        return False
    made_on = _machine(run.get("hardware", {}), run.get("versions", {}))
    return bool(summary["exit"] == "finished" and made_on == _machine(hardware(), versions()))


def _machine(hardware: Mapping[str, Any], versions: Mapping[str, str]) -> list[Any]:
    # not the versions of simulators, which most benches do not use
    return [hardware.get("cpu"), hardware.get("cores"), *map(versions.get, ("murmurate", "python", "torch"))]


def cached_value(where: Path, name: str, key: Any, compute: Callable[[], Any]) -> Any:
    """The JSON value that ``compute`` returns, computed once on a machine for each ``name`` and ``key`` (a
    JSON value); the folder ``where`` keeps it, and is made if needed."""
    path = cache_file(where, name, key)
    if not path.exists():
        write_json(path, {"value": compute()})
    return read_object(path)["value"]


def cache_file(where: Path, name: str, key: Any = None) -> Path:
    """The file in the folder ``where``, which is made if needed, for what is measured on this machine."""
    where.mkdir(parents=True, exist_ok=True)
    return where / f"{keyed(name, [key, *_machine(hardware(), versions())])}.json"


def keyed(name: str, key: Any) -> str:
    """The name of a file for ``name`` and ``key`` (a JSON value)."""
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:12]
    return f"{name.replace(' ', '-')}-{digest}"
