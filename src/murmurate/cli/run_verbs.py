"""``murmurate train``, ``simulate`` and ``resume``."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from murmurate.cli import sweep
from murmurate.cli.help import Fields
from murmurate.cli.options import change, divide, given, number_argument
from murmurate.cli.result_verbs import add_env_in_place
from murmurate.errors import Refusal, quoted
from murmurate.fabric.processes.fork_server import begin_fork_server
from murmurate.ranges import PositiveFloat

_INTERRUPTED = (128 + signal.SIGINT, 128 + signal.SIGTERM)


def add_verbs(verbs: Any) -> None:
    train = verbs.add_parser("train", help="train a recipe")
    train.add_argument(
        "recipe", nargs="?", help="<world>-<algorithm>, for example pong-gala; see: murmurate list"
    )
    add_env(train)
    add_passes(train)
    train.add_argument("--strategy", help="how the replicas agree; see: murmurate list strategies")
    train.add_argument("--out", type=Path, help="run folder (default: runs/<recipe>-<time>)")
    train.add_argument(
        "--continue",
        dest="goes_on",
        action="store_true",
        help="go on with the run in --out, if there is one; else begin it",
    )
    train.add_argument(
        "--dry-run", action="store_true", help="print all settings, after every check that precedes a run"
    )
    sweep.add_options(train)
    train.set_defaults(act=_train, fields=train_fields)
    simulate = verbs.add_parser("simulate", help="train a recipe on a simulated cluster of any size")
    simulate.add_argument("recipe", nargs="?", help="as for train")
    add_env(simulate)
    add_passes(simulate)
    simulate.add_argument("--strategy", help="as for train")
    simulate.add_argument("--out", type=Path, help="run folder (default: runs/<recipe>-simulated-<time>)")
    simulate.add_argument("--json", action="store_true", help="print the summary as JSON on the last line")
    simulate.set_defaults(act=_simulate, fields=_simulate_fields)
    resume = verbs.add_parser(
        "resume", help="continue a run from its folder; --env-steps and the like change its end"
    )
    resume.add_argument("folder", type=Path, help="the folder that murmurate train wrote (its --out)")
    add_env_in_place(resume)
    resume.set_defaults(act=_resume, fields=_resume_fields)


def add_env(verb: Any) -> None:
    verb.add_argument(
        "--env",
        help="an environment of your own: a registered id, module:Id, or a class or "
        "function as module:NAME or FILE.py:NAME",
    )
    verb.add_argument("--algorithm", help="with --env: a2c, ppo, dqn, ...")


def add_passes(verb: Any) -> None:
    verb.add_argument(
        "--passes",
        type=number_argument(PositiveFloat),
        help="passes through the training examples of a data set, after which the run ends",
    )


def train_fields(options: argparse.Namespace | None, rest: list[str], verb: str = "train") -> Fields:
    """What ``train RECIPE --help`` prints: the recipe's fields; without a recipe, those that all have."""
    from murmurate.recipes import recipe

    if options is None or not (options.recipe or getattr(options, "env", None)):
        return Fields(
            f"murmurate {verb} RECIPE [--strategy S] [--out DIR] [--FIELD VALUE ...]",
            [("options of every run", recipe("cartpole-a2c"))],
            general=True,
            note=f"The agent, the strategy, the world and the rest of a recipe have options too, with their "
            f"defaults: murmurate {verb} cartpole-a2c --help. Recipes: murmurate list recipes",
        )
    run = recipe_run(options)
    usage = f"murmurate {verb} {run.recipe} [--strategy S] [--out DIR] [--FIELD VALUE ...]"
    return Fields(usage, [("the run", run)], note=_BARE_NAMES)


_BARE_NAMES = "The group in front of an option's name may be left out where no other option has that name."


def _simulate_fields(options: argparse.Namespace | None, rest: list[str]) -> Fields:
    from murmurate.simulation.cluster import Cluster

    fields = train_fields(options, rest, "simulate")
    note = f"{fields.note} --minutes are minutes of virtual time here."
    configs = [("the simulated cluster", Cluster()), *fields.configs]
    return dataclasses.replace(fields, configs=configs, note=note)


def _resume_fields(options: argparse.Namespace | None, rest: list[str]) -> Fields:
    """The fields of the folder's run that may change; without a folder, those that all recipes have."""
    from murmurate.recipes import recipe, stored
    from murmurate.training.data_record import place_names
    from murmurate.worlds.own import replaced_by

    general = options is None
    with replaced_by(None if options is None else options.env):
        run = recipe("cartpole-a2c") if options is None else stored(options.folder)
    note = "What a run has learned depends on its other fields, so they stay as they are."
    folder = "DIR" if options is None else quoted(options.folder)
    movable = {field.name for field in dataclasses.fields(run) if field.metadata.get("movable")}
    return Fields(
        f"murmurate resume {folder} [--FIELD VALUE ...]",
        [("what may change", run)],
        general,
        note,
        only=frozenset(movable | set(place_names(run))),
    )


