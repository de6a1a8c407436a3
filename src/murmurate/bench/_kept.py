"""What a bench keeps: neither a run that came to its end nor a value that was found is made again."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from murmurate.bench._result import Log
from murmurate.errors import RunFailed
from murmurate.record.runs import RecordedRun, open_run
from murmurate.training.run_folder import write_json


def kept_run(folder: Path, recipe: str, options: Sequence[str], log: Log) -> RecordedRun:
    """``murmurate train RECIPE options``, or what it came to the last time. Raises RunFailed if it fails."""
    if not _is_done(folder):
        if folder.exists():
            folder.rename(folder.with_name(f"{folder.name}-cut-off-{folder.stat().st_mtime_ns}"))
        command = [sys.executable, "-m", "murmurate", "train", recipe, *options, "--out", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise RunFailed(f"{' '.join(command)} ended with {done.returncode}: {done.stderr.strip()}")
        summary = json.loads((folder / "summary.json").read_text())
        rate, mean = summary["env_steps_per_second"], summary["eval_return_mean"]
        found = "" if mean is None else f", evaluation {mean:.1f}"
        log(f"{folder.name}: {rate:,.0f} env steps/s{found}")
    return open_run(folder)


def _is_done(folder: Path) -> bool:
    """Whether a run came to its own end; one that was interrupted is set aside and run anew."""
    try:
        return bool(json.loads((folder / "summary.json").read_text())["exit"] == "finished")
    except FileNotFoundError:
        return False


def kept_value(where: Path, name: str, key: Any, make: Callable[[], Any]) -> Any:
    """What ``make`` gives, once for each ``name`` and ``key``."""
    told = json.dumps(key)
    path = where / f"{name.replace(' ', '-')}-{hashlib.sha256(told.encode()).hexdigest()[:12]}.json"
    if not path.exists():
        write_json(path, make())
    return json.loads(path.read_text())
