"""The sections of a page about a single run that comparisons do not have."""

from __future__ import annotations

import base64

import numpy as np
from numpy.typing import NDArray

from murmurate.errors import Refusal, quoted
from murmurate.record import drawings
from murmurate.record.epsilon_ball import Ball, epsilon_ball
from murmurate.record.figures import svg
from murmurate.record.groups import RunGroup
from murmurate.record.runs import RecordedRun
from murmurate.record.sections import LegendKey, Section, legend
from murmurate.record.window_bound import window_bounds
from murmurate.topology import topology

DRAWN_COSINES = 32  # most replicas whose cosines are drawn
_PROBED = " (every --probe-every-updates; 0: never)."
_ROUNDING = 1e-6  # relative error of a recorded distance
_MOST_BYTES = 256 * 2**20  # of a picture
MOST_COSINES = 2048  # most replicas whose matrix of cosines is computed


def disagreement(group: RunGroup) -> Section:
    """The distance from consensus beside its indicator, and the relative disagreement."""
    title, (run,) = "Disagreement", group.runs
    if run.replicas < 2:
        return Section(title, "One replica has no peers to disagree with.")
    if not run.has("disagreement") and not run.has("distance_to_mean"):
        return Section(title, "The run recorded neither disagreement nor distance_to_mean" + _PROBED)
    svgs, keys = [], legend([group])
    indicator = epsilon_ball(run)
    if isinstance(indicator, Ball):
        svgs.append(svg(drawings.draw_ball(indicator), name="distance from consensus and indicator"))
        keys = [
            LegendKey("recorded distance", "accent"),
            LegendKey("indicator: from just after to just before a mixing", "warm", "dashed"),
        ]
        note = (
            "Indicator: the radius in GALA's Proposition 1, b ← β (b + ‖αG‖), with the mixing factor "
            f"β = {indicator.beta:.3f} ({indicator.topology}, {run.replicas} replicas) and the recorded "
            "updates. It would be a bound if all replicas mixed at once; these mix when something arrives, "
            "so it is not. "
        )
        if indicator.beta < 1e-9:
            note += (
                "β is 0: mixing at once would make all replicas equal, so here the indicator is no more than "
                "the updates of one round. "
            )
        note += (
            "The recorded distance compares a replica with what the others published at their last "
            "measurement, up to probe_every_updates updates ago: the rarer these are, the larger it is."
        )
    else:
        note = f"No indicator: {indicator[0].lower()}{indicator[1:]}"
    if run.has("disagreement"):
        label = "disagreement relative to ‖mean‖"
        draw = drawings.curves([group], "disagreement", "total_env_steps", label)
        svgs.append(svg(draw, name="relative disagreement"))
    text = "Distance of the replicas' parameter vectors from their mean."
    return Section(title, text, keys, svgs, note=note)


def proposition_section(run: RecordedRun) -> Section | None:
    """GALA's Proposition 1 from recorded versions; None for a run that recorded no window."""
    if not any("gossip_window" in record for record in run.records):
        return None
    title, bounds = "The epsilon-ball, from recorded versions", window_bounds(run)
    if not bounds:
        return Section(title, "No window was recorded completely by all replicas that it concerns.")
    within = sum(window.distance <= window.bound * (1 + _ROUNDING) for window in bounds)
    bounded = [window for window in bounds if window.bound > 0]
    ratio = float(np.median([window.distance / window.bound for window in bounded] or [0.0]))
    carried = float(np.median([window.carried / window.bound for window in bounded] or [0.0]))
    text = (
        "In short windows every replica recorded each update's length and which published vectors it "
        "averaged. From these the products of mixing matrices in Proposition 1 (Assran et al. 2019) are "
        "computed, and bound how far apart the vectors that a replica compared in the window can be."
    )
    note = (
        f"{within} of {len(bounds)} recorded distances are within the bound; in the median, a distance is "
        f"{ratio:.0%} of its bound. In the median, {carried:.1%} of a bound is for differences from before "
        "the window, which are taken to be as large as the run's largest distance."
    )
    keys = [
        LegendKey("recorded distance", "accent", "bar"),
        LegendKey("bound of Proposition 1", "warm", "bar"),
    ]
    bounds_svg = svg(drawings.draw_windows(bounds), 9.4, 3.4, name="bound of Proposition 1 and distance")
    return Section(title, text, keys, [bounds_svg], layout="wide", note=note)


