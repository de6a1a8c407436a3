"""``<world>-spo-dqn``: learners with a replay each take the mean of their parameters every H updates.

SPO (Zhang, Algorithm 5, and section 5.2 for Q-learning): the net of the last mean chooses the action that the
target net values, and the target net moves every F rounds.
"""

from __future__ import annotations

import dataclasses

from murmurate.recipes.dqn import settings
from murmurate.run_spec import Run
from murmurate.strategies.local_sgd import LocalSGD

ALGORITHM = "spo-dqn"
_PERIOD = 10  # H


def spo_dqn(name: str) -> Run:
    """Two learners that share the simulators of one (Differs: each fills its own bank, where Zhang's actors
    fill them all in turn)."""
    usual = settings(name)
    agent = dataclasses.replace(usual.pop("agent"), selector="agreed")
    usual["simulators"] //= 2
    # each learner sees half of the steps, and needs as many updates as one alone
    if name == "cartpole":
        usual["env_steps"] *= 2
    else:
        agent = dataclasses.replace(agent, batch=agent.batch // 2)
    return Run(
        recipe=f"{name}-{ALGORITHM}", agent=agent, strategy=LocalSGD(period=_PERIOD), replicas=2, **usual
    )


recipe = spo_dqn
