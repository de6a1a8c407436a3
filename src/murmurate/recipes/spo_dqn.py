"""``<world>-spo-dqn``: learners, each with a replay, average their parameters every H updates.

SPO (Zhang 2022, Algorithm 5, and section 5.2 for Q-learning): the net of the last average chooses the action
that the target net evaluates, and the target net moves every F rounds.
"""

from __future__ import annotations

import dataclasses
import math

from murmurate.recipes.dqn import settings
from murmurate.strategies.local_sgd import LocalSGD
from murmurate.training.run import Run

ALGORITHM = "spo-dqn"
ACTIONS = "discrete"
_PERIOD = 10  # H
_LEARNERS = 2


def recipe(name: str) -> Run:
    """Two learners with half of the simulators each (Differs: each learner fills its own replay, where
    Zhang's actors fill all replays in turn; the net has one stream, where Zhang's has two).

    Elsewhere than on cartpole each learner draws half a batch. The gradient is then sqrt(2) times as noisy,
    so Adam's steps in its direction are shorter by that factor, which averaging over learners does not undo.
    The learning rate makes up for it, by the square root rule (Malladi et al. 2022).
    """
    fields = settings(name)
    learner = dataclasses.replace(fields.pop("learner"), selector="agreed", behaviour="agreed")
    simulators = fields["source"].simulators // _LEARNERS
    fields["source"] = dataclasses.replace(fields["source"], simulators=simulators)
    # each learner gets its share of the env steps, and needs as many updates as a single learner
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
