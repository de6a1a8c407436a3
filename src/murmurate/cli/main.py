"""The command line: its verbs, their options and exit codes."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import re
import signal
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from murmurate import __version__
from murmurate.cli.fpga import add_verbs as add_fpga
from murmurate.cli.options import number_argument
from murmurate.cli.plan import add_verb as add_plan
from murmurate.cli.topics_verbs import add_verbs
from murmurate.errors import Refusal, RunFailed, printable
from murmurate.fabric.processes.fork_server import begin_fork_server, end_fork_server
from murmurate.ranges import PositiveInt, Seed

FAILED, REFUSED, INTERRUPTED, TERMINATED = 1, 2, 130, 143


class _Parser(argparse.ArgumentParser):
    """Reports errors as a Refusal in one sentence."""

    def error(self, message: str) -> NoReturn:
        raise Refusal(f"{message}. See: {self.prog} --help")


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code (design, section 7)."""
    warnings.formatwarning = _sentence  # type: ignore[assignment]
    if arguments is None:  # this process is the command
        signal.signal(signal.SIGTERM, _terminate)
    try:
        options, rest = _parser().parse_known_args(
            _verb_first(sys.argv[1:] if arguments is None else arguments)
        )
        verb = f"{options.verb} {options.inner}" if options.verb in ("topics", "fpga") else options.verb
        if rest and verb not in ("train", "resume", "simulate", "topics fit", "bench", "plan"):
            raise Refusal(f"{verb} has no option {rest[0]}. See: murmurate {verb} --help")
        code: int = options.act(options, rest)
    except Refusal as refusal:
        print(f"murmurate: {printable(str(refusal))}", file=sys.stderr)
        return REFUSED
    except RunFailed as failure:
        print(f"murmurate: {printable(str(failure))}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt as interrupt:
        print("murmurate: interrupted", file=sys.stderr)
        return TERMINATED if isinstance(interrupt, _Terminated) else INTERRUPTED
    except BrokenPipeError:  # the reader of stdout (head, for example) has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except OSError as error:
        cause = f"{error.filename or 'A file'}: {error.strerror or error}"
        print(
            f"murmurate: {printable(cause)}. Check that the file is there and can be written.",
            file=sys.stderr,
        )
        return FAILED
    finally:
        end_fork_server()
    return code


class _Terminated(KeyboardInterrupt):
    """SIGTERM before or after a run, which has handlers of its own: end as at Ctrl-C, and clean up."""


def _terminate(number: int, frame: object) -> NoReturn:
    raise _Terminated


def _sentence(message: Warning | str, category: type[Warning], *_: object) -> str:
    """Formats a warning like this command line's messages, without the line of code."""
    return f"murmurate: warning: {printable(str(message))}\n"


def _verb_first(arguments: Sequence[str]) -> list[str]:
    """``train --seed 1 pong-gala`` as ``train pong-gala --seed 1``: an option may stand before the name."""
    verb, *rest = arguments or ["--help"]
    if verb not in ("train", "resume", "simulate"):
        return [verb, *rest]
    index = 0
    while index < len(rest) and rest[index].startswith("-"):
        without_value = "=" in rest[index] or rest[index] in ("-h", "--help")
        index += 1 if without_value else 2
    return [verb, *rest[index : index + 1], *rest[:index], *rest[index + 1 :]]


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="murmurate",
        description="Write the learner once; how its replicas agree is a part you swap.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"murmurate {__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    train = verbs.add_parser("train", help="train a recipe", add_help=False, allow_abbrev=False)
    train.add_argument(
        "recipe", nargs="?", help="<world>-<algorithm>, for example pong-gala; see: murmurate list"
    )
    train.add_argument("--strategy", help="how the replicas agree; see: murmurate list strategies")
    train.add_argument("--out", type=Path, help="run folder (default: runs/<recipe>-<time>)")
    train.add_argument("-h", "--help", action="store_true", dest="fields_help")
    train.set_defaults(act=_train)
    simulate = verbs.add_parser(
        "simulate", help="the same on a simulated cluster of any size", add_help=False, allow_abbrev=False
    )
    simulate.add_argument("recipe", nargs="?", help="as for train")
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
    evaluate = verbs.add_parser("eval", help="evaluate a run on games or held-out data")
    evaluate.add_argument("folder", type=Path)
    count = number_argument(PositiveInt)
    evaluate.add_argument("--episodes", type=count, help="games, instead of the run's number")
    evaluate.add_argument("--video", action="store_true", help="write videos/episode.mp4")
    evaluate.add_argument("--best", action="store_true", help="the best checkpoint instead of the last")
    evaluate.add_argument("--seed", type=number_argument(Seed))
    evaluate.add_argument("--json", action="store_true")
    evaluate.set_defaults(act=_eval)
    report = verbs.add_parser("report", help="write report.html for one run, or a comparison of several")
    report.add_argument("folders", type=Path, nargs="+")
    report.add_argument(
        "--out",
        type=Path,
        default=None,
        help="default: report.html in the run's folder; of several, comparison.html here",
    )
    report.set_defaults(act=_report)
    listing = verbs.add_parser(
        "list", help="list recipes, worlds, strategies, agents, fabrics, launchers or benches"
    )
    listing.add_argument("what", nargs="?", default="recipes")
    listing.add_argument("--json", action="store_true")
    listing.set_defaults(act=_list)
    bench = verbs.add_parser("bench", help="benchmark against other libraries and physical limits")
    bench.add_argument("name")
    bench.add_argument("--json", action="store_true")
    bench.add_argument("--full", action="store_true", help="longer and with all peers")
    bench.set_defaults(act=_bench)
    topics = verbs.add_parser(
        "topics", help="topic models: fit, show, transform, evaluate", allow_abbrev=False
    )
    add_verbs(topics.add_subparsers(dest="inner", required=True, metavar="VERB"), report_end)
    add_plan(verbs)
    fpga = verbs.add_parser(
        "fpga", help="a replay's manager as hardware: Verilog, simulation, area and clock"
    )
    add_fpga(fpga.add_subparsers(dest="inner", required=True, metavar="VERB"))
    doctor = verbs.add_parser("doctor", help="check this machine, with advice for what is missing")
    doctor.add_argument("--json", action="store_true")
    doctor.set_defaults(act=_doctor)
    secret = verbs.add_parser(
        "secret",
        help="print a new MURMURATE_SECRET, for runs on several hosts",
        description="Print a random secret. Members of a run on several hosts authenticate and encrypt what "
        "they send each other with the one in MURMURATE_SECRET: set it to the same on every host.",
    )
    secret.set_defaults(act=_secret)
    return parser


def _run(options: argparse.Namespace) -> Any:
    """The recipe's Run, with the strategy of the command line."""
    from murmurate.recipes import recipe
    from murmurate.strategies import strategy

    if options.recipe is None:
        verb = options.verb
        raise Refusal(f"Say what to {verb}, as in: murmurate {verb} pong-gala. See: murmurate list recipes")
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
    """A new folder below ``runs``, without the slashes and colons of Gymnasium ids."""
    return Path("runs") / f"{re.sub('[/:]', '-', name)}-{time.strftime('%Y%m%d-%H%M%S')}"


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


def _eval(options: argparse.Namespace, rest: list[str]) -> int:
    from murmurate.recipes import stored
    from murmurate.training.evaluate import evaluate_folder

    run = stored(options.folder)
    figures = evaluate_folder(
        run,
        options.folder,
        count=options.episodes,
        which="best" if options.best else "last",
        video=options.video,
        seed=options.seed,
    )
    if options.json:
        print(json.dumps(figures))
    else:
        print(run.evaluation.sentence(figures) or "There was nothing to evaluate on.")
        if figures["video"]:
            print(f"video: {figures['video']}")
    return 0


def _report(options: argparse.Namespace, rest: list[str]) -> int:
    from murmurate.recipes import stored
    from murmurate.record.report import report
    from murmurate.training.evaluate import write_picture

    default, more = Path("comparison.html"), []  # for several runs
    if len(options.folders) == 1:
        (folder,) = options.folders
        default = folder / "report.html"
        if not (folder / "videos" / "frames.png").exists():
            write_picture(stored(folder), folder)
        more = stored(folder).evaluation.sections(folder)
    print(report(options.folders, options.out or default, more))
    return 0


def _list(options: argparse.Namespace, rest: list[str]) -> int:
    from murmurate.cli.listing import listing, show

    rows = listing(options.what)
    if options.json:
        print(json.dumps(rows))
    else:
        show(options.what, rows)
    return 0


def _bench(options: argparse.Namespace, rest: list[str]) -> int:
    import psutil

    from murmurate.bench import bench
    from murmurate.cli.options import change

    def end(*_: object) -> None:
        """Kills all processes of the benchmark, including those that are just being started."""
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        sys.exit(128 + signal.SIGTERM)

    signal.signal(signal.SIGTERM, end)
    result = bench(
        options.name,
        full=options.full,
        quiet=options.json,
        options=rest,
        change=lambda plan, words: change(plan, words, f"murmurate bench {options.name}"),
    )
    print(json.dumps(result))
    return 0


def _doctor(options: argparse.Namespace, rest: list[str]) -> int:
    from murmurate.cli.doctor import findings, show

    report = findings()
    if options.json:
        print(json.dumps(report))
    else:
        show(report)
    return 0


def _secret(options: argparse.Namespace, rest: list[str]) -> int:
    from murmurate.launch.secret import drawn_secret

    print(drawn_secret())
    return 0


if __name__ == "__main__":
    sys.exit(main())
