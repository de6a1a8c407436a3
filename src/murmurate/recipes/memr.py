"""``<world>-memr``: MBPO with one-step rollouts from states drawn by entropy; a quarter of MBPO's updates."""

from __future__ import annotations

from murmurate.agents._model_based import PolicySettings
from murmurate.agents.memr import MEMR
from murmurate.recipes.mbpo import WORLDS as MBPO_WORLDS
from murmurate.recipes.mbpo import settings, task_of
from murmurate.sources.imagined import ImaginedSourceConfig, ModelRollouts
from murmurate.training.run import Run

ALGORITHM = "memr"
WORLDS = MBPO_WORLDS
_SHARE = 1 / 4  # of MBPO's updates (Zhang 2022, section 3.3.1)


def recipe(name: str) -> Run:
    """One learner; 100 rollouts per env step, of which the last 100,000 are kept (Zhang 2022, Fig. 3.6, which
    does not give the number of rollouts)."""
    task = task_of(name)
    source = ImaginedSourceConfig(
        learning_starts=task.learning_starts,
        updates_per_step=task.updates * _SHARE,
        real_share=0.0,
        rollouts=ModelRollouts(every=10, starts=1_000, kept=100, alpha=0.6),
    )
    policy = PolicySettings(target_entropy=task.target_entropy)
    return Run(
        recipe=f"{name}-{ALGORITHM}", learner=MEMR(policy=policy), source=source, **settings(name, task)
    )
