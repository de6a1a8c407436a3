"""The sections of a report: each a title, a figure or a table, and a sentence where data is lacking."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import matplotlib.image
import numpy as np
from numpy.typing import NDArray

from murmurate.errors import Refusal
from murmurate.record import drawings, figures
from murmurate.record.console import clock
from murmurate.record.epsilon_ball import Ball, epsilon_ball
from murmurate.record.groups import staleness_counts
from murmurate.record.runs import RecordedRun
from murmurate.record.strips import alike, window
from murmurate.topology import topology

STRIP_FRAMES = 8
SHOWN_EVENTS = 200
_ROUTINE = frozenset({"checkpoint", "finished", "started"})
DRAWN_COSINES = 32


@dataclass(frozen=True)
class Key:
    """A line of a legend: a CSS variable's name, and how it is drawn: "" (a line), "thin", "dashed",
    "dotted", "dashdot", "block" or "bar"."""

    label: str
    colour: str
    kind: str = ""


@dataclass(frozen=True)
class Table:
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Section:
    """What the template shows, in this order; the empty parts are left out."""

    title: str
    text: str = ""
    legend: Sequence[Key] = ()
    figures: Sequence[str] = ()
    layout: str = ""  # "square", "three", "four" (a row), "wide", "speed" (a third and two), "strips"
    image: str = ""
    table: Table | None = None
    details: Sequence[tuple[str, str]] = field(default=())
    code: Sequence[str] = ()
    note: str = ""


KIND_KEYS = [
    Key("collecting", "collect", "block"),
    Key("learning", "learn", "block"),
    Key("exchanging", "exchange", "block"),
    Key("waiting for others", "wait", "bar"),
]


def returns(runs: Sequence[RecordedRun]) -> Section:
    title = "Return"
    runs = [run for run in runs if run.has("return_mean")]
    if not runs:
        return Section(title, "No episode has ended yet, so there is no return to draw.")
    label = "return (mean of the last 100 episodes)"
    drawn = [
        figures.svg(figures.over(runs, "return_mean", "total_env_steps", label), name="return by env steps"),
        figures.svg(figures.over(runs, "return_mean", "time_seconds", label), name="return by wall time"),
    ]
    return Section(
        title,
        "Unclipped returns of whole training games, against the experience of all replicas together and "
        "against time.",
        legend=_legend(runs),
        figures=drawn,
    )


def curves(runs: Sequence[RecordedRun]) -> list[Section]:
    """What the evaluation of the first of these runs wants drawn (``evaluation.interface.Curve``)."""
    sections = []
    for curve in runs[0].curves:
        metric, title = curve["metric"], curve["title"]
        having = [run for run in runs if run.has(metric)]
        if not having:
            sections.append(Section(title, f"No {title.lower()} was recorded on the way."))
            continue
        drawn = [
            figures.svg(figures.over(having, metric, axis, curve["label"]), name=f"{metric} by {axis}")
            for axis in ("total_env_steps", "time_seconds")
        ]
        sections.append(Section(title, curve["text"], legend=_legend(having), figures=drawn))
    return sections


def speed(runs: Sequence[RecordedRun]) -> Section:
    title = "Speed"
    runs = [run for run in runs if run.has("env_steps_per_second")]
    if not runs:
        return Section(title, "The runs recorded no env_steps_per_second.")
    seconds = "virtual second" if all(run.virtual for run in runs) else "second"
    scope = "all replicas" if all(run.has("joined_replicas") for run in runs) else "each replica"
    label = f"{runs[0].unit} per {seconds}, {scope}"
    drawn = [
        figures.svg(
            figures.over(runs, "env_steps_per_second", "time_seconds", label, from_zero=True), name="speed"
        )
    ]
    waiting = [run for run in runs if run.has("waiting_seconds") and run.replicas > 1]
    if waiting:
        draw = figures.over(
            waiting, "waiting_seconds", "time_seconds", "time spent waiting for others (seconds, summed up)"
        )
        drawn.append(figures.svg(draw, name="waiting"))
    text = "One env step is one decision of the agent." if runs[0].plays else ""
    return Section(title, text, _legend(runs), drawn)


def staleness(runs: Sequence[RecordedRun]) -> Section:
    title = "Staleness"
    runs = [run for run in runs if run.replicas > 1 and run.has("staleness")]
    if not runs:
        return Section(title, "One replica has nobody whose news could be old.")
    drawn = []
    if counts := staleness_counts(runs[0]):
        heading = "share of updates, all replicas"
        drawn.append(
            figures.svg(drawings.histogram(counts, max(counts), None, heading), name="staleness histogram")
        )
    for key, label in (("staleness", "staleness (own updates)"), ("heard", "replicas in the last agreement")):
        if all(run.has(key) for run in runs):
            draw = figures.over(runs, key, "total_env_steps", label, from_zero=True)
            drawn.append(figures.svg(draw, name=key))
    return Section(
        title, "Own updates since a replica last agreed with the peers it listens to.", _legend(runs), drawn
    )


def timelines(runs: Sequence[tuple[str, RecordedRun]], note: str = "") -> Section:
    """A timeline for each run: when each member computed, waited and exchanged."""
    title = "Who did what when"
    known = [(name, run.virtual, found) for name, run in runs if (found := window(run)) is not None]
    cut = alike([found for *_, found in known])
    width = 11.0 if len(runs) == 1 else 14.2
    drawn = [
        figures.svg(
            drawings.strips(found, name, virtual=virtual),
            width,
            0.85 + 0.3 * len(found.members),
            name=f"timeline of {name}" if name else "timeline",
        )
        for (name, virtual, _), found in zip(known, cut, strict=True)
    ]
    if not drawn:
        return Section(
            title,
            "No spans of time were recorded; the first are, about a second after the start (simulated: five "
            "steps after it).",
        )
    if any(found.left_out for found in cut):
        note = f"{note} Of many members a dozen are shown, evenly chosen.".strip()
    return Section(
        title,
        "A stretch of a burst in which spans were recorded, near the middle of the run. Blank: recording, "
        "saving, agreeing on when to stop.",
        KIND_KEYS,
        drawn,
        layout="strips",
        note=note,
    )


def disagreement(run: RecordedRun) -> Section:
    """Distance from consensus against the indicator, and the relative disagreement."""
    title = "Disagreement"
    if run.replicas < 2:
        return Section(title, "One replica has nobody to disagree with.")
    if not run.has("disagreement") and not run.has("distance_to_mean"):
        return Section(title, "The run recorded neither disagreement nor distance_to_mean.")
    drawn, legend, note = [], [], ""
    found = epsilon_ball(run)
    if isinstance(found, Ball):
        drawn.append(figures.svg(figures.ball(found), name="distance from consensus and indicator"))
        legend = [
            Key("recorded distance", "accent"),
            Key("indicator: from just after to just before a mixing", "warm", "dashed"),
        ]
        note = (
            "Indicator: the closed form of GALA's Proposition 1, b ← β (b + ‖αG‖), with the mixing factor "
            f"β = {found.beta:.3f} ({found.topology}, {run.replicas} replicas) and the recorded updates. "
            "It would be a bound if all replicas mixed at once; these mix when they have news, so it is not."
        )
    else:
        note = f"No indicator: {found[0].lower()}{found[1:]}"
    if run.has("disagreement"):
        draw = figures.over([run], "disagreement", "total_env_steps", "disagreement relative to ‖mean‖")
        drawn.append(figures.svg(draw, name="relative disagreement"))
    text = "How far the replicas' parameter vectors are from their mean."
    return Section(title, text, legend or _legend([run]), drawn, note=note)


def mean_cosines(run: RecordedRun) -> NDArray[np.float64] | None:
    """[n, n] mean over the run of the cosine between gradients of two replicas; nan where never known.

    Row i is what replica i recorded. None if there are none between two replicas.
    """
    size = run.replicas
    total, known = np.zeros((size, size)), np.zeros((size, size))
    for record in run.records:
        row, i = record.get("gradient_cosine"), int(record["replica"])
        if isinstance(row, list) and i < size:
            for j, value in enumerate(row[:size]):
                if isinstance(value, (int, float)):
                    total[i, j] += value
                    known[i, j] += 1
    np.fill_diagonal(total, 1.0)
    np.fill_diagonal(known, 1.0)
    mean = np.full((size, size), np.nan)
    np.divide(total, known, out=mean, where=known > 0)
    return mean if (known[~np.eye(size, dtype=bool)] > 0).any() else None


def gradients(run: RecordedRun) -> Section:
    title = "Likeness of gradients"
    if run.replicas < 2:
        return Section(title, "One replica has no other gradient to compare its own with.")
    cosines = mean_cosines(run)
    if cosines is None:
        return Section(title, "The run recorded no cosines between gradients of two replicas.")
    if run.replicas > DRAWN_COSINES:
        apart = ~np.eye(run.replicas, dtype=bool)
        mean = np.nanmean(cosines[apart])
        return Section(
            title, f"{run.replicas} replicas are too many to draw; mean over all pairs {mean:.3f}."
        )
    peers = _peers(run)
    apart = ~np.eye(run.replicas, dtype=bool)
    note = f"Mean over all pairs {np.nanmean(cosines[apart]):.3f}"
    for name, which in (("peers", peers), ("others", None if peers is None else apart & ~peers)):
        if which is not None and not np.isnan(cosines[which]).all():
            note += f", over {name} {np.nanmean(cosines[which]):.3f}"
    return Section(
        title,
        "Cosine of the angle between two replicas' gradients, averaged over the run "
        "(Assran et al. 2019, Fig. 2b). The row hears those marked as its peers, and has measured at moments "
        "of its own, so the two of a pair differ.",
        figures=[figures.svg(figures.heat_map(cosines, peers), 4.2, 3.9, "cosines between gradients")],
        layout="square",
        note=note + ".",
    )


def learning(run: RecordedRun) -> Section:
    labels = {
        "loss": "loss",
        "entropy": "entropy of the policy (nats)",
        "value_loss": "value loss",
        "gradient_norm": "gradient norm, before clipping",
    }
    drawn = [
        figures.svg(figures.over([run], key, "total_env_steps", label), name=key)
        for key, label in labels.items()
        if run.has(key)
    ]
    if not drawn:
        return Section("Learning signals", "The run recorded neither loss, entropy nor gradient norm.")
    return Section("Learning signals", legend=_legend([run]), figures=drawn)


def events(runs: Sequence[RecordedRun]) -> Section:
    title = "Events"
    several = len(runs) > 1
    rows: list[list[str]] = []
    for run in runs:
        for event in run.events:
            if several and event.get("event") in _ROUTINE:
                continue
            cells = [clock(event["time_seconds"]), str(event.get("event", "")), str(event.get("message", ""))]
            rows.append([f"{run.label} ({run.folder.name})", *cells] if several else cells)
    if not rows:
        nothing = "Nothing happened besides checkpoints and ends." if several else ""
        return Section(title, nothing or "Nothing was recorded besides the metrics.")
    heads = ["time", "event", "what happened"]
    left_out = len(rows) - SHOWN_EVENTS
    note = f"{left_out} events between these are in metrics.jsonl." if left_out > 0 else ""
    shown = rows if left_out <= 0 else rows[: SHOWN_EVENTS // 2] + rows[-SHOWN_EVENTS // 2 :]
    return Section(title, table=Table(["run", *heads] if several else heads, shown), note=note)


def episode(run: RecordedRun) -> Section | None:
    """A film strip from the run's ``videos/``: ``frames.png`` as it is, else frames of the newest npz."""
    title, folder = "An episode", run.folder / "videos"
    picture = folder / "frames.png"
    if picture.is_file():
        return Section(title, image=_data_url(picture.read_bytes()))
    archives = sorted(folder.glob("*.npz"), key=lambda path: (path.stat().st_mtime, path.name))
    strip = film_strip(archives[-1]) if archives else None
    if strip is None:
        text = f"No video was made; make one with: murmurate eval {run.folder} --video"
        return Section(title, text)
    return Section(title, image=_data_url(strip))


