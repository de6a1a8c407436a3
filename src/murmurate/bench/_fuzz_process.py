"""For fuzzing: attempts, each in a process of its own, forked from a server that has imported the package."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import resource
import runpy
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from murmurate.errors import Refusal, RunFailed

Attempt = Callable[[Any, Path], str]  # (case, empty folder) -> the outcome's name
# names of the outcomes, and of two other figures; silent: accepted with wrong values, as far as
# an attempt can tell; left: ended, and left processes behind, which were killed
_FIGURE_NAMES = (
    "attempts",
    "refused",
    "accepted",
    "failed",
    "tracebacks",
    "hangs",
    "deaths",
    "silent",
    "left",
    "peak_bytes",
)
_END_SECONDS = 10.0
_TRACEBACK = "Traceback (most recent call last)"


def attack(
    attempt: Attempt, cases: Iterable[Any], *, deadline_seconds: float = 240.0, preload: str = ""
) -> dict[str, int]:
    """Try each of ``cases``, and count the outcomes. preload: a module that the server imports.

    An attempt that ends in a traceback, a hang, a death by a signal or wrong values is printed to stderr with
    its case. ``peak_bytes`` is the most resident memory that an attempt used beyond that of its process at
    the start.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([preload, __name__] if preload else [__name__])
    counts = Counter(dict.fromkeys(_FIGURE_NAMES, 0))
    with tempfile.TemporaryDirectory(prefix="murmurate-fuzz-") as folder:
        for number, case in enumerate(cases):
            attempt_folder = Path(folder) / str(number)
            (attempt_folder / "work").mkdir(parents=True)
            process = context.Process(target=_child, args=(attempt, case, attempt_folder))
            process.start()
            process.join(deadline_seconds)
            outcome, peak_bytes = _outcome(process, attempt_folder)
            counts["attempts"] += 1
            counts[outcome] += 1
            counts["peak_bytes"] = max(counts["peak_bytes"], peak_bytes)
            if outcome not in ("refused", "accepted", "failed") or peak_bytes > 1 << 30:
                output = (attempt_folder / "output").read_text(errors="replace")[-2_000:]
                print(f"{outcome} ({peak_bytes:,} bytes): {case!r}\n{output}", file=sys.stderr, flush=True)
            shutil.rmtree(attempt_folder, ignore_errors=True)
    return dict(counts)


def run_command(arguments: Sequence[str]) -> str:
    """Run ``murmurate`` with these arguments in this process; returns the outcome's name."""
    sys.argv = ["murmurate", *arguments]
    try:
        runpy.run_module("murmurate", run_name="__main__")
    except SystemExit as end:
        codes: dict[object, str] = {0: "accepted", None: "accepted", 2: "refused"}
        return codes.get(end.code, "failed")
    return "accepted"


def _child(attempt: Attempt, case: Any, attempt_folder: Path) -> None:
    os.setsid()  # so that it can be killed with its children
    initial_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    output = os.open(attempt_folder / "output", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(attempt_folder / "work")
    try:
        outcome = attempt(case, attempt_folder / "work")
    except Refusal as refusal:
        print(refusal)
        outcome = "refused"
    except (RunFailed, SystemExit):
        outcome = "failed"
    except BaseException:
        traceback.print_exc()
        outcome = "tracebacks"
    sys.stdout.flush()
    sys.stderr.flush()
    scopes = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    peak_kib = max(resource.getrusage(scope).ru_maxrss for scope in scopes)
    (attempt_folder / "outcome").write_text(json.dumps([outcome, (peak_kib - initial_kib) * 1024]))
    os._exit(0)


def _outcome(process: Any, attempt_folder: Path) -> tuple[str, int]:
    if process.is_alive():
        os.killpg(process.pid, signal.SIGKILL)
        process.join()
        return "hangs", 0
    left = _has_left(process.pid)
    try:
        outcome, peak_bytes = json.loads((attempt_folder / "outcome").read_text())
    except OSError:
        return "deaths", 0
    outputs = [attempt_folder / "output", *(attempt_folder / "work").rglob("logs/*.log")]
    if any(_TRACEBACK in path.read_text(errors="replace") for path in outputs if path.is_file()):
        outcome = "tracebacks"
    return "left" if left and outcome != "tracebacks" else outcome, int(peak_bytes)


def _has_left(group: int) -> bool:
    """Whether processes of an attempt's ``group`` go on for longer than it takes to end; kills them."""
    deadline = time.monotonic() + _END_SECONDS
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            os.killpg(group, 0)
            time.sleep(0.02)
        os.killpg(group, signal.SIGKILL)
        return True
    return False
