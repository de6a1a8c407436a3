"""The figures of a page as SVG files of their own, with their legends."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from murmurate.record.figures import COLOURS, DASHES
from murmurate.record.sections import LINE_STYLES, LegendKey, Section
from murmurate.record.stored import output

_ROW = 15.0  # height of a legend's entry, points
_FONTS = "DejaVu Sans, Verdana, Arial, Helvetica, sans-serif"  # of those that matplotlib names
_LONGEST_NAME = 80  # letters


def write_figures(sections: Iterable[Section], folder: Path) -> None:
    """Write each drawing of ``sections`` to ``folder``, named after what it shows. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    taken: set[str] = set()
    for section in sections:
        for figure in section.figures:
            if figure.startswith("<svg"):  # not a picture of an evaluation
                with output(folder / f"{_name(figure, taken)}.svg") as target:
                    target.write_text(standalone(figure, section.legend), encoding="utf-8")


def standalone(figure: str, legend: Sequence[LegendKey]) -> str:
    """A file for ``figure``, an ``<svg>`` element of the page: with the colours of the light theme, a size,
    and those entries of ``legend`` whose colours are in the figure."""
    (width, height), entries = _size(figure), [key for key in legend if f"var(--{key.colour})" in figure]
    rows = "".join(_legend_row(key, height + _ROW * (row + 0.5)) for row, key in enumerate(entries))
    height += _ROW * len(entries)
    head = (
        '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'width="{width:g}pt" height="{height:g}pt" viewBox="0 0 {width:g} {height:g}"'
    )
    drawing = re.sub(r'viewBox="[^"]*"', "", figure, count=1).replace("<svg", head, 1)
    drawing = re.sub(r'\shref="#', ' xlink:href="#', drawing)  # which SVG 1.1 has, as LaTeX's converters
    drawing = drawing[: drawing.rindex("</svg>")] + rows + "</svg>\n"
    return '<?xml version="1.0" encoding="utf-8"?>\n' + re.sub(
        r"var\(--(\w+)\)", lambda found: COLOURS.get(found[1], found[0]), drawing
    )


def _size(figure: str) -> tuple[float, float]:
    """Width and height, points."""
    found = re.search(r'viewBox="0 0 (\S+) (\S+)"', figure)
    assert found is not None  # matplotlib writes one
    return float(found[1]), float(found[2])


def _legend_row(key: LegendKey, y: float) -> str:
    if key.kind == "block":
        swatch = f'<rect x="14" y="{y - 5:g}" width="10" height="10" fill="var(--{key.colour})"/>'
    else:
        width = {"thin": 0.8, "bar": 4.0}.get(key.kind, 1.7)
        _, *dashes = LINE_STYLES
        pattern = DASHES[1 + dashes.index(key.kind)][1] if key.kind in dashes else ()
        dashed = f' stroke-dasharray="{" ".join(f"{width * d:g}" for d in pattern)}"' if pattern else ""
        swatch = f'<path d="M 7 {y:g} H 31" stroke="var(--{key.colour})" stroke-width="{width:g}"{dashed}/>'
    label = f'<text x="38" y="{y + 3.5:g}" font-family="{_FONTS}" font-size="10" fill="var(--ink)">'
    return f"{swatch}{label}{html.escape(key.label)}</text>\n"


def _name(figure: str, taken: set[str]) -> str:
    """A file's name without suffix, from what screen readers read out; not yet ``taken``."""
    label = re.search(r'aria-label="([^"]*)"', figure)
    words = html.unescape(label[1] if label else "").lower()
    name = re.sub(r"[^a-z0-9]+", "-", words).strip("-")[:_LONGEST_NAME] or "figure"
    free = next(n for n in (name, *(f"{name}-{i}" for i in range(2, len(taken) + 3))) if n not in taken)
    taken.add(free)
    return free
