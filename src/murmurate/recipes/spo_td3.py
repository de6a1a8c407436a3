"""``<world>-spo-td3``: TD3 learners, each with a replay, average their parameters every H updates.

SPO-TD3 (Zhang 2022, Algorithms 6 and 8, and section 5.2.2.2): in each round the learners update their critics
H times and average them, then their policies H times with the averaged critics and average these; the target
nets are copied every F rounds.
"""

from __future__ import annotations

import dataclasses

from murmurate.agents.td3 import TD3
from murmurate.recipes.td3 import settings
from murmurate.strategies.local_sgd import LocalSGD
from murmurate.training.run import Run

ALGORITHM = "spo-td3"
ACTIONS = "vector"
_PERIOD = 10  # H
_ROUNDS = 20  # F
_LEARNERS = 2
_ACTORS = 1  # per learner


def recipe(name: str) -> Run:
    """Two learners with half a batch each, and each with an actor and a prioritized replay of its own
    (Differs: each actor fills the replay of its learner, where Zhang's actors fill all replays in turn).

    Each of L learners has 1 / L of the env steps and of the batch, so it makes as many updates as a single
    learner at the same ``samples_per_insert``.
    """
    fields = settings(name)
    source = fields.pop("source")
    replay = dataclasses.replace(
        source.replay,
        alpha=0.6,
        learning_starts=source.replay.learning_starts // _LEARNERS,
    )
    source = dataclasses.replace(
        source,
        simulators=2 * _ACTORS,
        actors=_ACTORS,
        replay=replay,
        random_env_steps=source.random_env_steps // _LEARNERS,
    )
    learner = TD3(batch=TD3().batch // _LEARNERS, policy_delay=0, target_every=_ROUNDS * _PERIOD, polyak=1.0)
    return Run(
        recipe=f"{name}-{ALGORITHM}",
        learner=learner,
        strategy=LocalSGD(period=_PERIOD),
        replicas=_LEARNERS,
        source=source,
        **fields,
    )
