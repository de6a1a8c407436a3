"""``<world>-a3c``: actor-learners on one vector in shared memory, without a lock (Mnih et al. 2016).

PA3C of Mohamad et al., Algorithm 5: its mini-batch m is ``simulators``, its t_max ``agent.steps``.
"""

from __future__ import annotations

from murmurate.recipes.a2c import settings
from murmurate.strategies.hogwild import Hogwild
from murmurate.training.run import Run

ALGORITHM = "a3c"


def recipe(name: str) -> Run:
    """Four A2C learners that share parameters and RMSprop statistics."""
    return Run(recipe=f"{name}-{ALGORITHM}", strategy=Hogwild(), replicas=4, **settings(name))
