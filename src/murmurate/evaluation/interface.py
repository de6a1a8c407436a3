"""The protocol of evaluations: figures about a learner at the end of a run, and for ``murmurate eval``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

from murmurate.ranges import NonNegativeInt
from murmurate.spec import World


@dataclass(frozen=True)
class EvalContext:
    """The inputs of an evaluation beside the learner, which has the consensus parameters of a checkpoint.

    folder: folder of the run. fingerprint: fingerprint of the data set that the run learned from; None for
    simulators. seed: seed of all random numbers of the evaluation. count: number of games, images or the
    like, in place of the config's. sample: draw actions from the policy, instead of the most probable one.
    best: returns the learner of the best checkpoint; None where there is none or it is not needed.
    """

    world: World
    folder: Path
    seed: int
    fingerprint: Mapping[str, Any] | None = None
    count: int | None = None
    sample: bool = False
    best: Callable[[], Any | None] = lambda: None


@dataclass(frozen=True)
class Curve:
    """A metric recorded in training, and how the report draws it and the console prints it.

    label: label of the axis. text: a sentence below the title. digits: decimal places on the console. spread:
    name of the metric that is the standard error of ``metric``; empty: none.
    """

    metric: str
    title: str
    label: str
    text: str = ""
    lower_is_better: bool = False
    digits: NonNegativeInt = 0
    spread: str = ""


class Evaluation(Protocol):
    """A frozen dataclass, part of a Run; its fields are options of the run, without a prefix.

    next_command: the command that shows more, which the end of a run suggests, with its folder.
    curves: what the report draws of the run's progress, in place of the returns of episodes. headline: the
    figure of ``evaluate`` that is drawn over the evaluations of one run. validation: names of the figures of
    ``evaluate`` that are of validation data, by the metric that is the same figure in training; a study
    optimises the first one, as the others are of test data. plays: whether it plays games in simulators. Then
    actions may be sampled, and in a run that is evaluated while it learns, the best checkpoint is the one
    with the best headline. (Figures of test data must not choose a checkpoint.)
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]
    next_command: ClassVar[str] = "report"
    curves: ClassVar[tuple[Curve, ...]] = ()
    headline: ClassVar[Curve | None] = None
    validation: ClassVar[Mapping[str, str]] = {}
    plays: ClassVar[bool] = False

    def check(self) -> None:
        """Raise Refusal, before a run, if ``evaluate`` would refuse at its end."""
        return

    def evaluate(self, learner: Any, context: EvalContext) -> dict[str, Any]:
        """Figures by name, as plain values, for ``summary.json`` and ``murmurate eval --json``."""
        ...

    def sentence(self, figures: Mapping[str, Any]) -> str:
        """The figures as a sentence for the console; empty if they are missing."""
        ...

    def video(self, learner: Any, context: EvalContext) -> Any:
        """The frames of one episode, greedy unless ``context.sample``: an iterable of [H, W, 3] uint8, where
        None means that the frames before it do not count. None where the world cannot be drawn."""
        return None

    def sections(self, folder: Path) -> list[tuple[str, str]]:
        """(title, HTML) of additional sections of the run's report."""
        return []


_report: ContextVar[tuple[Callable[[str], None], str]] = ContextVar(
    "murmurate_evaluation_report", default=(lambda line: None, "")
)


@contextlib.contextmanager
def reporting(write: Callable[[str], None], hint: str = "") -> Iterator[None]:
    """Within this context, evaluations call ``write`` with lines about how far they are. hint: ends the line
    with which an evaluation begins."""
    token = _report.set((write, hint))
    try:
        yield
    finally:
        _report.reset(token)


def report(line: str) -> None:
    """Pass on a line about how far an evaluation is, where somebody wants it (``reporting``)."""
    write, _ = _report.get()
    write(line)


def report_start(line: str) -> None:
    """As ``report``, for the line with which an evaluation begins."""
    write, hint = _report.get()
    write(line + hint)
