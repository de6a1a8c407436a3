"""``murmurate topics fit``, and what the other verbs of ``topics`` read: a fitted model and a corpus."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from murmurate.cli.help import Fields
from murmurate.cli.options import change, given
from murmurate.datasets._text_files import TEXT_KINDS, files_of
from murmurate.datasets._texts import TextSource
from murmurate.datasets.corpus import Corpus, RemappedCorpus
from murmurate.datasets.corpus_world import CorpusWorld
from murmurate.datasets.interface import Split
from murmurate.datasets.reading import Skipped, detect_kind
from murmurate.datasets.vocabulary import vocabulary_beside
from murmurate.errors import Refusal, cause_of
from murmurate.launch import command_launcher
from murmurate.recipes import recipe, stored
from murmurate.record.stored import output
from murmurate.spec import Examples
from murmurate.strategies import strategy
from murmurate.training import checkpoint
from murmurate.training.data_record import check_data, read_fingerprint, refuse_missing
from murmurate.training.ends import ENDS, after_passes, without_recipe_end
from murmurate.training.restore import load_agent
from murmurate.training.run import Run
from murmurate.training.session import Finish, train
from murmurate.workloads.topic_model import TopicModel
from murmurate.workloads.topics import Topics

_LEAST_UPDATES = 60
_FULL_NAMES = {  # of options that ``fit`` also takes by a shorter name
    field.name.replace("_", "-"): f"{part}.{field.name.replace('_', '-')}"
    for part, config in (("agent", TopicModel), ("world", CorpusWorld))
    for field in dataclasses.fields(config)
    if field.name not in ("path", "split_seed")
}
_SHORT_NAMES = {full: short for short, full in _FULL_NAMES.items()}
_FULL_NAME = re.compile(r"(?:--)?\b((?:agent|world)\.[a-z][a-z_-]*[a-z])")


def default_passes(run: Run) -> float:
    """5, or, for a small corpus, as many as give each replica 60 updates: with fewer updates, the topics of a
    few hundred documents are still alike."""
    documents = _LEAST_UPDATES * cast(Examples, run.learner.requires).batch * run.replicas
    return max(5.0, math.ceil(documents / max(run.world.spec().examples, 1)))


def fit_command(options: argparse.Namespace, rest: list[str]) -> Finish:
    """``topics fit``: how the run ended, and its folder."""
    try:
        return _fit_command(options, rest)
    except Refusal as refusal:  # its message names options as the configs do
        raise Refusal(_with_short_names(str(refusal))) from refusal


def _with_short_names(message: str) -> str:
    """``message`` with the option names of ``topics fit``: ``--topics`` instead of ``--agent.topics``."""
    return _FULL_NAME.sub(
        lambda match: f"--{_SHORT_NAMES.get(match[1].replace('_', '-'), match[1])}", message
    )


def fit_fields(options: argparse.Namespace | None, rest: list[str]) -> Fields:
    """What ``topics fit --help`` prints."""
    usage = "murmurate topics fit CORPUS [--passes N] [--strategy S] [--out DIR] [--FIELD VALUE ...]"
    note = f"Shorter names: {', '.join(f'--{short}' for short in _FULL_NAMES)}"
    return Fields(usage, [("the run", _fit_run(options))], note=note)


def _fit_run(options: argparse.Namespace | None) -> Run:
    run = recipe("corpus-lda")
    if options is not None and options.strategy not in (None, run.strategy.name):
        run = dataclasses.replace(run, strategy=strategy(options.strategy)())
    return run


def _fit_command(options: argparse.Namespace, rest: list[str]) -> Finish:
    run = _fit_run(options)
    verb = "murmurate topics fit"
    if options.corpus is None:
        raise Refusal(f"Say which corpus, as in: {verb} docword.nytimes.txt.gz --topics 50")
    ends = ENDS & {name.replace("-", "_") for name in given(_with_full_names(rest), run, verb)}
    base = dataclasses.replace(without_recipe_end(run, ends), world=CorpusWorld(path=str(options.corpus)))
    run = change(base, _with_full_names(rest), verb)
    engine = command_launcher(run.launcher)
    if (ranks := engine.dictated_replicas()) is not None:
        run = change(dataclasses.replace(base, replicas=ranks), _with_full_names(rest), verb)
    _warn_of_left_out(cast(CorpusWorld, run.world))
    if options.passes is not None or not ends:
        passes = default_passes(run) if options.passes is None else options.passes
        run = after_passes(run, passes, ends)
    return train(run, options.out, engine, stored, "topics")


def _warn_of_left_out(world: CorpusWorld) -> None:
    """Warn of Markdown files in a folder that is read for its ``.txt`` files."""
    path = Path(world.path)
    if world.kind is None and path.is_dir() and files_of(path, "text"):
        ignored = len(files_of(path, "markdown")) - len(files_of(path, "text"))
        if ignored:
            warnings.warn(
                f"{ignored:,} Markdown files in {path} are left out, since it has .txt files. To read all of "
                "them: --kind markdown",
                stacklevel=2,
            )


def _with_full_names(words: Sequence[str]) -> list[str]:
    """``words`` with short names of options replaced by full ones."""
    full = []
    for word in words:
        name, equals, value = word.removeprefix("--").partition("=")
        full.append(
            f"--{_FULL_NAMES[name]}{equals}{value}" if word.startswith("--") and name in _FULL_NAMES else word
        )
    return full


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
        """The corpus, split as in training. Raises Refusal where it is gone or has changed."""
        refuse_missing(self.world)
        check_data(self.folder, self.world)
        return self.world.divided()


def load(folder: Path) -> FittedTopics:
    """The topics of a run folder's newest checkpoint. Raises Refusal if there are none."""
    run = stored(folder)
    learner = load_agent(run, checkpoint.newest(folder / "checkpoints", replays=False))
    fingerprint = read_fingerprint(folder)
    topics = learner.estimate() if hasattr(learner, "estimate") else None
    if fingerprint is None or not isinstance(topics, Topics):
        raise Refusal(f"{run.recipe} is no topic model; fit one with: murmurate topics fit")
    return FittedTopics(topics, learner.model.prior, cast(CorpusWorld, run.world), folder, fingerprint)


