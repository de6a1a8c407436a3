"""One self-contained HTML page about a run, or about several in comparison.

The page loads no other file: figures are inline SVG, pictures are base64. For programs, the numbers shown are
also there as JSON in ``<script id="data">``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jinja2

import murmurate
from murmurate.errors import Refusal, cause_of
from murmurate.record import comparison, run_sections, sections
from murmurate.record.console import clock
from murmurate.record.curve_numbers import curve_numbers
from murmurate.record.differences import machine
from murmurate.record.evaluations import evaluations
from murmurate.record.figures import COLOURS, number_text
from murmurate.record.groups import RunGroup, env_steps_per_second, grouped, seconds
from murmurate.record.runs import RecordedRun, open_run, shown_recipe
from murmurate.record.score_sections import score_sections
from murmurate.record.standalone import write_figures
from murmurate.record.stored import UNSOUND, output

_LONGEST_LIST = 500  # letters of a list on the page; longer ones (a confusion matrix) are in summary.json
# of run.json and summary.json: how curves are drawn, and what is shown elsewhere on the page
_NOT_DETAILS = ("command", "events", "files", "curves", "headline")
_FACTS = (
    "env_steps", "frames", "updates", "wall_seconds", "env_steps_per_second", "train_return_mean",
    "eval_return_mean", "eval_return_stderr", "eval_success_rate", "best_eval_return_mean", "episodes",
    "staleness_max", "disagreement_final", "bytes_exchanged", "dead_replicas", "exit",
)  # fmt: skip


def report(
    directories: Sequence[Path | str],
    out: Path | str,
    more: Sequence[tuple[str, str]] = (),
    numbers: Path | None = None,
    figures: Path | None = None,
    metrics: Sequence[str] = (),
) -> Path:
    """Write the page to ``out`` (``report.html`` inside it, if it is a folder) and return its path.

    more: titles and HTML of further sections of the page about one run (``Evaluation.sections``). numbers:
    file to which the page's numbers are also written, as JSON, for a comparison with its curves. figures:
    folder to which the page's figures are also written, as SVG files. metrics: fields of ``metrics.jsonl``
    that are also drawn. Raises ``Refusal`` for a folder that holds no run or no records, for a metric that no
    run recorded and for one file for both, before anything is written, and where a file cannot be written.
    """
    if not directories:
        raise Refusal("There is nothing to report on; give one or more run folders.")
    runs = [open_run(directory) for directory in directories]
    try:
        shown = _single_run(runs[0], more, metrics) if len(runs) == 1 else _comparison(runs, metrics)
        data = _numbers(runs, shown)
        page = render(shown, data, [run.folder for run in runs])
        if numbers is not None and len(runs) > 1:
            # not in the page, which they would make several times larger
            data |= _finite(curve_numbers(grouped(runs), metrics))
    except UNSOUND as error:  # the values are of the right kinds, but make no sense together
        folders = " and ".join(str(run.folder) for run in runs)
        raise Refusal(
            f"What {folders} recorded cannot be drawn ({type(error).__name__}: {error}). Leave out the run "
            "whose metrics.jsonl or summary.json is damaged."
        ) from error
    out = Path(out)
    out = out / "report.html" if out.is_dir() else out
    if numbers is not None:
        if numbers.resolve() == out.resolve():
            raise Refusal(
                f"{out} would be the page and the file of its numbers. Give another file with --json."
            )
        _write(json.dumps(data, indent=1, allow_nan=False) + "\n", numbers, "--json")
    if figures is not None:
        try:
            write_figures(shown["sections"], figures)
        except (OSError, ValueError) as error:
            raise Refusal(
                f"Cannot write figures to {figures}: {cause_of(error)}; give another folder with --figures, "
                "or make room."
            ) from error
    return write_html(page, out)


def write_html(page: str, out: Path) -> Path:
    """Write a page atomically: a reader sees the old one or the new one. Raises Refusal if that fails."""
    return _write(page, out, "--out")


def _write(text: str, out: Path, option: str) -> Path:
    try:
        with output(out) as target:
            target.write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:
        cause = cause_of(error)
        remedy = "make its folder" if isinstance(error, FileNotFoundError) else "make room"
        raise Refusal(
            f"Cannot write {out}: {cause}; give another file with {option}, or {remedy}."
        ) from error
    return out


def _numbers(runs: Sequence[RecordedRun], shown: dict[str, Any]) -> dict[str, Any]:
    """The numbers of a page with the variables ``shown``, as values for JSON."""
    numbers: dict[str, Any] = {"runs": [_data(run) for run in runs]}
    if shown["comparison"] is not None:
        numbers["groups"] = [row["numbers"] for row in shown["comparison"]["rows"]]
    for section in shown["sections"]:
        numbers |= section.data
    finite: dict[str, Any] = _finite(numbers)
    return finite


def _finite(value: Any) -> Any:
    """``value`` with None for numbers that JSON has not."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def render(shown: dict[str, Any], data: dict[str, Any], sources: Sequence[Path]) -> str:
    """The page, from the template's variables ``shown``, with ``data`` as JSON for programs."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    text = json.dumps(data, allow_nan=False)
    return environment.get_template("report_template.html.j2").render(
        # inside a script element "</script" or "<!--" would be markup even within a JSON string
        data=text.replace("<", "\\u003c"),
        version=murmurate.__version__,
        colours=COLOURS,
        sources=", ".join(map(str, sources)),
        **shown,
    )


def _single_run(run: RecordedRun, more: Sequence[tuple[str, str]], metrics: Sequence[str]) -> dict[str, Any]:
    """The template's variables for a page about one run."""
    state, warns = _state(run)
    group = RunGroup(run.label, 0, (run,), is_single_run_page=True)
    page_sections = [
        sections.returns([group]) if run.plays else None,
        *sections.success_rate([group]),
        *(sections.Section(title, figures=[html]) for title, html in more),
        *evaluations([group]),
        *sections.evaluation_curves([group]),
        sections.speed([group]),
        sections.staleness([group]),
        sections.timelines([group]),
        run_sections.disagreement(group),
        run_sections.proposition_section(run),
        run_sections.gradients(run),
        run_sections.learning(group) if run.plays else None,
        *sections.metrics([group], metrics),
        sections.events([run]),
        run_sections.episode(run) if run.plays else None,
        sections.commands([run]),
        sections.Section("The run", details=_details(run)),
    ]
    fields = {k: v for k, v in run.strategy.items() if k != "name"}
    strategy = run.strategy_name + (f" ({_fields(fields)})" if fields else "")
    replicas = "1 replica" if run.replicas == 1 else f"{run.replicas} replicas"
    return {
        "title": shown_recipe(run.recipe),
        "subtitle": f"{replicas}, {strategy}{_machines([run])}",
        "state": state,
        "state_bad": warns,
        "facts": _headline(run),
        "comparison": None,
        "sections": [section for section in page_sections if section is not None],
    }


