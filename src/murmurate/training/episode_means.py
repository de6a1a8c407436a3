"""Means over the newest training episodes, of what the world says at an episode's end."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable
from typing import Any

from murmurate.spec import Episode

_NEWEST = 100  # episodes


class EpisodeMeans:
    """Successes and figures of the newest 100 episodes that have them."""

    def __init__(self) -> None:
        self._successes: deque[bool] = deque(maxlen=_NEWEST)
        self._figures: dict[str, deque[float]] = {}

    def add(self, episodes: Iterable[Episode]) -> None:
        for episode in episodes:
            if episode.success is not None:
                self._successes.append(episode.success)
            for name, value in episode.figures.items():
                self._figures.setdefault(name, deque(maxlen=_NEWEST)).append(value)

    def fields(self) -> dict[str, float]:
        """Fields of a record: ``success_rate`` and ``figure_NAME``, where the world says them."""
        means = {f"figure_{name}": statistics.fmean(values) for name, values in self._figures.items()}
        return ({"success_rate": statistics.fmean(self._successes)} if self._successes else {}) | means

    def state(self) -> dict[str, Any]:
        figures = {name: list(values) for name, values in self._figures.items()}
        return {"successes": list(self._successes), "figures": figures}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from ``state``, which may be of an earlier version, without some of its keys."""
        self._successes.extend(state.get("successes", ()))
        for name, values in state.get("figures", {}).items():
            self._figures[name] = deque(values, maxlen=_NEWEST)