def mean_cosines(run: RecordedRun) -> NDArray[np.float64] | None:
    """[n, n] mean over the run of the cosine between gradients of two replicas; nan where never recorded.

    Row i is what replica i recorded. None if no replica recorded any, or there are too many replicas.
    """
    size = run.replicas
    if size > MOST_COSINES or not any(isinstance(r.get("gradient_cosine"), list) for r in run.records):
        return None
    total, counts = np.zeros((size, size)), np.zeros((size, size))
    for record in run.records:
        row, i = record.get("gradient_cosine"), int(record["replica"])
        if isinstance(row, list) and i < size:
            for j, value in enumerate(row[:size]):
                if isinstance(value, (int, float)):
                    total[i, j] += value
                    counts[i, j] += 1
    np.fill_diagonal(total, 1.0)
    np.fill_diagonal(counts, 1.0)
    mean = np.full((size, size), np.nan)
    np.divide(total, counts, out=mean, where=counts > 0)
    return mean if (counts[~np.eye(size, dtype=bool)] > 0).any() else None


def gradients(run: RecordedRun) -> Section:
    title = "Similarity of gradients"
    if run.replicas < 2:
        return Section(title, "One replica has no other gradient to compare its own with.")
    cosines = mean_cosines(run)
    if cosines is None:
        return Section(title, "The run recorded no cosines between gradients of two replicas" + _PROBED)
    peers, off_diagonal = _peers(run), ~np.eye(run.replicas, dtype=bool)
    mean = f"{np.nanmean(cosines[off_diagonal]):.3f}"
    if run.replicas > DRAWN_COSINES:
        return Section(title, f"{run.replicas} replicas are too many to draw; mean over all pairs {mean}.")
    note = f"Mean over all pairs {mean}"
    for name, pairs in (("peers", peers), ("others", None if peers is None else off_diagonal & ~peers)):
        if pairs is not None and not np.isnan(cosines[pairs]).all():
            note += f", over {name} {np.nanmean(cosines[pairs]):.3f}"
    return Section(
        title,
        "Cosine of the angle between two replicas' gradients, averaged over the run "
        "(Assran et al. 2019, Fig. 2b). The replica of a row listens to those marked as its peers. Each "
        "replica measures at its own times, so the two values of a pair differ.",
        figures=[svg(drawings.heat_map(cosines, peers), 4.2, 3.9, "cosines between gradients")],
        layout="square",
        note=note + ".",
    )


def _peers(run: RecordedRun) -> NDArray[np.bool_] | None:
    """[n, n] true at (i, j) where i receives from j; None without a topology of a known name."""
    name, size = run.strategy.get("topology"), run.replicas
    if not isinstance(name, str):
        return None
    try:
        graph = topology(name)
        is_peer = np.zeros((size, size), dtype=bool)
        for i in range(size):
            is_peer[i, list(graph.in_peers(i, size))] = True
    except (Refusal, ValueError):
        return None
    return is_peer


def learning(group: RunGroup) -> Section:
    labels = {
        "loss": "loss",
        "entropy": "entropy of the policy (nats)",
        "value_loss": "value loss",
        "gradient_norm": "gradient norm, before clipping",
    }
    svgs = [
        svg(drawings.curves([group], key, "total_env_steps", label), name=key)
        for key, label in labels.items()
        if group.runs[0].has(key)
    ]
    if not svgs:
        return Section("Learning signals", "The run recorded neither loss, entropy nor gradient norm.")
    return Section("Learning signals", legend=legend([group]), figures=svgs)


def episode(run: RecordedRun) -> Section:
    """The film strip in the run's ``videos/``."""
    picture = run.folder / "videos" / "frames.png"
    if not picture.is_file() or picture.stat().st_size >= _MOST_BYTES:
        command = f"murmurate eval {quoted(run.folder)} --video"
        return Section("An episode", f"No video was made; make one with: {command}")
    strip = base64.b64encode(picture.read_bytes()).decode()
    return Section("An episode", image="data:image/png;base64," + strip)
