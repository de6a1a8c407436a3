"""``murmurate topics``: fit, show and evaluate topic models, and transform documents."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import html
import json
import os
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import rich.console
import rich.table
import rich.text

from murmurate.cli.help import Fields
from murmurate.cli.options import change
from murmurate.datasets.corpus import Corpus, RemappedCorpus
from murmurate.datasets.corpus_world import CorpusWorld
from murmurate.datasets.interface import Split
from murmurate.datasets.reading import Skipped, detect_kind
from murmurate.datasets.vocabulary import vocabulary_beside
from murmurate.errors import MissingExtra, Refusal
from murmurate.evaluation.held_out import perplexities
from murmurate.launch import launcher
from murmurate.recipes import recipe, stored
from murmurate.strategies import strategy
from murmurate.training import checkpoint
from murmurate.training.data_record import check_data, read_fingerprint, refuse_missing
from murmurate.training.restore import load_agent
from murmurate.training.run import Run
from murmurate.training.session import Finish, train
from murmurate.workloads.topics import Topics

_SIMILAR = 0.4  # diversity below which topics are hard to distinguish

_SHORT = {  # options of ``fit`` by shorter names
    **{name: f"agent.{name}" for name in ("topics", "batch", "alpha", "prior", "iterations", "tolerance")},
    **{
        name: f"agent.{name}"
        for name in ("step-rule", "rate", "delay", "forgetting", "init", "validate-every")
    },
    **{
        name: f"world.{name}"
        for name in (
            "kind",
            "vocabulary",
            "validation",
            "test",
            "skip-bad",
            "cache",
            "one-based",
            "transpose",
            "vocabulary-size",
            "min-letters",
            "stop-words",
            "min-df",
            "max-df",
            "max-vocabulary",
        )
    },
}


def fit(run: Run, folder: Path, passes: float | None = 5.0) -> Finish:
    """Train ``run``, for so many passes through its corpus where it names no other end."""
    if passes is not None:
        if not passes > 0:
            raise Refusal(f"passes is {passes:g}; give a positive number.")
        documents = run.world.spec().examples
        run = dataclasses.replace(run, env_steps=max(1, round(passes * documents)))
    return train(run, folder, launcher(run.launcher), stored)


def fit_fields(options: argparse.Namespace | None, rest: list[str]) -> Fields:
    """What ``topics fit --help`` prints."""
    usage = "murmurate topics fit CORPUS [--passes N] [--strategy S] [--out DIR] [--FIELD VALUE ...]"
    note = f"Shorter names: {', '.join(f'--{short}' for short in _SHORT)}"
    return Fields(usage, [("the run", _fit_run(options))], note=note)


def _fit_run(options: argparse.Namespace | None) -> Run:
    run = recipe("corpus-lda")
    if options is not None and options.strategy not in (None, run.strategy.name):
        run = dataclasses.replace(run, strategy=strategy(options.strategy)())
    return run


def fit_command(options: argparse.Namespace, rest: list[str]) -> tuple[Finish, Path]:
    """``topics fit``: how the run ended, and its folder."""
    run = _fit_run(options)
    verb = "murmurate topics fit"
    if options.corpus is None:
        raise Refusal(f"Say which corpus, as in: {verb} docword.nytimes.txt.gz --topics 50")
    has_end = any(word.partition("=")[0] in ("--env-steps", "--updates", "--minutes") for word in rest)
    passes = options.passes if options.passes is not None or has_end else 5.0
    world = CorpusWorld(path=str(options.corpus))
    run = dataclasses.replace(run, world=world, env_steps=None if has_end else run.env_steps)
    run = change(run, _long(rest), verb)
    folder = options.out or Path("runs") / f"topics-{time.strftime('%Y%m%d-%H%M%S')}"
    finish = fit(run, folder, passes)
    return finish, finish.folder or folder


def _long(words: Sequence[str]) -> list[str]:
    """The options with short names replaced by full ones."""
    long = []
    for word in words:
        name, equals, value = word.removeprefix("--").partition("=")
        long.append(f"--{_SHORT[name]}{equals}{value}" if word.startswith("--") and name in _SHORT else word)
    return long


@dataclasses.dataclass(frozen=True)
class FittedTopics:
    """A run's topics and prior, its corpus, and the corpus's fingerprint at the time of the run."""

    topics: Topics
    prior: float
    world: CorpusWorld
    folder: Path
    fingerprint: Mapping[str, Any]

    @property
    def vocabulary(self) -> tuple[str, ...] | None:
        words = self.fingerprint["vocabulary"]
        return None if words is None else tuple(words)

    @property
    def vocabulary_size(self) -> int:
        return int(self.fingerprint["vocabulary_size"])

    def divided(self) -> Split:
        """Raises Refusal where the corpus is gone or has changed."""
        refuse_missing(self.world)
        check_data(self.folder, self.world)
        return self.world.divided()


def load(folder: Path) -> FittedTopics:
    """The topics of a run folder's newest checkpoint. Raises Refusal if there are none."""
    run = stored(folder)
    learner = load_agent(run, checkpoint.newest(folder / "checkpoints"))
    fingerprint = read_fingerprint(folder)
    topics = learner.estimate() if fingerprint is not None else None
    if fingerprint is None or not isinstance(topics, Topics):
        raise Refusal(f"{run.recipe} is no topic model; fit one with: murmurate topics fit")
    return FittedTopics(topics, learner.model.prior, cast(CorpusWorld, run.world), folder, fingerprint)


