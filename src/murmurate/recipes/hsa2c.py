"""``<world>-hsa2c``: A2C under DPSGD (Mohamad et al., Algorithms 8 and 9).

The paper's k is ``agent.steps``, its local mini-batch m ``simulators``, p ``strategy.threads``, B
``strategy.local_updates`` and M ``strategy.batch``.
"""

from __future__ import annotations

from murmurate.recipes.a2c import settings
from murmurate.strategies.dpsgd import DPSGD
from murmurate.training.run import Run

ALGORITHM = "hsa2c"


def recipe(name: str) -> Run:
    """Two nodes of two learners each, lock-free inside a node; a master adds up the nodes' changes."""
    return Run(recipe=f"{name}-{ALGORITHM}", strategy=DPSGD(), replicas=4, **settings(name))
