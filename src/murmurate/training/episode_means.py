"""Means over the newest training episodes, of what the world says at an episode's end; whether any ends."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable
from typing import Any

from murmurate.spec import Episode
from murmurate.training.run import Run

_NEWEST = 100  # episodes
_LONGEST = 30_000  # env steps of a simulator; an episode of Atari has 27,000 at most


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


def endless_warning(run: Run, steps_before: int, steps: int) -> str:
    """What to say of a replica of which no episode has ended in ``steps`` env steps, once these have become
    very many since ``steps_before``; else empty."""
    limit = _LONGEST * getattr(run.source, "simulators", 1)
    if not run.evaluation.plays or not steps_before < limit <= steps:
        return ""
    option = ", or limit them: --world.max-episode-steps (in Python: world={'max_episode_steps': N})"
    return (
        f"no episode has ended in {_LONGEST:,} env steps of each simulator, so there are no returns. Let "
        f"step return terminated or truncated{option if hasattr(run.world, 'max_episode_steps') else ''}."
    )
