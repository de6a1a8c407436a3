"""Damaged run folders through ``resume``, ``eval`` and ``report``: refused, or read as they were saved.

Each attempt is a process forked from one that has imported everything. What it prints, how it ends, the
memory that it takes and, where a folder is accepted, the run and the parameters that were loaded are compared
with those of the folder before the damage.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import random
import resource
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from murmurate.bench._damages import damage
from murmurate.launch import inline
from murmurate.recipes import stored
from murmurate.record.report import report  # noqa: F401  imported before the forks
from murmurate.record.runs import open_run
from murmurate.training import checkpoint, evaluate
from murmurate.training.restore import load_agent
from murmurate.training.run import Run
from murmurate.training.run_folder import plain
from murmurate.training.worker import work as work_of_a_role
from murmurate.training.worker_context import WorkerContext

_DEADLINE_SECONDS = 90.0
_VERBS = ("resume", "eval", "report")
_SHORT = ("--launcher", "inline", "--simulators", "2", "--eval-episodes", "1", "--checkpoint-every-env-steps")
_RUNS = (
    ("cartpole-gala", "--replicas", "2", "--updates", "24", *_SHORT, "80"),
    ("cartpole-a2c", "--strategy", "parameter-server", "--replicas", "2", "--updates", "9", *_SHORT, "40"),
    ("cartpole-dqn", "--replay.learning-starts", "40", "--env-steps", "120", *_SHORT, "40"),
)
_END = {"--updates": "25", "--env-steps": "130"}


def attack(count: int, seed: int) -> dict[str, int]:
    """Outcomes of ``count`` damaged folders; descriptions of what fell go to standard error."""
    command = [sys.executable, "-m", __name__, str(count), str(seed)]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    outcomes: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return outcomes


@dataclasses.dataclass
class Saved:
    """A run folder before the damage: the run, and the digests of what each verb may load from it."""

    folder: Path
    run: Any
    shown: tuple[Any, Any]
    digests: set[str]
    end: tuple[str, str]


class _Silent(Exception):
    """A damaged folder was accepted with other values than were saved."""


def _attack(count: int, seed: int, place: Path) -> dict[str, int]:
    draw = random.Random(seed)
    saved = [_train(place / f"run-{i}", options) for i, options in enumerate(_RUNS)]
    peaks = {}
    for one in saved:
        for verb in _VERBS:
            outcome, peaks[one.folder, verb], said = _attempt(one, verb, place, [])
            if outcome != "accepted":
                raise RuntimeError(f"{verb} of a whole run folder: {outcome}\n{said}")
    outcomes = dict.fromkeys(_OUTCOMES, 0)
    for number in range(count):
        one, verb = draw.choice(saved), draw.choice(_VERBS)
        damages = [draw.randrange(2**62) for _ in range(draw.choice((1, 1, 1, 2, 3)))]
        outcome, peak, said = _attempt(one, verb, place, damages)
        extra = max(0, peak - peaks[one.folder, verb])
        outcomes["attempts"] += 1
        outcomes[outcome] += 1
        outcomes["peak_bytes"] = max(outcomes["peak_bytes"], extra)
        if outcome in ("tracebacks", "hangs", "silent") or extra > 2**30:
            about = f"{number}: {verb} {one.run['recipe']}: {outcome}, {extra:,} bytes more"
            print(about, said[-2000:], sep="\n", file=sys.stderr, flush=True)
    return outcomes


_OUTCOMES = ("attempts", "refused", "failed", "accepted", "tracebacks", "hangs", "silent", "peak_bytes")


def _train(folder: Path, options: tuple[str, ...]) -> Saved:
    """A short run with a last, a previous and a best checkpoint, a summary and a picture."""
    child = os.fork()
    if not child:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os._exit(_command("train", *options, "--out", str(folder)) or _command("report", str(folder)))
    if os.waitpid(child, 0)[1]:
        raise RuntimeError(f"{' '.join(options)} could not be trained")
    run, shown = stored(folder), open_run(folder)
    digests = set()
    for found in folder.glob("checkpoints/*"):
        digests.add(_digest(load_agent(run, found)))
        digests |= {
            _digest(checkpoint.read_part(found, rank)["replicas"]) for rank in checkpoint.parts(found)
        }
    end = next((name, value) for name, value in _END.items() if name in options)
    return Saved(folder, plain(run), (shown.run, shown.summary), digests, end)


def _attempt(saved: Saved, verb: str, place: Path, seeds: list[int]) -> tuple[str, int, str]:
    """(outcome, peak resident bytes, what was said) of one command on a copy with a damage for each seed."""
    folder, said = place / "damaged", place / "said"
    for left in (folder, place / "damaged-outside"):
        shutil.rmtree(left, ignore_errors=True)
        left.unlink(missing_ok=True)
    shutil.copytree(saved.folder, folder)
    damages = [damage(folder, random.Random(seed)) for seed in seeds]
    # else checksums were made to fit again, and what is accepted may be another run
    whole = not any(fits for _, fits in damages)
    child = os.fork()
    if not child:
        print(*(how for how, _ in damages), sep="; ", file=said.open("w"))
        _act(saved, verb, folder, said, whole)
    deadline = time.monotonic() + _DEADLINE_SECONDS
    while not (ended := os.wait4(child, os.WNOHANG))[0]:
        if time.monotonic() > deadline:
            os.killpg(child, signal.SIGKILL)
            os.wait4(child, 0)
            return "hangs", 0, said.read_text(errors="replace")
        time.sleep(0.005)
    text, peak = said.read_text(errors="replace"), ended[2].ru_maxrss * 1024
    code = os.waitstatus_to_exitcode(ended[1])
    if "Traceback (most recent call last)" in text or code < 0:
        return "tracebacks", peak, f"exit {code}: {text}"
    return {0: "accepted", 2: "refused", 77: "silent"}.get(code, "failed"), peak, text


def _act(saved: Saved, verb: str, folder: Path, said: Path, whole: bool) -> None:
    """In the forked process: the command, and the comparison of what it loads."""
    code = 70
    try:
        os.setsid()
        out = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(out, 1)
        os.dup2(out, 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if whole:
            _compare_what_is_loaded(saved, verb)
        options = saved.end if verb == "resume" else ()
        code = _command(verb, str(folder), *options)
        if whole and not code and verb == "report":
            shown = open_run(folder)
            _check((shown.run, shown.summary) in (saved.shown, (saved.shown[0], {})), "the report's facts")
    except _Silent as silent:
        print(f"other values: {silent}")
        code = 77
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _command(*arguments: str) -> int:
    """``murmurate`` with these arguments, in this process; returns its exit code."""
    sys.argv = ["murmurate", *arguments]
    try:
        runpy.run_module("murmurate", run_name="__main__")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    return 0


def _compare_what_is_loaded(saved: Saved, verb: str) -> None:
    work, load = work_of_a_role, load_agent

    def compared_work(run: Run, context: WorkerContext) -> None:
        same = {**saved.run, **{key: plain(run)[key] for key in ("updates", "env_steps")}}
        _check(plain(run) == same, "the run")
        if context.restored is not None:
            _check(
                _digest(context.restored.state["replicas"]) in saved.digests, "what a replica resumes from"
            )
        work(run, context)

    def compared_load(run: Run, folder: Path) -> Any:
        agent = load(run, folder)
        _check(plain(run) == saved.run, "the run")
        _check(_digest(agent) in saved.digests, "the parameters")
        return agent

    if verb == "eval":
        vars(evaluate)["load_agent"] = compared_load
    vars(inline)["work"] = compared_work


def _check(same: bool, what: str) -> None:
    if not same:
        raise _Silent(what)


def _digest(value: Any) -> str:
    """Of all numbers in an agent's replicas, or in a nested state."""
    whole = hashlib.blake2b()
    if hasattr(value, "replicas"):
        value = {name: replica.values() for name, replica in value.replicas.items()}

    def add(part: Any) -> None:
        if isinstance(part, torch.Tensor):
            whole.update(
                f"{part.dtype} {list(part.shape)}".encode() + part.contiguous().view(-1).numpy().tobytes()
            )
        elif isinstance(part, dict):
            for key in sorted(part):
                whole.update(str(key).encode())
                add(part[key])
        elif isinstance(part, list):
            for inner in part:
                add(inner)
        else:
            whole.update(repr(part).encode())

    add(value)
    return whole.hexdigest()


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="murmurate-fuzz-") as temporary:
        print(json.dumps(_attack(int(sys.argv[1]), int(sys.argv[2]), Path(temporary))))
