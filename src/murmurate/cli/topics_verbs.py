"""The argument parsers of ``murmurate topics``; ``topics*.py`` beside it implement the commands."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from murmurate.cli.options import bool_argument, number_argument, option
from murmurate.cli.run_verbs import report_end
from murmurate.fabric.processes.fork_server import begin_fork_server
from murmurate.ranges import NonNegativeInt, PositiveFloat, PositiveInt, Seed


def add_verbs(verbs: Any) -> None:
    """Add the parsers of ``topics``."""

    def act(options: argparse.Namespace, rest: list[str]) -> int:
        begin_fork_server(rest)
        from murmurate.cli.topics import fit_command

        return report_end(fit_command(options, rest))

    fit = verbs.add_parser("fit", help="find the topics of a corpus")
    fit.add_argument("corpus", nargs="?", type=Path, help="a file or folder; docs/corpora.md says which")
    fit.add_argument(
        "--passes",
        type=number_argument(PositiveFloat),
        help="passes through the corpus (default: 5, but at least 60 updates)",
    )
    fit.add_argument("--strategy", help="how the replicas agree; see: murmurate list strategies")
    fit.add_argument("--out", type=Path, help="run folder (default: runs/topics-<time>)")
    fit.set_defaults(act=act, fields=_lazy("topics", "fit_fields"))
    show = verbs.add_parser(
        "show", help="top words of each topic, as a table, and as a page with a map and sample documents"
    )
    show.add_argument("folder", type=Path)
    option(show, "--words", number_argument(PositiveInt), 10, "words of each topic")
    option(
        show,
        "--samples",
        number_argument(NonNegativeInt),
        3,
        "documents of each topic on the page, with their beginning",
    )
    show.add_argument(
        "--out", type=Path, default=None, help="the page (default: topics.html in the run folder)"
    )
    show.add_argument("--json", action="store_true", help="print the topics as JSON")
    show.set_defaults(act=_lazy("topics_page", "show_command"))
    transform = verbs.add_parser("transform", help="the topics of documents, as .csv, .npz or .parquet")
    transform.add_argument("folder", type=Path, help="folder of the run that found the topics")
    transform.add_argument("corpus", type=Path, help="the run's own or other documents")
    transform.add_argument("--out", type=Path, help="a .csv, .npz or .parquet file")
    transform.add_argument(
        "--csv", action="store_true", help="write CSV whatever --out is called; without --out, print it"
    )
    _add_reading_options(transform)
    transform.set_defaults(act=_lazy("topics_tables", "transform_command"))
    evaluate = verbs.add_parser(
        "evaluate",
        help="perplexity of the test documents, or of other ones",
        description="Perplexities of documents, with what they mean. The one called perplexity (document "
        "completion) lies between 1 and about the size of the vocabulary: compare models by it. "
        "perplexity_bound and perplexity_bound_full are upper bounds of the perplexity of whole documents; "
        "the second includes the evidence bound's terms for the topics, so with few documents it is large.",
    )
    evaluate.add_argument("folder", type=Path, help="folder of the run that found the topics")
    evaluate.add_argument("corpus", type=Path, nargs="?", help="default: the run's test documents")
    _add_reading_options(evaluate)
    option(evaluate, "--seed", number_argument(Seed), 0, "seed of the choice of held-out words")
    evaluate.add_argument("--json", action="store_true", help="print the figures as JSON")
    evaluate.set_defaults(act=_lazy("topics_tables", "evaluate_command"))


def _add_reading_options(verb: argparse.ArgumentParser) -> None:
    """Options for reading the corpus; without them the run's own corpus is read as in training."""
    verb.add_argument("--kind", help="kind of file: docs/corpora.md lists them (default: detected)")
    for name, about in (
        ("--skip-bad", "leave out damaged lines (without a value: true)"),
        ("--one-based", "whether word ids begin at 1"),
        ("--transpose", "the matrix is [words, documents] (without a value: true)"),
    ):
        verb.add_argument(name, type=bool_argument, metavar="true|false", help=about)
    verb.add_argument(
        "--vocabulary",
        help="a file with a word in each line (default: the run's for text, else the one beside the corpus)",
    )
    verb.add_argument(
        "--vocabulary-size",
        type=number_argument(PositiveInt),
        metavar="V",
        help="number of words, where the format does not say it",
    )
    verb.add_argument(
        "--column", help="column of a CSV or JSON-lines file with the text (default: the run's)"
    )
    verb.add_argument(
        "--name-column", help="column of such a file with the documents' names (default: numbers)"
    )
    verb.add_argument("--cache", help="folder for the converted corpus (default: the corpus's folder)")


def with_values(words: list[str]) -> list[str]:
    """``--skip-bad`` and ``--transpose`` as ``--skip-bad=true``; a value may follow them, as in ``topics
    fit``, and argparse would take any word that follows for it."""
    joined: list[str] = []
    for word in words:
        if word.lower() in ("true", "false") and joined and joined[-1] in _TRUE_ALONE:
            joined[-1] = f"{joined[-1].partition('=')[0]}={word}"
        else:
            joined.append(f"{word}=true" if f"{word}=true" in _TRUE_ALONE else word)
    return joined


_TRUE_ALONE = ("--skip-bad=true", "--transpose=true")


def _lazy(module: str, name: str) -> Callable[[argparse.Namespace, list[str]], Any]:
    """Function ``name`` of a module beside this one, which is imported when the function is called."""

    def act(options: argparse.Namespace, rest: list[str]) -> Any:
        return getattr(importlib.import_module(f"murmurate.cli.{module}"), name)(options, rest)

    return act