READING_OPTIONS = (  # fields of ``CorpusWorld`` that are options of ``transform`` and ``evaluate``
    "kind",
    "skip_bad",
    "one_based",
    "transpose",
    "vocabulary",
    "vocabulary_size",
    "cache",
    "column",
    "name_column",
)


@dataclasses.dataclass(frozen=True)
class OtherCorpus:
    """Documents in the vocabulary of a run.

    skipped: what of their source was left out. texts: texts of the source; None for a corpus of word counts.
    """

    documents: Corpus | RemappedCorpus
    skipped: Skipped
    texts: TextSource | None

    @property
    def numbers(self) -> NDArray[np.int64]:
        """The number of each document [D] in its source, from 0."""
        all_numbers = np.arange(len(self.documents) + len(self.skipped.documents))
        return np.setdiff1d(all_numbers, self.skipped.documents, assume_unique=True)


def other_corpus(fitted: FittedTopics, options: argparse.Namespace) -> OtherCorpus:
    """The corpus that the options name, in the run's vocabulary, without unknown words.

    Raises Refusal where the words of the corpus cannot be identified.
    """
    path = os.path.abspath(options.corpus)
    world = fitted.world if path == fitted.world.path else CorpusWorld(path=path)
    changes = {name: value for name in READING_OPTIONS if (value := getattr(options, name)) is not None}
    world = dataclasses.replace(world, **changes)
    overrides: dict[str, Any] = {"kind": world.kind or detect_kind(Path(path))}
    if overrides["kind"] in TEXT_KINDS:
        if fitted.vocabulary is None:
            raise Refusal(
                f"{path} is text, and the run was fitted without names of its {fitted.vocabulary_size:,} "
                "words, so words cannot be matched. Fit anew with --vocabulary, or give a corpus of ids."
            )
        if overrides["kind"] in ("csv", "jsonl") and world.column is None:  # texts like those of the run
            world = dataclasses.replace(world, column=fitted.world.column)
        if options.vocabulary is None:
            overrides |= {"vocabulary": fitted.vocabulary, "bigrams": fitted.world.bigrams}
    elif overrides["kind"] in ("lda-c", "svmlight") and not (
        world.vocabulary_size or world.vocabulary or vocabulary_beside(Path(path)).exists()
    ):
        overrides["vocabulary_size"] = fitted.vocabulary_size
    corpus, skipped = world.read_as(**overrides)
    if corpus.vocabulary is None or fitted.vocabulary is None or corpus.vocabulary == fitted.vocabulary:
        if corpus.vocabulary_size != fitted.vocabulary_size:
            raise Refusal(
                f"{path} is over {corpus.vocabulary_size:,} words, the topics over "
                f"{fitted.vocabulary_size:,}. "
                "Give a corpus with the same vocabulary, or one that names its words."
            )
        return OtherCorpus(corpus, skipped, world.texts())
    return OtherCorpus(corpus.with_vocabulary(fitted.vocabulary), skipped, world.texts())


@contextlib.contextmanager
def writing(path: Path) -> Iterator[Path]:
    """A file that takes the place of ``path`` once it is complete. Raises Refusal where it cannot be
    written."""
    try:
        with output(path) as fresh:
            yield fresh
    except OSError as error:
        raise Refusal(f"{path} cannot be written: {cause_of(error)}. Name another with --out.") from error
