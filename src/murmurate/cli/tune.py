"""``murmurate tune``: a recipe's hyper-parameters, searched by Optuna."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from murmurate.cli.help import Fields
from murmurate.cli.options import given, number_argument, option
from murmurate.cli.run_verbs import add_env, add_passes, changed, recipe_run, train_fields
from murmurate.cli.search import search_space
from murmurate.cli.sweep import check_jobs, crowding, forwarded, option_words
from murmurate.errors import Refusal, quoted
from murmurate.ranges import PositiveFloat, PositiveInt

# options of the study, and not of its trials
_TUNE_OPTIONS = ("trials", "minutes", "search", "objective", "sampler", "pruner", "jobs")


def add_verb(verbs: Any) -> None:
    tune = verbs.add_parser("tune", help="search a recipe's hyper-parameters (Optuna)")
    tune.add_argument("recipe", nargs="?", help="as for train")
    add_env(tune)
    add_passes(tune)
    tune.add_argument("--strategy", help="as for train")
    tune.add_argument("--out", type=Path, help="the study's folder (default: runs/<recipe>-<time>-study)")
    tune.add_argument(
        "--trials",
        type=number_argument(PositiveInt),
        help="number of trials in all (default 30; with --sampler grid, every combination)",
    )
    tune.add_argument(
        "--minutes", type=number_argument(PositiveFloat), help="after which no trial is started"
    )
    tune.add_argument(
        "--search",
        action="append",
        default=[],
        metavar="FIELD=VALUES",
        help="LOW..HIGH, LOW..HIGH:log or A,B,C; several times; 'default' adds what is searched without it",
    )
    tune.add_argument("--objective", help="figure of summary.json, NAME:max or NAME:min")
    option(tune, "--sampler", str, "tpe", "tpe, random, qmc, cmaes, gp or grid")
    tune.add_argument(
        "--pruner", help="median, halving, hyperband or none (default median; with --sampler grid, none)"
    )
    option(tune, "--jobs", int, 1, "number of trials at once")
    tune.set_defaults(act=_tune, fields=_tune_fields)


def _tune_fields(options: argparse.Namespace | None, rest: list[str]) -> Fields:
    """What ``tune RECIPE --help`` prints below the verb's own options."""
    fields = train_fields(options, rest, "tune")
    if options is None or not options.recipe:
        return fields
    space = search_space(recipe_run(options), options.search, f"murmurate tune {quoted(options.recipe)}")
    searched = ", ".join(f"--search {dimension}" for dimension in space)
    return dataclasses.replace(fields, note=f"Searched, unless --search names others: {searched}")


def _tune(options: argparse.Namespace, rest: list[str]) -> int:
    from murmurate.tuning.space import combinations
    from murmurate.tuning.trials import GRID, check_installed

    is_grid = options.sampler == GRID
    options.pruner = options.pruner or ("none" if is_grid else "median")
    base, command = recipe_run(options, rest), f"murmurate tune {quoted(options.recipe)}"
    check_installed(options.sampler, options.pruner)
    run = changed(base, options, rest, command)
    check_jobs(run, options.jobs)
    space = search_space(run, options.search, command)
    count = len(combinations(space)) if is_grid else 30
    options.trials = options.trials or count
    if searched_and_given := {dimension.name for dimension in space} & given(rest, run, command):
        raise Refusal(
            f"{', '.join(f'--{name}' for name in sorted(searched_and_given))} is searched. Leave it out, or "
            "name what shall be searched with --search."
        )
    if options.passes is not None and any(dimension.name == "env-steps" for dimension in space):
        raise Refusal("--env-steps is searched, and --passes would set it. Leave out --passes.")
    from murmurate.launch import command_launcher
    from murmurate.training.preflight import prepared
    from murmurate.training.run_folder import new_folder
    from murmurate.tuning.objective import check_objective, read_objective
    from murmurate.tuning.study import Study

    engine = command_launcher(run.launcher)
    if engine.dictated_replicas() is not None:
        raise Refusal(
            f"The {run.launcher} launcher starts one run, and tune starts many. Leave out --launcher."
        )
    prepared(run, engine)  # for what it refuses: each trial prepares its own run
    if warning := crowding(run, engine, options.jobs):
        print(warning, flush=True)
    objective = read_objective(options.objective, run)
    check_objective(objective, run)
    study = Study(
        run,
        ["train", *forwarded(options, _TUNE_OPTIONS), *rest],
        _tune_words(options),
        space,
        objective,
        options.out or Path(f"{new_folder(run.recipe)}-study"),
        lambda words: changed(base, options, [*rest, *words], command),
        options.trials,
        options.minutes,
        options.jobs,
        options.sampler,
        options.pruner,
        say=lambda line: print(line, flush=True),
    )
    print(f"{objective.name} is {objective.direction}d; searched: {', '.join(map(str, space))}")
    return study.tune()


def _tune_words(options: argparse.Namespace) -> list[str]:
    """The study's options that differ from their defaults, --trials and --pruner (whose defaults the sampler
    decides): with them the study goes on."""
    words: list[str] = []
    defaults = {"sampler": "tpe", "jobs": 1}
    for name in _TUNE_OPTIONS:
        value = getattr(options, name)
        if value is not None and value != defaults.get(name):
            words += option_words(name, value)
    return words
