"""HSA2C's tables on a simulated cluster with costs measured here (Mohamad et al., Fig. 5 and 6, eq. 57)."""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any, cast

from murmurate.agents.a2c import A2C
from murmurate.bench import _commands, _simulated
from murmurate.bench._result import Log
from murmurate.ranges import PositiveFloat, PositiveInt
from murmurate.recipes import recipe
from murmurate.simulation.bounds import total_bounds
from murmurate.simulation.cluster import Cluster
from murmurate.sources.rollouts import RolloutSourceConfig
from murmurate.strategies.dpsgd import DPSGD
from murmurate.strategies.hogwild import Hogwild
from murmurate.strategies.interface import Strategy

NAME = "hsa2c-scaling"
SUMMARY = "data points per second and time to a score of HSA2C, DA3C and PA3C, to 60 nodes, simulated"


@dataclasses.dataclass(frozen=True)
class HSA2CPlan:
    """The paper's nodes have 28 cores and an unspecified network; ours have ``threads`` and ``network``.

    steps: number of updates of each thread in the runs that measure speed.

    nodes: the numbers of nodes whose speed is measured. local_updates: values of B, each measured with every
    number of nodes. threads: number of threads of a node. learning_nodes: the numbers of nodes in the runs
    that measure the time to a score. learning_steps: duration of these runs, as the number of updates that a
    thread would make without exchanges. seeds: number of seeds of the runs that measure the time to a score.
    scores: training returns to which the time is measured, chosen before any run, so that they favour no
    scheme. measured_updates: number of updates that are timed for the cost of an update. exchange_rounds:
    number of messages that are timed for the cost of a message. network: latency and bandwidth between nodes.
    """

    nodes: tuple[PositiveInt, ...] = (1, 20, 30, 40, 60)
    local_updates: tuple[PositiveInt, ...] = (1, 5, 20)
    threads: PositiveInt = 2
    steps: PositiveInt = 40
    learning_nodes: tuple[PositiveInt, ...] = (8,)
    learning_steps: PositiveInt = 240
    seeds: PositiveInt = 2
    scores: tuple[PositiveFloat, ...] = (50.0, 100.0, 195.0)
    measured_updates: PositiveInt = 100
    exchange_rounds: PositiveInt = 100
    network: str = "latency=1e-4,bandwidth=1.25e9"


@dataclasses.dataclass(frozen=True)
class ThreadCosts:
    """Measured seconds of a thread's step and CPU seconds of a message; data points per step; number of
    parameters."""

    step_seconds: float
    handling_seconds: float
    points: int
    parameters: int


QUICK, FULL = HSA2CPlan(), HSA2CPlan(steps=100, learning_nodes=(8, 20), learning_steps=600, seeds=5)


def measure(plan: HSA2CPlan, log: Log) -> dict[str, Any]:
    """A thread is a learner with one simulator; its step is measured on Pong, where ale-py is installed.

    The gradients and the scores are a CartPole learner's, whose messages take as long as messages of the
    measured learner's size. The master of HSA2C and of DA3C joins as many updates as there are nodes, as in
    the paper, and takes their mean (rho = 1/M); nodes wait for its answer (Algorithm 9, line 33).
    ``published`` is HSA2C with the paper's setting: rho 0.01, momentum 0.5, and the middle value of B,
    counted in updates of the node.
    """
    _simulated.refuse_unknown(plan.network)
    costs, world = _costs(plan, log)
    speed: dict[str, dict[str, float]] = {}
    for nodes in plan.nodes:
        for name, (strategy, replicas) in _schemes(nodes, plan).items():
            log(f"speed of {name} on {nodes} node(s)")
            speed.setdefault(name, {})[f"{nodes}_nodes"] = points_per_second(strategy, replicas, costs, plan)
    return {
        "world_of_the_step": world,
        "world_of_the_score": "cartpole",
        **dataclasses.asdict(costs),
        "data_points_per_second": speed,
        "time_to_score": {f"{n}_nodes": times(n, costs, plan, log) for n in plan.learning_nodes},
        "equation_57": [equation_57_row(n, costs, plan) for n in plan.nodes],
    }


def _costs(plan: HSA2CPlan, log: Log) -> tuple[ThreadCosts, str]:
    world = _commands.installed_world()
    real = dataclasses.replace(recipe(f"{world}-gala"), replicas=1, source=RolloutSourceConfig(simulators=1))
    log(f"a step of {real.recipe} with one simulator")
    seconds = statistics.fmean(_simulated.step_seconds(real, plan.measured_updates))
    parameters = _simulated.parameters(real)
    log(f"a message of {parameters} parameters")
    cost = _simulated.message_cost(parameters, plan.exchange_rounds)
    return ThreadCosts(seconds, cost.handling_seconds, cast(A2C, real.learner).steps, parameters), world


