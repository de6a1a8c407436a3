"""``<world>-fqi``: double deep fitted Q-iteration: double DQN in batches (Jin 2018, section 2.7).

The policy is fixed during a batch of env steps; then the net is fitted with as many updates as DQN would have
made for these steps, against a target net that is fixed during the fit.
"""

from __future__ import annotations

import dataclasses

from murmurate.recipes.dqn import settings
from murmurate.strategies.all_reduce import AllReduce
from murmurate.training.run import Run

ALGORITHM = "fqi"
ACTIONS = "discrete"


def recipe(name: str) -> Run:
    """Transitions are drawn uniformly; for images they are single steps. The replay keeps the last five
    batches for images, and 50,000 steps for other observations (our choice; the thesis does not say)."""
    fields = settings(name)
    learner, source = fields.pop("learner"), fields.pop("source")
    # Jin 2018, Table 2.1: after each batch of 12,500 steps, some 3,000 updates on 32 steps (one per 4 steps)
    images = fields["world"].images
    every = 12_500 if images else 512
    replay = dataclasses.replace(
        source.replay, fit_every=every, learning_starts=0, capacity=max(5 * every, 50_000), alpha=0.0
    )
    source = dataclasses.replace(source, replay=replay)
    learner = dataclasses.replace(learner, n_step=1 if images else learner.n_step, target_every=0)
    return Run(recipe=f"{name}-{ALGORITHM}", learner=learner, source=source, strategy=AllReduce(), **fields)
