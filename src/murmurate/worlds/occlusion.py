"""A rectangle of the screen that an agent does not see."""

from __future__ import annotations

from collections.abc import Sequence

from murmurate.errors import Refusal


def check_rectangle(rectangle: Sequence[int], colour: Sequence[int], width: int, height: int) -> None:
    """Raise Refusal unless ``rectangle`` is (left, right, top, bottom) within a screen, or empty, and
    ``colour`` is (red, green, blue)."""
    if len(colour) != 3:
        raise Refusal(f"a colour has 3 numbers, not {len(colour)}. Use --world.occlude-colour 0 0 0.")
    if not rectangle:
        return
    left, right, top, bottom = rectangle if len(rectangle) == 4 else (0, 0, 0, 0)
    if not (0 <= left < right <= width and 0 <= top < bottom <= height):
        raise Refusal(
            f"{list(rectangle)} is no left, right, top and bottom within a screen of {width} x {height}: "
            f"use --world.occlude 0 {width // 2} 0 {height // 2}."
        )
