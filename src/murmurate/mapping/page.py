"""A plan as a web page: the dataflow graph, when each part works, and the candidates' trade-offs."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from murmurate.mapping.candidates import Candidate
from murmurate.mapping.cost import Prediction, vectors_of
from murmurate.mapping.lines import relative_width
from murmurate.mapping.primitives import PRIMITIVES, edges, producers, role_of, shape_of
from murmurate.mapping.profile import DeviceProfile, RecipeCosts, key
from murmurate.record.figures import byte_size
from murmurate.training.run import Run

_POSITIONS = {  # (column, row) of each primitive in the picture of the graph
    "simulate": (0, 0), "act": (0, 1), "insert": (1, 0), "sample": (1, 1), "gather": (2, 1),
    "forward": (3, 1), "backward": (4, 1), "update": (4, 0), "priority": (2, 0), "exchange": (5, 0),
    "collect": (2, 1),  # in the graph of examples, which has no ``gather``
    "fit": (2, 0), "imagine": (1, 1),  # in the graph of models, which has neither ``priority`` nor ``sample``
}  # fmt: skip
_SHOWN = 12  # candidates in the table
_SHORTEST_SECONDS = 1e-7  # primitives that take less are left out
_GRAPH_INCHES, _GRAPH_UNITS = (9.0, 3.6), (6.2, 2.0)  # width and height of the picture, and of its axes
_BEND = 0.2  # of arrows, relative to their length
_ACTING, _LEARNING = "#dd8452", "#4c72b0"


def write_page(
    path: Path, run: Run, profile: DeviceProfile, found: Sequence[Candidate], checked: Mapping[str, float]
) -> Path:
    """Write the plan of ``run`` as one self-contained HTML file. Returns ``path``."""
    best, costs = found[0], profile.recipes[key(found[0].run)]
    rows = [
        {
            "name": c.name,
            "value": c.figure,
            "measured": f"{checked[c.name]:,.0f}" if c.name in checked else "",
            "why": c.why,
        }
        for c in found[:_SHOWN]
    ]
    lines = [
        {
            "name": f"{name}: {PRIMITIVES[name].about}",
            "line": f"{1e6 * line.a:,.1f} us + {1e6 * line.b:,.3f} us n",
            "sizes": f"{line.sizes[0]} to {line.sizes[1]}",
            "width": f"± {relative_width(line):.0%}",
            "busy": f"{costs.busy[name]:.2f} times",
        }
        for name, line in costs.lines.items()
        if line.seconds(line.sizes[1]) > _SHORTEST_SECONDS
    ]
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    page = jinja2.Environment(loader=loader, autoescape=True).get_template("plan.html")
    html = page.render(
        title=f"Plan of {run.recipe}",
        hardware=f"{profile.hardware.get('cpu', 'unknown processor')}, {profile.cores} cores",
        date=profile.date or "at an unknown time",
        unit=best.unit,
        run_unit=run.unit,
        rows=rows,
        costs=lines,
        graph=_graph(best.run, costs, best.prediction),
        gantt=_gantt(best.run, best.prediction),
        pareto=_pareto(found),
        to_target=best.env_steps is not None,
    )
    path.write_text(html, encoding="utf-8")
    return path


def _figure(width: float, height: float) -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots()


def _encoded(figure: Any) -> str:
    memory = io.BytesIO()
    figure.savefig(memory, format="png", dpi=110)
    return base64.b64encode(memory.getvalue()).decode()


def _graph(run: Run, costs: RecipeCosts, prediction: Prediction) -> str:
    figure, axes = _figure(*_GRAPH_INCHES)
    shape = shape_of(run)
    assert shape is not None
    updated = sum(size * updates for size, updates in vectors_of(run, shape, costs))
    found = edges(run, costs.parameters, updated)
    drawn = [edge for edge in found if edge.start in _POSITIONS and edge.end in _POSITIONS]
    present = {name for edge in drawn for name in (edge.start, edge.end)}
    for edge in drawn:
        (x0, y0), (x1, y1) = _POSITIONS[edge.start], _POSITIONS[edge.end]
        arrow = {
            "arrowstyle": "->",
            "color": "0.5",
            "shrinkA": 28,
            "shrinkB": 28,
            "connectionstyle": f"arc3,rad={_BEND}",
        }
        axes.annotate("", (x1, y1), (x0, y0), arrowprops=arrow)
        if edge.bytes:
            beside, place = _beside_arc(x1 - x0, y1 - y0)
            axes.annotate(
                byte_size(edge.bytes),
                ((x0 + x1) / 2, (y0 + y1) / 2),
                beside,
                textcoords="offset points",
                fontsize=8,
                color="0.35",
                **place,
            )
    for name in present:
        x, y = _POSITIONS[name]
        box = {"boxstyle": "round,pad=.5", "facecolor": "#e8eef7", "edgecolor": _LEARNING}
        label = f"{name}\n{1e3 * prediction.seconds[name]:.3g} ms"
        axes.text(x, y, label, ha="center", va="center", bbox=box, fontsize=9)
    axes.set_xlim(-0.6, -0.6 + _GRAPH_UNITS[0])
    axes.set_ylim(-0.5, -0.5 + _GRAPH_UNITS[1])
    axes.axis("off")
    return _encoded(figure)


def _beside_arc(dx: float, dy: float) -> tuple[tuple[float, float], dict[str, str]]:
    """Where the label of an arrow between parts dx, dy apart is, in points from the middle between them, and
    its alignment: on the outer side of the arc, where that of the arrow back has its own."""
    across, up = (72 * d * i / u for d, i, u in zip((dx, dy), _GRAPH_INCHES, _GRAPH_UNITS, strict=True))
    length = math.hypot(across, up)
    side = (up / length, -across / length)
    distance = _BEND * length / 2 + 3  # the middle of an arc is half as far out as its control point
    place = {
        "ha": ("center", "left", "right")[round(side[0])],
        "va": ("center", "bottom", "top")[round(side[1])],
    }
    return (distance * side[0], distance * side[1]), place


def _gantt(run: Run, prediction: Prediction) -> str:
    """A bar for each primitive, one after another; acting and learning overlap if actors are processes."""
    actors = producers(run)
    names = [
        n
        for n in (*PRIMITIVES, "exchange", "waiting", "handover")
        if prediction.seconds.get(n, 0) > _SHORTEST_SECONDS
    ]
    figure, axes = _figure(9, 0.8 + 0.33 * len(names))
    ends = {"actor": 0.0, "learner": 0.0}  # seconds at which the last bar of each lane ends
    for row, name in enumerate(names):
        role = role_of(name)
        seconds = prediction.seconds[name]
        lane = role if actors else "learner"
        if actors and role == "actor":
            seconds /= actors
        color = _LEARNING if role == "learner" else _ACTING
        axes.barh(row, 1e3 * seconds, left=1e3 * ends[lane], color=color)
        ends[lane] += seconds
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel("ms (orange: making experience; blue: learning)")
    return _encoded(figure)


def _pareto(found: Sequence[Candidate]) -> str:
    figure, axes = _figure(7, 4)
    points = []
    for candidate in found:
        shape = shape_of(candidate.run)
        assert shape is not None
        env_steps = candidate.env_steps
        if env_steps is None:
            env_steps = candidate.run.replicas * shape.env_steps / candidate.run.learner.updates(1)
        points.append((env_steps, candidate.prediction.env_steps_per_second))
    # no other point has a higher throughput without more env steps
    front = [p for p in points if not any(q[0] <= p[0] and q[1] > p[1] for q in points)]
    axes.scatter(*zip(*points, strict=True), facecolors="none", edgecolors=_LEARNING)
    axes.plot(*zip(*sorted(set(front)), strict=True), "o-", color=_LEARNING)
    axes.set_xscale("log")
    between = found[0].env_steps is None
    where = "of all replicas between two updates" if between else "to the target, predicted"
    axes.set_xlabel(f"{found[0].run.unit} {where}")
    axes.set_ylabel(f"{found[0].run.unit} per second, predicted")
    return _encoded(figure)
