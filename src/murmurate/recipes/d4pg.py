"""``<world>-d4pg``: deterministic policy and a critic of return distributions, from vectors or pixels."""

from __future__ import annotations

from murmurate.agents.d4pg import D4PG
from murmurate.evaluation.games import Games
from murmurate.recipes.td3 import settings
from murmurate.replay.config import ReplayConfig
from murmurate.sources.replay_source import ReplaySourceConfig
from murmurate.strategies.all_reduce import AllReduce
from murmurate.training.run import Run
from murmurate.worlds.registry import world

ALGORITHM = "d4pg"
ACTIONS = "vector"
# Least and greatest discounted return to expect, at a discount of 0.99. Worlds not listed have -150 and 150,
# the paper's numbers for the Control Suite, whose rewards are from 0 to 1.
_RETURNS = {
    "adroit-door": (-150.0, 2_000.0),
    "adroit-hammer": (-1_000.0, 10_000.0),
    "adroit-pen": (-700.0, 6_000.0),
    "adroit-relocate": (-150.0, 3_000.0),
    "ant": (-150.0, 700.0),
    "halfcheetah": (-300.0, 1_500.0),
    "hopper": (-50.0, 400.0),
    "humanoid": (-150.0, 800.0),
    "humanoid-standup": (0.0, 30_000.0),
    "inverted-double-pendulum": (-50.0, 950.0),
    "pendulum": (-1_000.0, 0.0),
    "walker2d": (-50.0, 700.0),
}


def recipe(name: str) -> Run:
    """One learner that acts and learns in turn, with a uniform replay; with ``--actors K``, K processes act
    instead, and ``--replicas N`` adds learners that all-reduce."""
    environment = world(name)
    if not environment.images:
        low, high = _RETURNS.get(environment.name, (D4PG.v_min, D4PG.v_max))
        learner = D4PG(v_min=low, v_max=high)
        return Run(recipe=f"{name}-{ALGORITHM}", learner=learner, strategy=AllReduce(), **settings(name))
    # rewards of the Control Suite are from 0 to 1 per step, and an action is repeated for several steps
    high = 100.0 * getattr(environment, "action_repeat", 1)
    # much as DrQ learns from pixels: one update on 128 transitions for every env step
    replay = ReplayConfig(capacity=100_000, alpha=0.0, learning_starts=1_000, samples_per_insert=128.0)
    return Run(
        recipe=f"{name}-{ALGORITHM}",
        world=environment,
        learner=D4PG(
            batch=128,
            n_step=3,
            policy_rate=3e-4,
            critic_rate=3e-4,
            v_min=0.0,
            v_max=high,
            target_every=1,
            polyak=0.01,
            shift=4,
            precision="auto",
        ),
        strategy=AllReduce(),
        source=ReplaySourceConfig(simulators=1, replay=replay, random_env_steps=1_000),
        evaluation=Games(),
        env_steps=250_000,
    )
