"""Trains the configurations that a plan would choose to the target, so that none is chosen by a rule alone.

The rule (``learning``) knows the effect of each factor by itself. Factors together may need more env steps
than the product says: with two replicas and four times the batch, say, too few updates are left.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

from murmurate.mapping import learning
from murmurate.mapping.learning import Learning, Train, differences, env_steps_to_target, learned_by
from murmurate.mapping.profile import DeviceProfile, key
from murmurate.mapping.search import search
from murmurate.strategies.interface import Strategy
from murmurate.training.run import Run

_MOST_TRIED = 10  # configurations that are trained, at most
_MISS = 2.0  # one that misses the target counts as if it needed so many times the env steps of its runs


def learn(
    run: Run,
    profile: DeviceProfile,
    target: float,
    log: Callable[[str], None],
    strategies: Sequence[Strategy] = (),
    train: Train | None = None,
    keep: Callable[[], None] = lambda: None,
    again: bool = False,
) -> Learning:
    """Let ``profile``, which has the costs of ``run``, know how fast it and what a plan would choose reach
    ``target``; what it knows is not trained again, unless ``again``. Returns what it knows then.

    strategies: those that the plan considers. train: as for ``measure``. keep: saves the profile; called
    whenever something was trained, so that an interruption loses no more than that. Raises as ``measure``.
    """
    costs = profile.recipes[key(run)]
    if again or not learning.answers(costs.learning, run, target, strategies):
        costs.learning = learning.measure(run, target, log, strategies, train)
        profile.renew()
        keep()
    assert costs.learning is not None
    try_choices(run, profile, log, strategies, train, keep)
    return costs.learning


def try_choices(
    run: Run,
    profile: DeviceProfile,
    log: Callable[[str], None],
    strategies: Sequence[Strategy] = (),
    train: Train | None = None,
    keep: Callable[[], None] = lambda: None,
) -> None:
    """Train the best predicted configuration to the target, correct the rule by the env steps that it needed,
    and search again, until the best one has been trained; at most ten. Changes ``profile``, which must know
    how ``run`` learns. The other arguments are those of ``learn``."""
    known = profile.recipes[key(run)].learning
    assert known is not None
    for number in itertools.count():
        best = search(run, profile, "time", strategies=strategies)[0]
        if learned_by(best.run) in known.tried:
            return
        if number == _MOST_TRIED:
            log(f"{_MOST_TRIED} configurations were trained; the best predicted is another one")
            return
        trainings = learning.trainings_of(best.run, known.target, train, log)
        predicted, steps = env_steps_to_target(best.run, run, known), learning.mean_env_steps(trainings)
        known.runs += len(trainings)
        known.tried[learned_by(best.run)] = steps
        needed = "target missed" if steps is None else f"{steps:,.0f} env steps"
        log(f"the best predicted, {best.name}: {needed}, predicted {predicted:,.0f}")
        if steps is None:
            made = [training.env_steps for training in trainings if math.isfinite(training.env_steps)]
            steps = _MISS * max(made, default=predicted)
        correct(known, best.run, run, steps / predicted)
        keep()


def correct(learning: Learning, candidate: Run, run: Run, factor: float) -> None:
    """Change the exponents as little as possible, in the sum of squares, so that the rule predicts ``factor``
    times as many env steps for ``candidate``, a variant of ``run``."""
    logs = {name: math.log(ratio) for name, ratio in differences(candidate, run).items()}
    squares = sum(value**2 for value in logs.values())
    for name, value in logs.items():
        learning.exponents[name] = learning.exponents.get(name, 0.0) + math.log(factor) * value / squares
