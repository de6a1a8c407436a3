"""``<world>-da3c``: actor-learners push gradients to a master and pull its parameters.

DA3C of Mohamad et al., Algorithms 6 and 7, with M = 1; the asynchronous replicator of TF-Replicator.
"""

from __future__ import annotations

from murmurate.recipes.a2c import settings
from murmurate.strategies.parameter_server import ParameterServer
from murmurate.training.run import Run

ALGORITHM = "da3c"


def recipe(name: str) -> Run:
    """Four A2C learners; the master applies clipping, schedule and RMSprop to each gradient on arrival."""
    strategy = ParameterServer(local_steps=False)  # the next pull would overwrite a local step at once
    return Run(recipe=f"{name}-{ALGORITHM}", strategy=strategy, replicas=4, **settings(name))