def _named(fitted: FittedTopics) -> Any:
    """A function from word ids to words, or to the id itself where the corpus has no vocabulary."""
    return str if fitted.vocabulary is None else fitted.vocabulary.__getitem__


def _coherence(fitted: FittedTopics) -> list[float | None]:
    """[K]; with a warning None where the corpus is missing."""
    try:
        train_, _, _ = fitted.divided()
    except Refusal as refusal:
        warnings.warn(f"no coherence: {refusal}", stacklevel=2)
        return [None] * fitted.topics.count
    coherence: list[float | None] = fitted.topics.coherence(
        train_.select(range(min(len(train_), 20_000)))
    ).tolist()
    return coherence


def show_command(options: argparse.Namespace, rest: list[str]) -> int:
    if options.words < 1:
        raise Refusal(f"words is {options.words}; show at least one.")
    fitted = load(options.folder)
    name = _named(fitted)
    weights = fitted.topics.weights().tolist()
    tops = fitted.topics.top_words(options.words)
    coherence = _coherence(fitted)
    rows = [
        {
            "topic": k,
            "weight": weights[k],
            "coherence": coherence[k],
            "words": [{"word": name(word), "share": share} for word, share in tops[k]],
        }
        for k in sorted(range(fitted.topics.count), key=lambda k: -weights[k])
    ]
    page = options.out or options.folder / "topics.html"
    with _writing(page):
        page.write_text(_page(fitted.world.path, rows), encoding="utf-8")
    if options.json:
        print(json.dumps(rows))
        return 0
    table = rich.table.Table(box=None, pad_edge=False, header_style="bold")
    for column in ("topic", "weight", "npmi", "words"):
        table.add_column(column, justify="left" if column == "words" else "right")
    for row in rows:
        words = " ".join(one["word"] for one in row["words"])
        table.add_row(
            str(row["topic"]), f"{row['weight']:.1%}", _plain(row["coherence"]), rich.text.Text(words)
        )
    rich.console.Console().print(table)
    _print_diversity(fitted.topics)
    print(f"With pictures: {page}")
    return 0


def _print_diversity(topics: Topics) -> None:
    """Print how different the topics are, and a remedy where they are similar."""
    diversity = topics.diversity()
    print(f"diversity {diversity:.2f}: the share of different words among the likeliest of the topics")
    if topics.count > 1 and diversity < _SIMILAR:
        print("The topics are similar. Use more steps (--passes, a smaller --batch) or fewer topics.")


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Raises Refusal where ``path`` cannot be written."""
    try:
        yield
    except OSError as error:
        raise Refusal(f"{path} cannot be written: {error.strerror}. Name another with --out.") from error


def _plain(coherence: float | None) -> str:
    return "-" if coherence is None else f"{coherence:.2f}"


def _page(path: str, rows: list[dict[str, Any]]) -> str:
    """An HTML page with bars for each topic's weight and the shares of its words."""
    blocks = []
    most = max(row["weight"] for row in rows)
    for row in rows:
        top = max(one["share"] for one in row["words"])
        bars = "".join(
            f"<tr><td>{html.escape(one['word'])}</td>"
            f'<td><i style="width:{9 * one["share"] / top:.2f}em"></i>{one["share"]:.2%}</td></tr>'
            for one in row["words"]
        )
        caption = f"{row['weight']:.1%} of all words, NPMI {_plain(row['coherence'])}"
        weight = f'<b style="width:{100 * row["weight"] / most:.1f}%"></b>'
        blocks.append(
            f"<section><h2>{row['topic']} <small>{caption}</small></h2>{weight}"
            f"<table>{bars}</table></section>"
        )
    title = f"Topics of {html.escape(Path(path).name)}"
    return (
        f"<!doctype html><meta charset=utf-8>{_POLICY}<title>{title}</title><style>{_STYLE}</style>"
        f"<h1>{title}</h1>" + (f"<main>{''.join(blocks)}</main>\n")
    )