def recipe_run(options: argparse.Namespace, rest: Sequence[str] = ()) -> Any:
    """The recipe's Run, with the strategy of the command line. If ``--env`` and ``--algorithm`` are given in
    place of a recipe, ``options`` gets the name of the recipe that they make. rest: words that no verb's
    option took.

    Raises Refusal if there is no such recipe, algorithm or strategy, or none is named.
    """
    from murmurate.recipes import recipe, recipe_of
    from murmurate.strategies import strategy

    env, algorithm = getattr(options, "env", None), getattr(options, "algorithm", None)
    if env is not None or algorithm is not None:
        if env is None or algorithm is None or options.recipe:
            raise _half_named(options, rest)
        run = recipe_of(env, algorithm)
        options.recipe, options.env, options.algorithm = run.recipe, None, None  # the recipe names both
    elif not options.recipe:
        verb = options.verb
        raise Refusal(f"Say what to {verb}, as in: murmurate {verb} pong-gala. See: murmurate list recipes")
    else:
        run = recipe(options.recipe)
    if options.strategy is not None and options.strategy != run.strategy.name:
        run = dataclasses.replace(run, strategy=strategy(options.strategy)())
    return run


def changed(run: Any, options: argparse.Namespace, words: Sequence[str], command: str) -> Any:
    """A recipe's ``run`` with the fields that ``words`` name (``change``), and the end that ``--passes`` or
    ``words`` give it. Raises Refusal."""
    from murmurate.training.ends import ENDS, after_passes, without_recipe_end

    ends = ENDS & {name.replace("-", "_") for name in given(words, run, command)}
    run = change(without_recipe_end(run, ends), words, command)
    return run if options.passes is None else after_passes(run, options.passes, ends)


def _half_named(options: argparse.Namespace, rest: Sequence[str]) -> Refusal:
    """The refusal of ``--env`` without ``--algorithm``, the reverse, and of either beside a recipe."""
    for word in rest:
        name = word.partition("=")[0]
        missing = [f"--{each}" for each in ("env", "algorithm") if getattr(options, each) is None]
        if word.startswith("--") and (near := difflib.get_close_matches(name, missing, n=1)):
            return Refusal(f"There is no option {name}. Did you mean {near[0]}?")
    # names of recipes with a colon begin with one of these
    is_env = ":" in (options.recipe or "") and not options.recipe.startswith(("env:", "gym:"))
    if is_env and options.algorithm is not None:
        return Refusal(
            f"{options.recipe} is no recipe. If it is an environment: --env {options.recipe} --algorithm "
            f"{options.algorithm}"
        )
    if options.recipe:
        given = "--env" if options.algorithm is None else "--algorithm"
        return Refusal(
            f"The recipe {options.recipe} names environment and algorithm: leave out {given}, or give both "
            "--env and --algorithm in place of the recipe."
        )
    return Refusal(
        "--env and --algorithm go together, in place of a recipe, as in: murmurate train "
        "--env my_env.py:make_env --algorithm a2c"
    )


def _train(options: argparse.Namespace, rest: list[str]) -> int:
    if options.seeds is None and not options.dry_run:
        begin_fork_server(rest)
    run = recipe_run(options, rest)
    verb = f"murmurate train {quoted(options.recipe)}"
    base, run = run, changed(run, options, rest, verb)
    if options.seeds is not None:
        if options.dry_run:
            raise Refusal("--dry-run is for one run, and those of --seeds are alike. Leave out --seeds.")
        if options.goes_on:
            raise Refusal("--seeds goes on with the runs in its folder by itself. Leave out --continue.")
        return sweep.sweep(run, options, rest)
    if options.jobs != 1:
        raise Refusal("--jobs is for several runs. Give --seeds, as in --seeds 0-4, or leave it out.")
    from murmurate.launch import command_launcher
    from murmurate.recipes import stored
    from murmurate.training.session import train

    engine = command_launcher(run.launcher)
    if (ranks := engine.dictated_replicas()) is not None:
        run = changed(dataclasses.replace(base, replicas=ranks), options, rest, verb)
    if options.dry_run:
        # this may go on with the run of an earlier start in that folder
        is_new = ranks is None and not options.goes_on
        return _show(run, engine, options.out if is_new else None)
    return report_end(train(run, options.out, engine, stored, goes_on=options.goes_on))


