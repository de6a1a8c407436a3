"""``murmurate train RECIPE --seeds 0-4``: the options of a sweep."""

from __future__ import annotations

import argparse
from collections.abc import Collection
from pathlib import Path
from typing import Any

from murmurate import plugins
from murmurate.cli.options import option
from murmurate.errors import Refusal

_NOT_FORWARDED = frozenset({"verb", "inner", "act", "recipe", "out", "seeds", "jobs", "fields"})


def add_options(train: Any) -> None:
    train.add_argument("--seeds", help="train once for each seed, as in 0-4 or 0,3,7, into one folder")
    option(train, "--jobs", int, 1, "with --seeds: number of runs at once")


def sweep(run: Any, options: argparse.Namespace, rest: list[str]) -> int:
    """Train ``run`` once for each seed of ``--seeds``; returns the exit code. Raises Refusal."""
    from murmurate.launch import command_launcher
    from murmurate.training.preflight import prepared
    from murmurate.training.run_folder import new_folder
    from murmurate.tuning.sweep import Sweep, read_seeds

    seeds = read_seeds(options.seeds)
    if any(word.partition("=")[0] == "--seed" for word in rest):
        raise Refusal("--seed and --seeds cannot go together. Leave out --seed.")
    check_jobs(run, options.jobs)
    engine = command_launcher(run.launcher)
    if engine.dictated_replicas() is not None:
        raise Refusal(f"The {run.launcher} launcher starts one run. Start each seed with --seed.")
    prepared(run, engine)
    if warning := crowding(run, engine, options.jobs):
        _say(warning)
    folder = options.out or Path(f"{new_folder(run.recipe)}-sweep")
    return Sweep(run, ["train", *forwarded(options), *rest], seeds, folder, options.jobs, say=_say).train()


def forwarded(options: argparse.Namespace, without: Collection[str] = ()) -> list[str]:
    """The recipe, the imports, and the given options that are no fields of the run, as words of a command.

    without: names of options to leave out.
    """
    words = [] if options.recipe is None else [options.recipe]
    words += imported()
    for name, value in vars(options).items():
        if name in _NOT_FORWARDED or name in without or value is None or value is False:
            continue
        words += option_words(name, value)
    return words


def option_words(name: str, value: Any) -> list[str]:
    """The option ``name`` with its value, or with each of a list of values, as words of a command."""
    words: list[str] = []
    for each in value if isinstance(value, list) else [value]:
        words += [f"--{name.replace('_', '-')}", *([] if each is True else [str(each)])]
    return words


def imported() -> list[str]:
    """``--import`` of each module that this command imports, as words of a command."""
    return [word for module in plugins.imports() for word in ("--import", module)]


def check_jobs(run: Any, jobs: int) -> None:
    """Raise Refusal unless so many runs like ``run`` can be trained at once."""
    if not 1 <= jobs <= 1024:
        raise Refusal(f"--jobs is {jobs}; it must be from 1 to 1024.")
    if jobs > 1 and (folder := getattr(getattr(run.source, "replay", None), "folder", None)):
        raise Refusal(
            f"{jobs} runs at once cannot keep their replays in the same files in {folder}. Leave out --jobs, "
            "or --replay.folder."
        )


def crowding(run: Any, engine: Any, jobs: int) -> str:
    """A warning, where so many runs like ``run`` at once have more processes than this host has cores; else
    empty, also where other hosts may take part. engine: the run's launcher."""
    from murmurate.native.cores import usable_cores

    actors = run.replicas * run.source.acting_processes()
    each = 1 if engine.one_process else run.members + actors
    cores = usable_cores()
    if engine.sends or jobs == 1 or jobs * each <= cores:
        return ""
    return (
        f"warning: {jobs} runs at once are {jobs * each} processes on {cores} cores. Their seconds depend on "
        "that, and under asynchronous strategies also staleness and learning. Where these are to be "
        f"compared, use --jobs {max(1, cores // each)}."
    )


def _say(line: str) -> None:
    print(line, flush=True)  # flushed, so that it precedes the output of the run's process
