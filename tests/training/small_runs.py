"""A short run of two replicas that records all."""

from __future__ import annotations

from typing import Any

from murmurate.recipes import recipe
from murmurate.strategies import strategies
from murmurate.training.run import Run
from short_runs import altered


def a_run(strategy: str = "all-reduce", **fields: Any) -> Run:
    settings: dict[str, Any] = {
        "strategy": strategies()[strategy](), "replicas": 2, "simulators": 3, "env_steps": None, "updates": 6,
        "stop_at_return": None, "record_every_seconds": 1e-9,
    }  # fmt: skip
    return altered(recipe("cartpole-gala"), **{**settings, **fields})
