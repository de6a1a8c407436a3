"""A map of topics as a picture."""

from __future__ import annotations

import html
from typing import Any

import numpy as np
from numpy.typing import NDArray

_WIDTH, _HEIGHT = 760.0, 440.0
_LARGEST_RADIUS, _MARGIN = 38.0, 16.0
_LETTER_WIDTH, _LABEL_HEIGHT = 6.2, 25.0
_WORDS = 2  # that are shown below a topic's number


def svg_map(points: NDArray[np.float64], rows: list[dict[str, Any]]) -> str:
    """A circle for each topic, which links to the topic's section.

    points: [K, 2]. rows: ``topic``, ``weight`` and ``words`` of each topic, the greatest weight first, so
    that small circles lie on large ones.
    """
    weights = np.array([row["weight"] for row in rows])
    radii = np.maximum(_LARGEST_RADIUS * np.sqrt(weights / weights.max()), 4.0)
    centres = _scaled(points[[row["topic"] for row in rows]])
    circles, labels = [], []
    boxes: list[tuple[float, float, float]] = []  # x, y and width of each label
    for row, (x, y), radius in zip(rows, centres.tolist(), radii.tolist(), strict=True):
        words = [top["word"] for top in row["words"]]
        title = html.escape(f"{row['topic']}: {' '.join(words)} ({row['weight']:.1%})")
        circles.append(
            f'<a href="#topic-{row["topic"]}"><title>{title}</title>'
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}"/></a>'
        )
        label = " ".join(words[:_WORDS])
        boxes.append(_free_box(x, y, len(label) * _LETTER_WIDTH, boxes))
        y = boxes[-1][1]
        labels.append(
            f'<text class=number x="{x:.1f}" y="{y:.1f}">{row["topic"]}</text>'
            f'<text x="{x:.1f}" y="{y + 12:.1f}">{html.escape(label)}</text>'
        )
    return (
        f'<svg viewBox="0 0 {_WIDTH:g} {_HEIGHT:g}" role=img aria-label="map of the topics">'
        f"{''.join(circles)}<g pointer-events=none>{''.join(labels)}</g></svg>"
    )


def _free_box(
    x: float, y: float, width: float, boxes: list[tuple[float, float, float]]
) -> tuple[float, float, float]:
    """The box of a label at (x, y), moved up or down to where it overlaps no other label, if there is
    such a place."""

    def overlaps(box_y: float) -> bool:
        return any(
            abs(box_y - other_y) < _LABEL_HEIGHT and abs(x - other_x) < (width + other_width) / 2
            for other_x, other_y, other_width in boxes
        )

    offsets = sorted(range(-150, 151, 5), key=abs)
    free = (y + offset for offset in offsets if not overlaps(y + offset) and 20 < y + offset < _HEIGHT - 20)
    return x, next(free, y), width


def _scaled(points: NDArray[np.float64]) -> NDArray[np.float64]:
    """``points`` moved and scaled into the picture [K, 2], with the same scale on both axes."""
    room = np.array([_WIDTH, _HEIGHT]) - 2 * (_LARGEST_RADIUS + _MARGIN)
    low, high = points.min(0), points.max(0)
    extent = np.maximum(high - low, 1e-9)
    scale = float((room / extent).min()) if (high - low).max() > 1e-9 else 0.0
    scaled: NDArray[np.float64] = (points - (low + high) / 2) * scale + np.array([_WIDTH, _HEIGHT]) / 2
    return scaled
