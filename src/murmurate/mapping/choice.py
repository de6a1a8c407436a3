"""Trains the configurations that a plan would choose to the target, so that none is chosen by a rule alone.

The rule (``learning``) knows the effect of each factor by itself. Factors together may need more env steps
than the product says: with two replicas and four times the batch, say, too few updates are left.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from murmurate.mapping.learning import (
    Learning,
    Train,
    differences,
    env_steps_to_target,
    learned_by,
    mean_env_steps,
    trainings_of,
)
from murmurate.mapping.profile import DeviceProfile, key
from murmurate.mapping.search import search
from murmurate.strategies.interface import Strategy
from murmurate.training.run import Run

_MOST_TRIED = 10  # configurations that are trained, at most
_MISS = 2.0  # one that misses the target counts as if it needed so many times the env steps of its runs


def try_choices(
    run: Run,
    profile: DeviceProfile,
    log: Callable[[str], None],
    strategies: Sequence[Strategy] = (),
    train: Train | None = None,
) -> None:
    """Train the best predicted configuration to the target, correct the rule by the env steps that it needed,
    and search again, until the best one has been trained; at most ten. Changes ``profile``, which must know
    how ``run`` learns. strategies, train: as for ``search`` and ``learning.measure``."""
    learning = profile.recipes[key(run)].learning
    assert learning is not None
    for _ in range(_MOST_TRIED):
        best = search(run, profile, "time", strategies=strategies)[0]
        if learned_by(best.run) in learning.tried:
            return
        trainings = trainings_of(best.run, learning.target, train, log)
        predicted, steps = env_steps_to_target(best.run, run, learning), mean_env_steps(trainings)
        learning.runs += len(trainings)
        missed = not math.isfinite(steps)
        learning.tried[learned_by(best.run)] = None if missed else steps
        needed = "target missed" if missed else f"{steps:,.0f} env steps"
        log(f"the best predicted, {best.name}: {needed}, predicted {predicted:,.0f}")
        if missed:
            made = [training.env_steps for training in trainings if math.isfinite(training.env_steps)]
            steps = _MISS * max(made, default=predicted)
        correct(learning, best.run, run, steps / predicted)
    log(f"after {_MOST_TRIED} of them the best predicted configuration has not been trained")


def correct(learning: Learning, candidate: Run, run: Run, factor: float) -> None:
    """Change the exponents as little as possible, in the sum of squares, so that the rule predicts ``factor``
    times as many env steps for ``candidate``, a variant of ``run``."""
    logs = {name: math.log(ratio) for name, ratio in differences(candidate, run).items()}
    squares = sum(value**2 for value in logs.values())
    for name, value in logs.items():
        learning.exponents[name] = learning.exponents.get(name, 0.0) + math.log(factor) * value / squares
