"""Where a run on a data set ends: after passes through its training examples, or where its user says."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Collection
from numbers import Real

from murmurate.errors import Refusal
from murmurate.training.run import Run

ENDS = frozenset({"env_steps", "updates", "minutes"})
_MOST_PASSES = 1_000  # no net or model needs more
_MOST_GIVEN = 1e30  # as many as ``--passes`` takes; times the examples it does not overflow


def is_of_examples(run: Run) -> bool:
    """Whether the run's world is a data set."""
    return run.world.unit != "env steps"


def without_recipe_end(run: Run, given: Collection[str]) -> Run:
    """The recipe ``run`` without its number of examples, if its user gives another end: the recipe cannot
    know the size of the data set, and learning rates would follow an end that is never reached.

    given: the names among ``ENDS`` that the user gives.
    """
    return dataclasses.replace(run, env_steps=None) if given and is_of_examples(run) else run


def after_passes(run: Run, passes: float, given: Collection[str]) -> Run:
    """``run``, ended after so many passes of its replicas together through the training examples.

    given: as in ``without_recipe_end``. Raises Refusal if env steps are among them, or for simulators.
    """
    if not isinstance(passes, Real) or not 0 < passes <= _MOST_GIVEN:
        raise Refusal(f"passes is {passes!r}; it must be a number above 0, and at most {_MOST_GIVEN:g}.")
    if "env_steps" in given:
        raise Refusal(f"--passes and --env-steps both say how many {run.unit} are read. Leave one out.")
    if not is_of_examples(run):
        raise Refusal(
            f"--passes are passes through a data set, and the world '{run.world.name}' is none. Give "
            "--env-steps in their place."
        )
    return dataclasses.replace(run, env_steps=max(1, round(passes * run.world.spec().examples)))


def warn_of_many_passes(run: Run) -> None:
    """Warn if the run ends only after far more passes than it can use, as on a small data set with a recipe
    for a large one."""
    if run.env_steps is None or run.updates is not None or run.minutes is not None or not is_of_examples(run):
        return
    examples = run.world.spec().examples
    if run.env_steps > _MOST_PASSES * examples:
        warnings.warn(
            f"the run ends after {run.env_steps:,} {run.unit}, which are {run.env_steps / examples:,.0f} "
            f"passes through the {examples:,} to learn from. Give fewer, as in --passes 100 (passes=100 in "
            "Python).",
            stacklevel=2,
        )


def warn_of_late_policy(run: Run) -> None:
    """Warn if the policy learns before it acts: elsewhere the start of learning also ends random actions."""
    replay, steps = getattr(run.source, "replay", None), getattr(run.source, "random_env_steps", 0)
    if replay is not None and steps > replay.learning_starts:
        warnings.warn(
            f"each learner begins to learn after {replay.learning_starts:,} env steps, and its first "
            f"{steps:,} have random actions. If its policy is to act as soon as it learns, give "
            f"--random-env-steps {replay.learning_starts} "
            f"(random_env_steps={replay.learning_starts} in Python).",
            stacklevel=2,
        )