def _machines(runs: Sequence[RecordedRun]) -> str:
    names = dict.fromkeys(name for run in runs if (name := machine(run)))
    return f" · {'; '.join(names)}" if names else ""


def _comparison(runs: Sequence[RecordedRun], metrics: Sequence[str]) -> dict[str, Any]:
    """The template's variables for a comparison of runs."""
    shown = grouped(runs)
    strategies = f"{len(shown)} strategies" if len(shown) > 1 else shown[0].label
    unfinished = [f"{run.folder.name}: {_state(run)[0]}" for run in runs if run.fact("exit") != "finished"]
    return {
        "title": f"{strategies}, {len(runs)} runs" if len(runs) > len(shown) else f"{len(runs)} runs",
        "subtitle": ", ".join(dict.fromkeys(shown_recipe(run.recipe) for run in runs)) + _machines(runs),
        "state": "; ".join(unfinished),
        "state_bad": bool(unfinished),
        "facts": [],
        "comparison": comparison.table(shown),
        "sections": [
            *score_sections(shown),
            *([sections.returns(shown)] if runs[0].plays else []),
            *sections.success_rate(shown),
            *evaluations(shown),
            *sections.evaluation_curves(shown),
            sections.speed(shown),
            sections.staleness(shown),
            sections.disagreement(shown),
            *sections.metrics(shown, metrics),
            sections.timelines(shown),
            sections.events(runs),
            sections.commands(runs),
        ],
    }


