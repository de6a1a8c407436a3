"""``murmurate train``, ``simulate`` and ``resume``."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
import time
from pathlib import Path
from typing import Any

from murmurate.errors import Refusal
from murmurate.fabric.processes.fork_server import begin_fork_server


def add_verbs(verbs: Any) -> None:
    train = verbs.add_parser("train", help="train a recipe", add_help=False, allow_abbrev=False)
    train.add_argument(
        "recipe", nargs="?", help="<world>-<algorithm>, for example pong-gala; see: murmurate list"
    )
    _add_env(train)
    train.add_argument("--strategy", help="how the replicas agree; see: murmurate list strategies")
    train.add_argument("--out", type=Path, help="run folder (default: runs/<recipe>-<time>)")
    train.add_argument("-h", "--help", action="store_true", dest="fields_help")
    train.set_defaults(act=_train)
    simulate = verbs.add_parser(
        "simulate", help="the same on a simulated cluster of any size", add_help=False, allow_abbrev=False
    )
    simulate.add_argument("recipe", nargs="?", help="as for train")
    _add_env(simulate)
    simulate.add_argument("--strategy", help="as for train")
    simulate.add_argument("--out", type=Path, help="run folder (default: runs/<recipe>-simulated-<time>)")
    simulate.add_argument("--json", action="store_true", help="the summary on the last line")
    simulate.add_argument("-h", "--help", action="store_true", dest="fields_help")
    simulate.set_defaults(act=_simulate)
    resume = verbs.add_parser(
        "resume",
        help="continue a run from its folder; --env-steps and the like change its end",
        allow_abbrev=False,
    )
    resume.add_argument("folder", type=Path)
    resume.set_defaults(act=_resume)


def _add_env(verb: Any) -> None:
    verb.add_argument(
        "--env",
        help="an environment of your own: a registered id, module:Id, or a class or "
        "function as module:NAME or FILE.py:NAME",
    )
    verb.add_argument("--algorithm", help="with --env: a2c, ppo, dqn, ...")


def _run(options: argparse.Namespace) -> Any:
    """The recipe's Run, with the strategy of the command line."""
    from murmurate.recipes import recipe, recipe_of
    from murmurate.strategies import strategy

    env, algorithm = getattr(options, "env", None), getattr(options, "algorithm", None)
    if env is not None or algorithm is not None:
        if env is None or algorithm is None or options.recipe:
            raise Refusal(
                "--env and --algorithm go together, in place of a recipe, as in: murmurate train "
                "--env my_env.py:make_env --algorithm a2c"
            )
        run = recipe_of(env, algorithm)
        options.recipe = run.recipe
    elif not options.recipe:
        verb = options.verb
        raise Refusal(f"Say what to {verb}, as in: murmurate {verb} pong-gala. See: murmurate list recipes")
    else:
        run = recipe(options.recipe)
    if options.strategy is not None and options.strategy != run.strategy.name:
        run = dataclasses.replace(run, strategy=strategy(options.strategy)())
    return run


def _train(options: argparse.Namespace, rest: list[str]) -> int:
    if not options.fields_help:
        begin_fork_server(rest)
    from murmurate.cli.options import change, show

    run = _run(options)
    verb = f"murmurate train {options.recipe}"
    if options.fields_help:
        print(f"usage: {verb} [--strategy S] [--out DIR] [--FIELD VALUE ...]\n")
        print("Fields (with their current values):\n" + show(run))
        return 0
    base, run = run, change(run, rest, verb)
    from murmurate.launch import launcher
    from murmurate.recipes import stored
    from murmurate.training.session import train

    engine = launcher(run.launcher)
    if (ranks := engine.dictated_replicas()) is not None:
        run = change(dataclasses.replace(base, replicas=ranks), rest, verb)

    folder = options.out or new_folder(run.recipe)
    finish = train(run, folder, engine, stored)
    return report_end(finish, finish.folder or folder)


def new_folder(name: str) -> Path:
    """A new folder below ``runs``, without the slashes and colons of environments, nor their folders."""
    short = re.sub("[^A-Za-z0-9._+-]", "-", re.sub("^env:(.*/)?", "", name))[-100:].lstrip("-.")
    return Path("runs") / f"{short}-{time.strftime('%Y%m%d-%H%M%S')}"


def _simulate(options: argparse.Namespace, rest: list[str]) -> int:
    from murmurate.cli.options import change, divide, show
    from murmurate.simulation.cluster import Cluster
    from murmurate.simulation.start import simulate

    run, cluster = _run(options), Cluster()
    verb = f"murmurate simulate {options.recipe}"
    if options.fields_help:
        print(f"usage: {verb} [--strategy S] [--out DIR] [--json] [--FIELD VALUE ...]\n")
        print("The cluster (with its current values):\n" + show(cluster))
        print("\nThe run:\n" + show(run))
        return 0
    of_cluster, of_run = divide(rest, cluster, run, verb)
    cluster = change(cluster, of_cluster, verb)
    has_end = any(word.partition("=")[0] in ("--updates", "--minutes") for word in of_run)
    if has_end:  # an explicit end replaces the recipe's, which a thousand replicas would reach at once
        run = dataclasses.replace(run, env_steps=None)
    run = change(run, of_run, verb)
    folder = options.out or new_folder(f"{run.recipe}-simulated")
    finish = simulate(run, cluster, folder, quiet=options.json)
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
    return report_end(finish, folder)


def _resume(options: argparse.Namespace, rest: list[str]) -> int:
    if _launched_here(options.folder):
        begin_fork_server(rest)
    from murmurate.cli.options import change
    from murmurate.launch import launcher
    from murmurate.recipes import stored
    from murmurate.training.session import resume

    finish = resume(
        options.folder, launcher, stored, lambda run: change(run, rest, f"murmurate train {run.recipe}")
    )
    return report_end(finish, finish.folder or options.folder)


def _launched_here(folder: Path) -> bool:
    from murmurate.record.stored import read_object

    try:
        return bool(read_object(folder / "run.json")["launcher"] == "local")
    except (OSError, ValueError, LookupError):  # ``resume`` reports what is wrong with it
        return False


def report_end(finish: Any, folder: Path) -> int:
    """Print how a run ended; returns the exit code."""
    from murmurate.training.checkpoint import kept

    summary = finish.summary
    if summary is None:  # another rank reports it
        return int(finish.code)
    if summary["exit"].startswith("failed"):
        print(f"murmurate: {summary['exit'].rstrip('. ')}. {kept(folder)}", file=sys.stderr)
    if finish.sentence:
        unit, seconds = finish.run.unit, summary["wall_seconds"]
        print(f"{summary['env_steps']:,} {unit} in {seconds:.0f} s. {finish.sentence}")
    dead = [rank for rank in summary["dead_replicas"] if rank < summary["replicas"]]  # else the centre's
    if len(dead) < summary["replicas"]:
        for rank in dead:
            print(f"replica {rank} died during the run; the others continued")
    print(f"The run is in {folder} — next: murmurate {finish.run.evaluation.next_command} {folder}")
    return int(finish.code)
