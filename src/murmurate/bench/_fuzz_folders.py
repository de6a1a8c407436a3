"""Damaged run folders, given to ``resume``, ``eval`` and ``report``: each must be refused, or read as it was
before the damage.

Where a folder is accepted, the run and the parameters that were loaded are compared with those before the
damage.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from murmurate.bench import _fuzz_process
from murmurate.bench._damages import damage
from murmurate.launch import inline
from murmurate.recipes import stored
from murmurate.record.runs import open_run
from murmurate.training import checkpoint, evaluate
from murmurate.training.restore import load_agent
from murmurate.training.run import Run
from murmurate.training.run_folder import plain
from murmurate.training.worker import work as work_of_a_role
from murmurate.training.worker_context import WorkerContext

_VERBS = ("resume", "eval", "report")
_SHORT = ("--launcher", "inline", "--simulators", "2", "--eval-episodes", "1", "--checkpoint-every-env-steps")
_RUNS = (
    ("cartpole-gala", "--replicas", "2", "--updates", "24", *_SHORT, "80"),
    ("cartpole-a2c", "--strategy", "parameter-server", "--replicas", "2", "--updates", "9", *_SHORT, "40"),
    ("cartpole-dqn", "--replay.learning-starts", "40", "--env-steps", "120", *_SHORT, "40"),
)
_LATER_END = {"--updates": "25", "--env-steps": "130"}


@dataclasses.dataclass
class Saved:
    """A run folder before the damage: its run, what ``report`` shows of it (run, summary), the digests of all
    parameters that a verb may load, and the option with which ``resume`` trains further."""

    folder: Path
    run: Any
    shown: tuple[Any, Any]
    digests: set[str]
    end: tuple[str, str]


@dataclasses.dataclass(frozen=True)
class DamagedFolder:
    """A verb to run on a copy of the run folder number ``index``, damaged once for each of ``seeds``."""

    index: int
    verb: str
    seeds: tuple[int, ...]


class _OtherValues(Exception):
    """A damaged folder was accepted with other values than were saved."""


def attack(count: int, seed: int) -> dict[str, int]:
    """The number of each outcome over ``count`` damaged folders; failures are printed to stderr. Raises
    RuntimeError if a command fails on a folder without damage."""
    with tempfile.TemporaryDirectory(prefix="murmurate-fuzz-") as folder:
        saved = [_train(Path(folder) / f"run-{i}", options) for i, options in enumerate(_RUNS)]
        attempt = functools.partial(_attempt, saved)
        undamaged = _fuzz_process.attack(
            attempt,
            [DamagedFolder(i, verb, ()) for i in range(len(saved)) for verb in _VERBS],
            preload=__name__,
        )
        if undamaged["accepted"] < undamaged["attempts"]:
            raise RuntimeError(f"a command failed on a run folder without any damage: {undamaged}")
        return _fuzz_process.attack(attempt, _cases(count, random.Random(seed)), preload=__name__)


def _cases(count: int, draw: random.Random) -> Iterator[DamagedFolder]:
    for _ in range(count):
        damages = draw.choice((1, 1, 1, 2, 3))
        seeds = tuple(draw.randrange(2**62) for _ in range(damages))
        yield DamagedFolder(draw.randrange(len(_RUNS)), draw.choice(_VERBS), seeds)


def _train(folder: Path, options: tuple[str, ...]) -> Saved:
    """A short run with a last, a previous and a best checkpoint, a summary and a report. Raises
    CalledProcessError if a command fails."""
    for arguments in (["train", *options, "--out", str(folder)], ["report", str(folder)]):
        command = [sys.executable, "-m", "murmurate", *arguments]
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    run, recorded = stored(folder), open_run(folder)
    digests = set()
    for path in folder.glob("checkpoints/*"):
        digests.add(_digest(load_agent(run, path)))
        digests |= {_digest(checkpoint.read_part(path, rank)["replicas"]) for rank in checkpoint.parts(path)}
    end = next((name, value) for name, value in _LATER_END.items() if name in options)
    return Saved(folder, plain(run), (recorded.run, recorded.summary), digests, end)


def _attempt(runs: Sequence[Saved], case: DamagedFolder, work_folder: Path) -> str:
    """Run the verb on a damaged copy; returns the outcome's name."""
    saved, folder = runs[case.index], work_folder / "damaged"
    shutil.copytree(saved.folder, folder)
    damages = [damage(folder, random.Random(seed)) for seed in case.seeds]
    print(*(description for description, _ in damages), sep="; ")
    # a damage with recomputed checksums may make another valid run, which is not compared
    comparable = not any(resealed for _, resealed in damages)
    if comparable:
        _compare_what_is_loaded(saved, case.verb)
    try:
        outcome = _fuzz_process.run_command(
            [case.verb, str(folder), *(saved.end if case.verb == "resume" else ())]
        )
        if comparable and outcome == "accepted" and case.verb == "report":
            recorded = open_run(folder)
            without_summary: tuple[Any, dict[str, Any]] = (saved.shown[0], {})
            equal = (recorded.run, recorded.summary) in (saved.shown, without_summary)
            _check(equal, "the report's facts")
    except _OtherValues as difference:
        print(f"other values: {difference}")
        return "silent"
    return outcome


def _compare_what_is_loaded(saved: Saved, verb: str) -> None:
    """Patch this process's functions that load a run, so that they raise _OtherValues where values differ."""
    work, load = work_of_a_role, load_agent

    def compared_work(run: Run, context: WorkerContext) -> None:
        expected = {**saved.run, **{key: plain(run)[key] for key in ("updates", "env_steps")}}
        _check(plain(run) == expected, "the run")
        if context.restored is not None:
            _check(
                _digest(context.restored.state["replicas"]) in saved.digests, "what a replica resumes from"
            )
        work(run, context)

    def compared_load(run: Run, folder: Path, of: Path | None = None) -> Any:
        agent = load(run, folder, of)
        _check(plain(run) == saved.run, "the run")
        _check(_digest(agent) in saved.digests, "the parameters")
        return agent

    if verb == "eval":
        vars(evaluate)["load_agent"] = compared_load
    vars(inline)["work"] = compared_work


def _check(same: bool, what: str) -> None:
    if not same:
        raise _OtherValues(what)


def _digest(value: Any) -> str:
    """The digest of all numbers in an agent's replicas, or in a nested state."""
    hasher = hashlib.blake2b()
    if hasattr(value, "replicas"):
        value = {name: replica.values() for name, replica in value.replicas.items()}

    def add(part: Any) -> None:
        if isinstance(part, torch.Tensor):
            hasher.update(
                f"{part.dtype} {list(part.shape)}".encode() + part.contiguous().view(-1).numpy().tobytes()
            )
        elif isinstance(part, dict):
            for key in sorted(part):
                hasher.update(str(key).encode())
                add(part[key])
        elif isinstance(part, list):
            for inner in part:
                add(inner)
        else:
            hasher.update(repr(part).encode())

    add(value)
    return hasher.hexdigest()