def _show(run: Any, engine: Any, out: Path | None) -> int:
    """Check ``run``, and print its settings and the memory that it needs. Raises Refusal."""
    from murmurate.training.memory import needed_bytes, planned_bytes
    from murmurate.training.preflight import prepared, resolved
    from murmurate.training.run_folder import plain, refuse_taken

    run = resolved(prepared(run, engine))
    if out is not None:
        refuse_taken(out)
    print(json.dumps(plain(run), indent=2))
    size = planned_bytes(run)
    memory = "" if size is None else f", and would need at least {needed_bytes(run, size) / 2**30:.2f} GiB"
    checked = f"{run.recipe} passes every check that precedes a run{memory}. Nothing was started."
    print(checked, file=sys.stderr)  # beside the settings, which may go to a file
    return 0


def _simulate(options: argparse.Namespace, rest: list[str]) -> int:
    from murmurate.simulation.cluster import Cluster
    from murmurate.simulation.start import simulate

    run, cluster = recipe_run(options, rest), Cluster()
    verb = f"murmurate simulate {quoted(options.recipe)}"
    cluster_words, run_words = divide(rest, cluster, run, verb)
    cluster = change(cluster, cluster_words, verb)
    # an explicit end replaces the recipe's, which a thousand replicas would reach at once
    if given(run_words, run, verb) & {"updates", "minutes"}:
        run = dataclasses.replace(run, env_steps=None)
    run = changed(run, options, run_words, verb)
    finish = simulate(run, cluster, options.out, quiet=options.json)
    if options.json:
        print(json.dumps(finish.summary))
        return int(finish.code)
    summary = finish.summary or {}
    shares = ", ".join(
        f"{summary[f'share_{what}']:.1%} {what}" for what in ("computing", "waiting", "exchanging", "idle")
    )
    print(
        f"{summary['virtual_seconds']:.4g} virtual seconds: {shares}; "
        f"{summary['updates_per_virtual_second']:,.0f} updates/s, {summary['bytes_exchanged']:,} bytes"
    )
    return report_end(finish)


def _resume(options: argparse.Namespace, rest: list[str]) -> int:
    if any(word.partition("=")[0] == "--strategy" for word in rest):
        raise Refusal("The strategy cannot change on resume. Leave out --strategy, or train anew.")
    if _launcher_is_local(options.folder):
        begin_fork_server(rest)
    from murmurate.launch import command_launcher
    from murmurate.recipes import relocated, stored
    from murmurate.training.session import resume
    from murmurate.worlds.own import replaced_by

    with replaced_by(options.env) as replacement:
        finish = resume(
            options.folder,
            command_launcher,
            stored,
            lambda run: change(run, rest, f"murmurate resume {quoted(options.folder)}"),
            lambda run: relocated(run, replacement),
        )
    return report_end(finish)


def _launcher_is_local(folder: Path) -> bool:
    from murmurate.record.stored import read_object

    try:
        return bool(read_object(folder / "run.json")["launcher"] == "local")
    except (OSError, ValueError, LookupError):  # ``resume`` reports what is wrong with it
        return False


def report_end(finish: Any) -> int:
    """Print how a run ended; returns the exit code."""
    from murmurate.training.checkpoint import kept_sentence
    from murmurate.training.run_folder import command_for

    summary, folder, prefix = finish.summary, finish.folder, finish.command_prefix
    if summary is None:  # another rank reports it
        return int(finish.code)
    failed = summary["exit"].startswith("failed")
    if failed:
        if finish.error is not None:
            traceback.print_exception(finish.error)
        kept = kept_sentence(folder, finish.resumable and not finish.evaluation_cut, prefix)
        print(f"murmurate: {summary['exit'].rstrip('. ')}. {kept}", file=sys.stderr)
    if finish.sentence:
        unit, seconds = finish.run.unit, summary["wall_seconds"]
        print(f"{summary['env_steps']:,} {unit} in {seconds:.0f} s. {finish.sentence}")
    dead = [rank for rank in summary["dead_replicas"] if rank < summary["replicas"]]  # the others are centres
    if len(dead) < summary["replicas"] and not failed:
        for rank in dead:
            print(f"replica {rank} died during the run; the others continued")
    saved = finish.resumable and (folder / "checkpoints" / "last").exists()
    is_interrupted = finish.code in _INTERRUPTED
    if is_interrupted and not saved and finish.resumable:
        print(kept_sentence(folder, command_prefix=prefix))
    next_command = "resume" if saved and is_interrupted else finish.run.evaluation.next_command
    if finish.evaluation_cut:
        if not failed:
            print("Training is complete; only its evaluation was cut")
        next_command = "eval"
    if failed and not saved:
        logs = f", and what its processes printed in {folder / 'logs'}" * (folder / "logs").exists()
        print(f"The run is in {folder}{logs}")
    else:
        print(f"The run is in {folder} — next: {command_for(next_command, folder, prefix)}")
    return int(finish.code)