def _headline(run: RecordedRun) -> list[dict[str, str]]:
    """The facts at the top of the page about one run."""
    facts: list[dict[str, str]] = []

    def fact(name: str, value: str, small: str = "") -> None:
        facts.append({"name": name, "value": value, "small": small})

    frames, wall, evaluated = (run.fact(key) for key in ("frames", "wall_seconds", "eval_return_mean"))
    if evaluated is not None:
        error = run.fact("eval_return_stderr")
        fact(
            "evaluation return (greedy)",
            number_text(evaluated),
            "" if error is None else f"± {number_text(error)} standard error",
        )
    if run.plays:
        fact("training return (sampled)", number_text(run.fact("train_return_mean")), "last 100 episodes")
    headline = run.run.get("headline")
    curves = {curve["metric"]: curve for curve in (*run.curves, *([headline] if headline else []))}
    for metric, curve in {} if run.plays else curves.items():
        if run.fact(metric) is not None:
            fact(curve["title"].lower(), number_text(run.fact(metric)), "at the end")
    fact(
        run.unit,
        number_text(run.fact("env_steps")),
        f"{number_text(frames)} frames" if frames and run.plays else "",
    )
    if run.virtual:
        fact("virtual time", number_text(seconds(run)), "seconds")
    if wall is not None:
        fact("wall time", clock(wall), "h:mm:ss")
    fact("speed", number_text(env_steps_per_second(run)), f"{run.unit}/{'virtual ' if run.virtual else ''}s")
    dead = ", ".join(map(str, run.dead_replicas)) or "none"
    fact("replicas", str(run.replicas), f"dead: {dead}" if run.deaths else "")
    return facts


def _data(run: RecordedRun) -> dict[str, Any]:
    """The page's numbers about a run, for programs."""
    cosines = run_sections.mean_cosines(run)
    facts = {key: run.fact(key) for key in _FACTS}
    return {
        "folder": str(run.folder),
        "recipe": run.recipe,
        "strategy": run.strategy_name,
        "replicas": run.replicas,
        **facts,
        "gradient_cosine": None
        if cosines is None or run.replicas > run_sections.DRAWN_COSINES
        else cosines.tolist(),
        "command": run.command[0],
    }


def _state(run: RecordedRun) -> tuple[str, bool]:
    """How the run ended, and whether to show that as a warning."""
    ended = run.fact("exit")
    if ended is None:
        return "still running, or killed: there is no summary.json yet", True
    return str(ended), str(ended).startswith("failed")


def _details(run: RecordedRun) -> list[tuple[str, str]]:
    """run.json as names and texts, and what summary.json has beyond it."""
    rows = [("folder", str(run.folder))]
    planned = ("env_steps", "updates")
    ends = {f"{key} made" if key in planned else key: value for key, value in run.summary.items()}
    more = {key: value for key, value in ends.items() if key not in run.run}
    for fields, number in ((run.run, _setting), (more, number_text)):
        for key, value in fields.items():
            if key not in _NOT_DETAILS and value is not None:
                text = _fields(value, number) if isinstance(value, dict) else _text(value, number)
                if not isinstance(value, list) or len(text) <= _LONGEST_LIST:
                    rows.append((key.replace("_", " "), text))
    return rows


def _setting(value: float) -> str:
    """A number that a user chose, in full: a discount of 0.9997 is not 1."""
    return f"{value:.10g}"


def _fields(fields: dict[str, Any], number: Callable[[float], str] = _setting) -> str:
    return ", ".join(f"{key.replace('_', ' ')} {_text(value, number)}" for key, value in fields.items())


def _text(value: Any, number: Callable[[float], str]) -> str:
    """A JSON value in words, with ``number`` for those that are not whole."""
    if isinstance(value, dict):
        return f"({_fields(value, number)})"
    if isinstance(value, (list, tuple)):
        return ", ".join(_text(element, number) for element in value) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None or value == "":
        return "none"
    return number(value) if isinstance(value, float) else str(value)