def film_strip(archive: Path) -> bytes | None:
    """Frames of an npz ([T, H, W] or [T, H, W, 3] uint8, its largest array), evenly chosen, as one PNG.

    None if the archive holds no such array.
    """
    with np.load(archive, allow_pickle=False) as arrays:
        found = [a for a in arrays.values() if a.dtype == np.uint8 and a.ndim in (3, 4) and len(a)]
    if not found:
        return None
    frames = max(found, key=lambda a: a.size)
    if frames.ndim == 3:
        frames = np.repeat(frames[..., None], 3, -1)
    chosen = np.linspace(0, len(frames) - 1, min(STRIP_FRAMES, len(frames))).round().astype(int)
    shown = np.concatenate(
        [frames[chosen][..., :3], np.full((*frames[chosen].shape[:3], 1), 255, np.uint8)], -1
    )
    gap = np.zeros((frames.shape[1], max(1, frames.shape[2] // 20), 4), np.uint8)  # the page shows through
    pieces = [piece for frame in shown for piece in (gap, frame)][1:]
    out = io.BytesIO()
    matplotlib.image.imsave(out, np.concatenate(pieces, 1), format="png")
    return out.getvalue()


def repeat(runs: Sequence[RecordedRun]) -> Section:
    commands = [run.command for run in runs]
    note = (
        "" if all(known for _, known in commands) else "Put together from run.json, which holds no command."
    )
    code = ["\n".join(command for command, _ in commands)]
    return Section("To repeat it", code=code, note=note)


def _legend(runs: Sequence[RecordedRun]) -> list[Key]:
    if len(runs) > 1:
        return [Key(run.label, f"run{i % figures.RUN_COLOURS}") for i, run in enumerate(runs)]
    if runs[0].replicas < 2:
        return []
    return [Key("mean over the living replicas", "accent"), Key("each replica", "accent", "thin")]


def _peers(run: RecordedRun) -> NDArray[np.bool_] | None:
    """[n, n] true at (i, j) where i hears j; None where the strategy has no graph of a known name."""
    name, size = run.strategy.get("topology"), run.replicas
    if not isinstance(name, str):
        return None
    try:
        graph = topology(name)
        heard = np.zeros((size, size), dtype=bool)
        for i in range(size):
            heard[i, list(graph.in_peers(i, size))] = True
    except (Refusal, ValueError):
        return None
    return heard


def _data_url(picture: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(picture).decode()
