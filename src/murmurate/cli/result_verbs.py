"""``murmurate eval`` and ``report``."""

from __future__ import annotations

import argparse
import functools
import json
import sys
from pathlib import Path
from typing import Any

from murmurate.cli.options import bool_argument, number_argument
from murmurate.errors import Refusal
from murmurate.ranges import PositiveInt, Seed

_EPISODES = (
    "number of games, samples, documents, rows, or test images (drawn at random), instead of the run's, or "
    "all"
)
WORLD_PLACES = {  # the paths that a world may need; name of the field -> help
    "path": "the data: a file, a folder, or a pattern of shards",
    "test_path": "the shards with the test images",
    "vocabulary": "the file with the words of a corpus",
    "stop_words": "the file with the stop words of a corpus",
    "cache": "the folder in which a corpus is kept once it has been read",
}


def add_verbs(verbs: Any) -> None:
    evaluate = verbs.add_parser("eval", help="evaluate a run on games or held-out data")
    evaluate.add_argument("folder", type=Path)
    count = number_argument(PositiveInt)
    evaluate.add_argument("--episodes", type=count, help=_EPISODES)
    evaluate.add_argument("--video", action="store_true", help="write videos/episode.mp4")
    evaluate.add_argument(
        "--best",
        action="store_true",
        help="the best checkpoint instead of the last (of runs on simulators only)",
    )
    add_checkpoint(evaluate)
    seed_help = "of the games, or of the draw of test images"
    evaluate.add_argument("--seed", type=number_argument(Seed), help=seed_help)
    evaluate.add_argument(
        "--sample", action="store_true", help="draw actions from the policy instead of the most probable one"
    )
    add_env_in_place(evaluate)
    evaluate.add_argument("--json", action="store_true")
    places = evaluate.add_argument_group("the world", "where the data are, for this evaluation only")
    for name, about in WORLD_PLACES.items():
        places.add_argument(_option(name), metavar="PATH", help=about)
    places.add_argument(
        _option("skip_bad"),
        metavar="true|false",
        nargs="?",
        const=True,
        type=bool_argument,
        help="leave out images that cannot be read, and count them",
    )
    evaluate.add_argument(
        "--images",
        type=Path,
        metavar="DIR",
        help="a folder with a folder of each class, whose images are classified in place of the run's test "
        "images",
    )
    evaluate.set_defaults(act=_eval)
    report = verbs.add_parser("report", help="write report.html for one run, or a comparison of several")
    report.add_argument(
        "folders", type=Path, nargs="+", help="run folders, sweep folders, or one study folder"
    )
    report.add_argument(
        "--out",
        type=Path,
        default=None,
        help="file (default: report.html in the run's folder; for several runs, comparison.html here)",
    )
    report.add_argument("--json", type=Path, metavar="FILE", help="write the numbers of the page here, too")
    report.add_argument(
        "--metric",
        action="append",
        default=[],
        metavar="NAME",
        help="draw this field of metrics.jsonl, too; several times",
    )
    figures_help = "write the figures of the page there, too, as SVG files"
    report.add_argument("--figures", type=Path, metavar="DIR", help=figures_help)
    add_env_in_place(report)
    report.set_defaults(act=_report)


def _option(name: str) -> str:
    return f"--world.{name.replace('_', '-')}"


def add_checkpoint(verb: Any) -> None:
    """Add ``--checkpoint``, for verbs that load parameters."""
    verb.add_argument(
        "--checkpoint",
        type=Path,
        metavar="PATH",
        help="another checkpoint of the run instead of the last: a copy of DIR/checkpoints/last, say",
    )


def add_env_in_place(verb: Any) -> None:
    """Add ``--env``, for verbs that read a run folder."""
    verb.add_argument(
        "--env",
        help="class or function that makes the environments, where the one that the run names is gone: "
        "module:NAME or FILE.py:NAME",
    )


def _eval(options: argparse.Namespace, rest: list[str]) -> int:
    from murmurate.api.fields import with_places
    from murmurate.evaluation.interface import reporting
    from murmurate.recipes import relocated, stored
    from murmurate.training.evaluate import evaluate_folder, without_nan
    from murmurate.worlds.own import replaced_by

    given = {name: vars(options)[f"world.{name}"] for name in (*WORLD_PLACES, "skip_bad")}
    places = {name: value for name, value in given.items() if value is not None}
    say = functools.partial(print, file=sys.stderr, flush=True)
    with replaced_by(options.env) as replacement, reporting(say):
        run = with_places(relocated(stored(options.folder), replacement), places, _option)
        figures = evaluate_folder(
            run,
            options.folder,
            count=options.episodes,
            which="best" if options.best else "last",
            video=options.video,
            seed=options.seed,
            sample=options.sample,
            path=options.checkpoint,
            images=options.images,
        )
    if options.json:
        print(json.dumps(without_nan(figures)))
    else:
        print(run.evaluation.sentence(figures) or "There was nothing to evaluate on.")
        if figures["video"]:
            print(f"video: {figures['video']}")
    return 0


def _report(options: argparse.Namespace, rest: list[str]) -> int:
    from murmurate.recipes import relocated, stored
    from murmurate.record.report import report
    from murmurate.record.sweeps import distinct, run_folders
    from murmurate.training.evaluate import write_picture
    from murmurate.worlds.own import replaced_by

    default_out, more = Path("comparison.html"), []  # for several runs
    if len(options.folders) == 1 and (options.folders[0] / "study.json").is_file():
        from murmurate.tuning.study import rewrite_page

        if options.out is not None:
            raise Refusal("The page of a study is report.html in its folder. Leave out --out.")
        if options.json is not None:
            raise Refusal(
                'The numbers of a study are JSON in its page, in <script id="data">. Leave out --json.'
            )
        if options.metric:
            raise Refusal("--metric is for runs. Give the folders of trials, or leave it out.")
        if options.figures is not None:
            raise Refusal("The figures of a study are in its page alone. Leave out --figures.")
        print(rewrite_page(options.folders[0])[0])
        return 0
    named = run_folders(options.folders)
    folders = distinct(named)
    if repeats := len(named) - len(folders):
        runs = "1 run that was" if repeats == 1 else f"{repeats} runs that were"
        print(f"murmurate: left out {runs} named before, so that each counts once", file=sys.stderr)
    if len(folders) > 1 and len(options.folders) == 1:
        default_out = options.folders[0] / "report.html"  # the folder of a sweep
    if len(folders) == 1:
        (folder,) = folders
        default_out = folder / "report.html"
        with replaced_by(options.env) as replacement:
            run = relocated(stored(folder), replacement)
            picture, newest = folder / "videos" / "frames.png", folder / "checkpoints" / "last" / "state.json"
            ages = [path.stat().st_mtime if path.exists() else 0.0 for path in (picture, newest)]
            if ages[0] <= ages[1]:  # there is none, or it is of an earlier policy
                write_picture(run, folder)
            more = run.evaluation.sections(folder)
    out = options.out or default_out
    print(report(folders, out, more, options.json, options.figures, options.metric))
    return 0
