"""The frames of a game, for tests."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from murmurate.evaluation.games import filmed_game


def record_game(*arguments: Any, **options: Any) -> tuple[npt.NDArray[np.uint8], float]:
    """All frames of ``filmed_game`` that count, [n, H, W, 3], and the game's return."""
    game, frames = filmed_game(*arguments, **options), []
    while True:
        try:
            frame = next(game)
        except StopIteration as end:
            return np.stack(frames), end.value
        frames = [] if frame is None else [*frames, frame]
