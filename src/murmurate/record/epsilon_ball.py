"""An indicator of the replicas' distance from consensus: the radius in GALA's Proposition 1.

Proposition 1 (Assran et al. 2019, section 3) in recursive form, with equal starts b_0 = 0:

    b_{k+1} = beta (b_k + ||alpha G_k||_F)

b_k is the radius ||X - mean||_F after round k, and alpha G_k are the replicas' updates in that round.

Differs: beta is here the second singular value of the topology's mixing matrix, which bounds one step
only if all replicas mix at once and the matrix is doubly stochastic. Replicas that mix independently and
with older vectors can leave the ball (one such mixing on a ring of four can multiply the distance by 1.077),
so this is an *indicator*, not a bound. ``window_bound`` computes the bound from recorded mixings.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from murmurate.errors import Refusal
from murmurate.record.runs import RecordedRun, Series
from murmurate.topology import joint_contraction, mixing_matrix, second_singular_value, topology

Array = NDArray[np.float64]
INTERVALS = 400  # time intervals, at whose ends the indicator is computed
MOST_REPLICAS = 2048  # the mixing matrix of more would be too large
WINDOW_ROUNDS = 8
_ROUNDING_NOISE = 1e-12  # a smaller contraction means exact averaging


@dataclass(frozen=True)
class Ball:
    """At times [G]: the indicator just ``after`` and just ``before`` a mixing, and the recorded distance.

    All three are ||X - mean||_F over the replicas' parameter vectors. beta: factor of the topology over all
    replicas; after a death the indicator uses that of the smaller graph.
    """

    time_seconds: Array
    total_env_steps: Array
    after: Array
    before: Array
    recorded: Array
    beta: float
    topology: str


def advance(radius: float, beta: float, rounds: float, push: float) -> float:
    """The radius after ``rounds`` equal rounds, each adding ``push`` = ||alpha G||_F, then mixing.

    That is beta^R b + push (beta + ... + beta^R), where R = ``rounds`` need not be a whole number.
    """
    if beta >= 1.0:
        return radius + rounds * push
    shrink = float(beta**rounds)
    return shrink * radius + push * beta * (1.0 - shrink) / (1.0 - beta)


def epsilon_ball(run: RecordedRun) -> Ball | str:
    """The indicator along a run, or a sentence that says why there is none."""
    name = run.strategy.get("topology")
    if run.replicas < 2:
        return "There is one replica, so there are no peers to disagree with."
    if run.replicas > MOST_REPLICAS:
        return f"{run.replicas:,} replicas are too many for a mixing matrix."
    if not isinstance(name, str):
        return f"The strategy {run.strategy_name} has no topology, so Proposition 1 does not apply."
    if not run.has("update_norm") or not run.has("distance_to_mean"):
        return "The run recorded no update_norm or no distance_to_mean, from which the indicator is computed."
    for field in ("update_norm", "distance_to_mean"):
        if missing := sorted(set(run.histories) - set(run.series(field))):
            return (
                f"The indicator needs {field} of every replica, and replicas {missing} recorded none. They "
                "may have made too few updates: --probe-every-updates sets how often it is measured."
            )
    try:
        topology(name)
    except Refusal:
        return f"This version knows no topology '{name}'."
    start = max(s.time_seconds[0] for s in run.series("distance_to_mean").values())
    end = max(s.time_seconds[-1] for s in run.series("distance_to_mean").values())
    edges = np.linspace(0.0, end, INTERVALS + 1)
    after, before = _indicator(run, name, edges)
    recorded = _recorded(run, edges)
    kept = edges >= start
    return Ball(
        edges[kept],
        run.total_env_steps(edges)[kept],
        after[kept],
        before[kept],
        recorded[kept],
        mixing_factor(name, run.replicas),
        name,
    )


@functools.cache
def mixing_factor(name: str, size: int) -> float:
    """beta of topology ``name`` over ``size`` members: the second singular value of its mixing matrix.

    A graph that changes with the clock has no single matrix; its factor is the geometric mean, per round, of
    the joint contraction over ``WINDOW_ROUNDS`` rounds.
    """
    if size < 2:
        return 0.0
    matrices = [mixing_matrix(topology(name), size, clock) for clock in range(WINDOW_ROUNDS)]
    if all(np.array_equal(matrices[0], matrix) for matrix in matrices):
        return second_singular_value(matrices[0])
    joint = joint_contraction(matrices)
    # the root of rounding noise would look like a real factor
    return float(joint ** (1.0 / WINDOW_ROUNDS)) if joint > _ROUNDING_NOISE else 0.0


def _indicator(run: RecordedRun, name: str, edges: Array) -> tuple[Array, Array]:
    """The radius just after and just before a mixing at each of ``edges`` [G]."""
    members = list(run.histories)
    deaths = [run.deaths.get(i, np.inf) for i in members]
    updates = np.stack([run.at(edges, i, "updates") for i in members])
    has_rounds = run.has("rounds")
    rounds = np.stack([run.at(edges, i, "rounds") for i in members]) if has_rounds else updates
    norm_series = run.series("update_norm")
    norms = np.stack([_sampled(norm_series[i], edges) for i in members])
    after, before = np.zeros(len(edges)), np.zeros(len(edges))
    radius = 0.0
    for k in range(1, len(edges)):
        alive = np.array([edges[k - 1] < death for death in deaths])
        lengths = (updates[:, k] - updates[:, k - 1]) * norms[:, k]  # of its updates since edge k - 1
        moved = float(np.linalg.norm(lengths[alive]))
        # the median, because a replica that died within the interval stopped counting its rounds
        mixed_rounds = float(np.median(rounds[alive, k] - rounds[alive, k - 1])) if alive.any() else 0.0
        if mixed_rounds > 0.0:
            push = moved / mixed_rounds
            radius = advance(radius, mixing_factor(name, int(alive.sum())), mixed_rounds, push)
        else:
            radius, push = radius + moved, 0.0
        after[k], before[k] = radius, radius + push
    return after, before


def _recorded(run: RecordedRun, edges: Array) -> Array:
    """sqrt(sum_i ||x_i - mean||^2) over the living replicas at each of ``edges`` [G]."""
    total = np.zeros(len(edges))
    for member, series in run.series("distance_to_mean").items():
        alive = edges < run.deaths.get(member, np.inf)
        total += np.where(alive, _sampled(series, edges), 0.0) ** 2
    return np.sqrt(total)


def _sampled(series: Series, edges: Array) -> Array:
    """A metric of one replica at each of ``edges`` [G], linear between records."""
    return np.interp(edges, series.time_seconds, series.value)
