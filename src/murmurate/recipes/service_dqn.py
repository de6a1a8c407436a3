"""``<world>-service-dqn``: DQN whose learners share a replay service (decision 0033)."""

from __future__ import annotations

import dataclasses
from typing import cast

from murmurate.recipes.apex_dqn import recipe as apex
from murmurate.sources.replay_service import with_service
from murmurate.sources.replay_source import ReplaySourceConfig
from murmurate.training.run import Run

ALGORITHM = "service-dqn"
ACTIONS = "discrete"


def recipe(name: str) -> Run:
    """Ape-X DQN whose learners share one replay; ``--replicas N`` adds learners that all-reduce, each with
    shards, actors and samplers of its own."""
    run = apex(name)
    source = with_service(cast(ReplaySourceConfig, run.source))
    return dataclasses.replace(run, recipe=f"{name}-{ALGORITHM}", source=source)
