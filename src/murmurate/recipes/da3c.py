"""``<world>-da3c``: actor-learners push gradients to a master and pull its parameters.

DA3C of Mohamad et al., Algorithms 6 and 7, with M = 1; the asynchronous replicator of TF-Replicator.
"""

from __future__ import annotations

from murmurate.recipes.a2c import settings
from murmurate.strategies.parameter_server import ParameterServer
from murmurate.training.run import Run

ALGORITHM = "da3c"


def da3c(name: str) -> Run:
    """Four A2C learners; the master clips, schedules and runs RMSprop on each gradient as it comes."""
    strategy = ParameterServer(local_steps=False)  # a step that the next pull overwrites at once is wasted
    return Run(recipe=f"{name}-{ALGORITHM}", strategy=strategy, replicas=4, **settings(name))


recipe = da3c
