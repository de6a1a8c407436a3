"""``corpus-lda``: the effect of the paper's step sizes, and step sizes that would leave no topics, or no
components of ``table-gmm``."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch

from laws.centre import finish, is_centre, serve_until
from laws.problems import Point
from murmurate.errors import Refusal
from murmurate.fabric.simulated.fabric import SimulatedFabric
from murmurate.recipes import recipe
from murmurate.replicator.replicator import Replicator
from murmurate.strategies.dpsgd import DPSGD
from murmurate.strategies.gala import GALA
from murmurate.strategies.hogwild import Hogwild
from murmurate.training.run import Run


def run(strategy, replicas=1, **model) -> Run:
    it = recipe("corpus-lda")
    learner = dataclasses.replace(it.learner, **model)
    return dataclasses.replace(it, learner=learner, strategy=strategy, replicas=replicas)


def finished(it: Run) -> Run:
    """As a run begins."""
    return dataclasses.replace(it, strategy=it.learner.adapted(it.strategy))


def moved(it: Run, fabric):
    """Where v is after one push of B updates by 1 each: rho eta B."""
    replicator = Replicator(it.strategy, fabric)
    replica = replicator.replicate(
        "x", Point(0.0), lambda p: torch.optim.SGD(p, lr=1.0), schedule=it.learner.eta
    )
    if is_centre(fabric):
        serve_until(replicator, fabric)
    else:
        for _ in range(it.strategy.local_updates):
            replica.follow(-torch.ones(1, dtype=replica.params.dtype))
        finish(replicator, fabric)
    return float(replicator.consensus()["x"])


@pytest.mark.parametrize(("updates", "rate"), [(1, 0.1), (16, 0.1), (16, 0.4)])
def test_the_papers_eta_and_rho_are_both_rate_over_the_fourth_root(updates, rate):
    """Mohamad et al., equation 13; they multiply."""
    strategy = DPSGD(threads=1, local_updates=updates, wait=True)
    it = finished(run(strategy, step_rule="paper", rate=rate))
    result, _ = SimulatedFabric(2, seed=0).run([functools.partial(moved, it)] * 2)
    each = rate / updates**0.25
    assert result == pytest.approx(each * each * updates, rel=1e-5)


def test_what_the_user_chose_stays():
    own = run(DPSGD(global_learning_rate=0.3), step_rule="paper")
    assert finished(own) == own
    for other in (run(DPSGD()), run(Hogwild(), step_rule="paper"), run(DPSGD(), step_rule="average")):
        assert finished(other) == other


@pytest.mark.parametrize(
    ("strategy", "replicas", "model", "words"),
    [
        # s = 0.8^10 = 0.107; 1/2 x 4 x 0.893
        (
            DPSGD(threads=1, batch=4),
            2,
            {"delay": 1.0, "step_rule": "average", "rate": 0.2},
            ["s = 0.107", "0.5 x 4 x 0.893 = 1.79", "below 1", "global_learning_rate of 0.27"],
        ),
        (DPSGD(threads=2, global_learning_rate=1.5), 2, {}, ["p B = 2 x 10", "1.5 x 1 x"]),
        (DPSGD(threads=1, batch=3), 2, {"delay": 1.0}, ["s = 0 of v", "0.5 x 3 x 1 = 1.5"]),
    ],
)
def test_steps_after_which_a_topic_could_be_below_zero_are_refused(strategy, replicas, model, words):
    with pytest.raises(Refusal) as refused:
        run(strategy, replicas, **model).validate()
    for word in words:
        assert word in str(refused.value)


def test_steps_after_which_a_component_could_be_below_zero_are_refused():
    learner = dataclasses.replace(recipe("table-gmm").learner, step_rule="average", rate=0.2)
    strategy = DPSGD(threads=1, batch=4)
    it = dataclasses.replace(recipe("table-gmm"), learner=learner, strategy=strategy, replicas=2)
    with pytest.raises(Refusal, match=r"0\.5 x 4 x 0\.893"):
        it.validate()
    dataclasses.replace(it, strategy=DPSGD(threads=1)).validate()


@pytest.mark.parametrize(
    ("taken", "too_far"),
    [
        # M = 4 pushes of 0.27 x 0.893 each, and of 0.29 x 0.893
        (
            run(DPSGD(threads=1, batch=4, global_learning_rate=0.27), 2, step_rule="average", rate=0.2),
            run(DPSGD(threads=1, batch=4, global_learning_rate=0.29), 2, step_rule="average", rate=0.2),
        ),
        # 1.6 x 0.621, and 1.7 x 0.621
        (
            run(DPSGD(threads=1, global_learning_rate=1.6), 4),
            run(DPSGD(threads=1, global_learning_rate=1.7), 4),
        ),
        # rho is 1 / nodes
        (run(DPSGD(threads=1), 4), run(DPSGD(threads=1, batch=7), 4)),
        # s is 0 to the last bit, and v' = u; with two of such pushes there is twice as much taken as there is
        (run(DPSGD(threads=4, local_updates=1000), 4), run(DPSGD(threads=4, local_updates=1000, batch=2), 4)),
        # no push takes anything away from a centre
        (run(GALA(), 4, delay=1.0), run(DPSGD(threads=1, batch=5), 4, delay=1.0)),
        # the paper's rho, and 1 / nodes with the paper's eta
        (
            finished(run(DPSGD(threads=1, local_updates=15, batch=16), 8, step_rule="paper")),
            run(DPSGD(threads=1, local_updates=15, batch=16), 8, step_rule="paper"),
        ),
        # nothing of an actor-critic must stay above 0
        (
            dataclasses.replace(recipe("cartpole-hsa2c"), strategy=DPSGD(global_learning_rate=5.0)),
            run(DPSGD(global_learning_rate=5.0), 4),
        ),
    ],
)
def test_steps_that_leave_something_are_taken_and_their_neighbours_refused(taken, too_far):
    taken.validate()
    with pytest.raises(Refusal, match="may fall below it"):
        too_far.validate()
