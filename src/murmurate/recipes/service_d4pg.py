"""``<world>-service-d4pg``: D4PG whose learners share a replay service (TF-Replicator, section 6)."""

from __future__ import annotations

import dataclasses
from typing import cast

from murmurate.recipes.d4pg import recipe as d4pg
from murmurate.sources.replay_service import with_service
from murmurate.sources.replay_source import ReplaySourceConfig
from murmurate.training.run import Run

ALGORITHM = "service-d4pg"
ACTIONS = "vector"
_ACTORS = 2


def recipe(name: str) -> Run:
    """Two actors, which write to a shard that samplers draw from; ``--replicas N`` adds learners that
    all-reduce, each with shards, actors and samplers of its own. The paper has 32 actors and 8 samplers:
    ``--actors 32 --samplers 8``."""
    run = d4pg(name)
    source = with_service(cast(ReplaySourceConfig, run.source), simulators=2 * _ACTORS, actors=_ACTORS)
    return dataclasses.replace(run, recipe=f"{name}-{ALGORITHM}", source=source)