def _schemes(nodes: int, plan: HSA2CPlan) -> dict[str, tuple[Strategy, int]]:
    """Name -> (strategy, replicas). DA3C is DPSGD with p = B = 1; PA3C, its case of one node
    (section 8.2), is Hogwild here."""
    replicas = nodes * plan.threads
    schemes: dict[str, tuple[Strategy, int]] = {
        f"hsa2c_B{B}": (hsa2c(plan.threads, B, nodes), replicas) for B in plan.local_updates
    }
    schemes["published"] = published(plan), replicas
    schemes["da3c"] = hsa2c(1, 1, nodes), replicas
    if nodes == 1:
        schemes["pa3c"] = Hogwild(), replicas
    return schemes


def hsa2c(threads: int, B: int, M: int) -> DPSGD:
    """HSA2C with nodes of ``threads`` replicas. M: updates that the master joins, whose mean it takes; 0: one
    from each node."""
    return DPSGD(
        threads=threads,
        local_updates=B,
        batch=M,
        global_learning_rate=1 / M if M else None,
        wait=True,
        deadline_seconds=60.0,
    )


def published(plan: HSA2CPlan) -> DPSGD:
    """HSA2C with the paper's setting (see ``measure``)."""
    B = sorted(plan.local_updates)[len(plan.local_updates) // 2]
    return dataclasses.replace(
        hsa2c(plan.threads, B, 0), global_learning_rate=0.01, global_momentum=0.5, counted="node"
    )


def _cluster(costs: ThreadCosts, plan: HSA2CPlan, parameters: int) -> Cluster:
    network = _simulated.scaled_network(plan.network, parameters / costs.parameters, costs.handling_seconds)
    return Cluster(compute=f"constant:{costs.step_seconds}", network=network)


def points_per_second(strategy: Strategy, replicas: int, costs: ThreadCosts, plan: HSA2CPlan) -> float:
    """Fig. 5: data points per second of all actors together."""
    run = _simulated.small(strategy, replicas, updates=plan.steps)
    _, records = _simulated.simulated(run, _cluster(costs, plan, _simulated.parameters(run)))
    return _simulated.updates_per_second(records, cast(A2C, run.learner).steps) * costs.points


def times(nodes: int, costs: ThreadCosts, plan: HSA2CPlan, log: Log) -> dict[str, Any]:
    """Fig. 6: by scheme and score, the virtual seconds to that mean training return, over seeds."""
    minutes = plan.learning_steps * costs.step_seconds / 60
    result: dict[str, Any] = {}
    for name, (strategy, replicas) in _schemes(nodes, plan).items():
        curves = []
        for seed in range(plan.seeds):
            log(f"score of {name} on {nodes} node(s), seed {seed}")
            run = _simulated.learning(strategy, replicas, minutes=minutes, seed=seed)
            _, records = _simulated.simulated(run, _cluster(costs, plan, _simulated.parameters(run)))
            curves.append(_simulated.return_curve(records))
        result[name] = {f"{score:g}": time_to_score(curves, score) for score in plan.scores}
    return result


def time_to_score(curves: list[list[tuple[float, float]]], score: float) -> dict[str, Any]:
    """seconds: time to the score for each seed, None where it was never reached. median: over all seeds, of
    which those that never reached it count as the slowest; None if the median is one of these."""
    seconds = [first_reaching(curve, score) for curve in curves]
    inf = float("inf")
    median = statistics.median_high(inf if s is None else s for s in seconds)
    reached = sum(s is not None for s in seconds)
    return {"median": None if median == inf else median, "reached": reached, "seconds": seconds}


def first_reaching(curve: list[tuple[float, float]], reference: float) -> float | None:
    """The second at which ``curve`` first reaches ``reference``; None if never."""
    return next((seconds for seconds, mean in curve if mean >= reference), None)


def equation_57_row(nodes: int, costs: ThreadCosts, plan: HSA2CPlan) -> dict[str, Any]:
    """The simulated time of T iterations and the bounds of eq. 57, with Tc from a single worker (p = B = 1, M
    = nw)."""
    alone, together = (_run_seconds(n, costs, plan) for n in (1, nodes))
    T, Tu = plan.steps, costs.step_seconds
    Tc = alone / T - Tu
    least, most = total_bounds(T, Tc, nodes, nodes, T * nodes * Tu)
    return {
        "nodes": nodes,
        "least_seconds": least,
        "simulated_seconds": together,
        "most_seconds": most,
        "update_no_longer_than_exchange": Tu <= Tc,
    }


def _run_seconds(nodes: int, costs: ThreadCosts, plan: HSA2CPlan) -> float:
    """Virtual seconds of T iterations of the master with so many workers (p = B = 1)."""
    run = _simulated.small(hsa2c(1, 1, nodes), nodes, updates=plan.steps)
    summary, _ = _simulated.simulated(run, _cluster(costs, plan, _simulated.parameters(run)))
    return float(summary["virtual_seconds"])
