"""Short simulated runs."""

from __future__ import annotations

import dataclasses

from murmurate.recipes import recipe
from murmurate.simulation.cluster import Cluster
from murmurate.simulation.start import simulate
from murmurate.strategies import strategy
from short_runs import altered

STEP = 0.01


def run_of(name="gala", replicas=5, updates=20, seed=0, steps=8, **changes):
    base = recipe("cartpole-gala")
    base = dataclasses.replace(base, learner=dataclasses.replace(base.learner, steps=steps))
    return altered(
        base,
        strategy=strategy(name)(),
        replicas=replicas,
        simulators=1,
        updates=updates,
        env_steps=None,
        seed=seed,
        eval_episodes=1,
        **changes,
    )


def result(folder, run, cluster=None):
    summary = simulate(run, cluster or Cluster(), folder, quiet=True).summary
    assert summary["exit"] == "finished"
    return summary
