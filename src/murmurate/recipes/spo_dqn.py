"""``<world>-spo-dqn``: learners with a replay each take the mean of their parameters every H updates.

SPO (Zhang, Algorithm 5, and section 5.2 for Q-learning): the net of the last mean chooses the action that the
target net values, and the target net moves every F rounds.
"""

from __future__ import annotations

import dataclasses
import math

from murmurate.recipes.dqn import settings
from murmurate.strategies.local_sgd import LocalSGD
from murmurate.training.run import Run

ALGORITHM = "spo-dqn"
_PERIOD = 10  # H
_LEARNERS = 2


def spo_dqn(name: str) -> Run:
    """Two learners that share the simulators of one (Differs: each fills its own bank, where Zhang's actors
    fill them all in turn; one stream, where Zhang's net has two).

    On Atari each draws half a batch. Adam's step is then along a gradient sqrt(2) times as noisy, and so as
    many times shorter in its direction, which the mean over learners does not undo: the learning rate does,
    by the square root rule (Malladi et al. 2022).
    """
    fields = settings(name)
    learner = dataclasses.replace(fields.pop("learner"), selector="agreed")
    simulators = fields["source"].simulators // _LEARNERS
    fields["source"] = dataclasses.replace(fields["source"], simulators=simulators)
    # each learner sees its share of the steps, and needs as many updates as one alone
    if fields["world"].name == "cartpole":
        fields["env_steps"] *= _LEARNERS
    else:
        rate = math.sqrt(_LEARNERS) * learner.learning_rate
        learner = dataclasses.replace(learner, batch=learner.batch // _LEARNERS, learning_rate=rate)
    return Run(
        recipe=f"{name}-{ALGORITHM}",
        learner=learner,
        strategy=LocalSGD(period=_PERIOD),
        replicas=_LEARNERS,
        **fields,
    )


recipe = spo_dqn