_POLICY = (
    "<meta http-equiv=Content-Security-Policy content=\"default-src 'none'; style-src 'unsafe-inline'\">"
)
_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 75em; padding: 0 1em; color: #222 }
main { display: grid; grid-template-columns: repeat(auto-fill, minmax(19em, 1fr)); gap: 1.6em }
h1 { font-weight: 600 } h2 { font-size: 1.05em; margin: 0 } small { font-weight: 400; color: #666 }
b { display: block; height: 4px; background: #2a6fb0; margin: .3em 0 .5em; border-radius: 2px }
td { padding: 0 .8em 0 0; font-size: .92em; color: #444 } td:first-child { color: #111; width: 8em }
i { display: inline-block; height: .7em; background: #9cc3e4; margin-right: .5em; border-radius: 2px }
@media (prefers-color-scheme: dark) { body { background: #16181b; color: #ddd } td { color: #aaa }
  td:first-child { color: #eee } small { color: #999 } i { background: #39648a } b { background: #5aa0de } }
"""


_READING_OPTIONS = ("kind", "skip_bad", "one_based", "transpose", "vocabulary", "vocabulary_size", "cache")


def _other(fitted: FittedTopics, options: argparse.Namespace) -> tuple[Corpus | RemappedCorpus, Skipped]:
    """The corpus of the options in the run's vocabulary, without unknown words; and what of it was skipped.

    Raises Refusal where the words of the corpus cannot be identified.
    """
    path = os.path.abspath(options.corpus)
    world = fitted.world if path == fitted.world.path else CorpusWorld(path=path)
    changes = {name: value for name in _READING_OPTIONS if (value := getattr(options, name)) is not None}
    world = dataclasses.replace(world, **changes)
    instead: dict[str, Any] = {"kind": world.kind or detect_kind(Path(path))}
    if instead["kind"] == "text":
        if fitted.vocabulary is None:
            raise Refusal(
                f"{path} is text, and the run was fitted without names of its {fitted.vocabulary_size:,} "
                "words, so words cannot be matched. Fit anew with --vocabulary, or give a corpus of ids."
            )
        if options.vocabulary is None:
            instead["vocabulary"] = fitted.vocabulary
    elif instead["kind"] in ("lda-c", "svmlight") and not (
        world.vocabulary_size or world.vocabulary or vocabulary_beside(Path(path)).exists()
    ):
        instead["vocabulary_size"] = fitted.vocabulary_size
    other, skipped = world.read_as(**instead)
    if other.vocabulary is None or fitted.vocabulary is None or other.vocabulary == fitted.vocabulary:
        if other.vocabulary_size != fitted.vocabulary_size:
            raise Refusal(
                f"{path} is over {other.vocabulary_size:,} words, the topics over "
                f"{fitted.vocabulary_size:,}. "
                "Give a corpus with the same vocabulary, or one that names its words."
            )
        return other, skipped
    return other.with_vocabulary(fitted.vocabulary), skipped


def transform_command(options: argparse.Namespace, rest: list[str]) -> int:
    if options.out.suffix not in (".npz", ".parquet"):
        raise Refusal(f"{options.out} is neither .npz nor .parquet: say which with --out.")
    if not options.out.resolve().parent.is_dir():  # checked before the work is done
        raise Refusal(f"There is no folder {options.out.resolve().parent} to write to. Make it first.")
    fitted = load(options.folder)
    corpus, skipped = _other(fitted, options)
    weights = fitted.topics.transform(corpus)
    documents = np.setdiff1d(np.arange(len(corpus) + len(skipped.documents)), skipped.documents)
    with _writing(options.out):
        if options.out.suffix == ".npz":
            np.savez_compressed(options.out, topics=weights, documents=documents)
        else:
            _write_parquet(options.out, weights, documents)
    print(f"{len(weights):,} documents x {weights.shape[1]} topics in {options.out}")
    if skipped.causes or len(skipped.documents):
        print(f"{skipped}; the column documents says which row is which")
    return 0


def _write_parquet(path: Path, weights: Any, documents: Any) -> None:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise MissingExtra("pyarrow", "topics", "A parquet file") from error
    columns = {"documents": documents} | {f"topic_{k}": weights[:, k] for k in range(weights.shape[1])}
    pyarrow.parquet.write_table(pyarrow.table(columns), path)


def evaluate_command(options: argparse.Namespace, rest: list[str]) -> int:
    fitted, skipped = load(options.folder), Skipped()
    if options.corpus is None:
        _, _, test = fitted.divided()
        documents: Corpus | RemappedCorpus = test.select(range(len(test)))
        if not len(documents):
            raise Refusal("The run has no test documents. Name a corpus to evaluate on.")
    else:
        documents, skipped = _other(fitted, options)
    result = perplexities(fitted.topics, fitted.prior, documents, options.seed)
    if options.json:
        print(json.dumps(result | {"skipped": dict(skipped.causes)}))
        return 0
    if skipped.causes:
        print(skipped)
    for key, value in result.items():
        print(f"{key:<24}{value:,.1f}" if isinstance(value, float) else f"{key:<24}{value}")
    return 0
