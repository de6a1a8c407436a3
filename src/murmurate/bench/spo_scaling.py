"""Seconds per update of SPO with 1, 2 and 4 learners, measured, and predicted by Zhang's model from measured
parts of an update."""

from __future__ import annotations

import dataclasses
import os
import statistics
import time
from collections.abc import Callable
from typing import Any, cast

import torch

from murmurate.agents.dqn import DQN, DQNAgent
from murmurate.bench import _roles
from murmurate.bench._result import Log, spread
from murmurate.fabric.interface import Fabric
from murmurate.mapping.scaling import BatchCosts, ExchangeCosts, scaling_factor, spo_seconds
from murmurate.replay.config import ReplayConfig, open_replay
from murmurate.replay.row_replay import RowReplay
from murmurate.replicator.learner import Context
from murmurate.replicator.replicator import Replicator
from murmurate.spec import Batch, EnvSpec
from murmurate.strategies.local_sgd import LocalSGD

NAME = "spo-scaling"
SUMMARY = "seconds per update of SPO-DQN with 1, 2, 4 learners, measured and by Zhang's eq. 5.1 to 5.6"

_SPEC = EnvSpec("seventeen numbers", (17,), torch.float32, actions=6)
_NEVER_UPDATES = 10**9
_CONFIG = ReplayConfig(capacity=2**17, learning_starts=0)


@dataclasses.dataclass(frozen=True)
class SPOScalingPlan:
    """batch: batch size B of all learners together. hidden: width of the net's two layers, which decides how
    much a mean costs beside an update. turns: number of updates that are timed, in blocks of the longest
    period.

    learners: values of L, the number of learners. periods: values of H, each timed with every L.
    """

    batch: int = 1024
    hidden: int = 1024
    learners: tuple[int, ...] = (1, 2, 4)
    periods: tuple[int, ...] = (1, 5, 10, 25)
    turns: int = 100


QUICK, FULL = SPOScalingPlan(), SPOScalingPlan(turns=400)


def measure(plan: SPOScalingPlan, log: Log) -> dict[str, Any]:
    """Measured and predicted seconds per update for each number of learners and each period.

    All parts are measured while as many learners run as in the run that they predict, so that they share
    cores and memory alike. ``worst_error`` is the largest relative error of the predictions.
    ``scaling_factor`` is relative to the number of learners, ``scaling_factor_of_cores`` to the smaller of
    learners and cores.
    """
    cores = len(os.sched_getaffinity(0))
    one_learner_seconds: float | None = None
    rows: list[dict[str, Any]] = []
    for learners in plan.learners:
        size = plan.batch // learners
        by_learner = _roles.run_together(learners, batch_costs, size, plan)
        costs = _slowest([BatchCosts(**fields) for fields in by_learner])
        average = float(max(_roles.run_together(learners, mean_seconds, plan))) if learners > 1 else 0.0
        log(f"{learners} learner(s): {1e3 * costs.total:.2f} ms, and a mean {1e3 * average:.2f} ms")
        exchange = ExchangeCosts(average=average)
        for period in plan.periods if learners > 1 else plan.periods[:1]:
            measured = max(_roles.run_together(learners, work, size, period, plan), key=statistics.median)
            seconds = statistics.median(measured)
            one_learner_seconds = one_learner_seconds or seconds
            predicted = spo_seconds(costs, exchange, period)
            rows.append(
                {
                    "learners": learners,
                    "period": period,
                    "update_seconds": spread(measured),
                    "predicted_seconds": predicted,
                    "predicted_to_measured": predicted / seconds,
                    "scaling_factor": scaling_factor(one_learner_seconds, seconds, learners),
                    "scaling_factor_of_cores": scaling_factor(
                        one_learner_seconds, seconds, min(learners, cores)
                    ),
                    "predicted_scaling_factor": scaling_factor(one_learner_seconds, predicted, learners),
                    "parts": dataclasses.asdict(costs),
                    "average_seconds": average,
                }
            )
            log(f"{learners} x H={period}: {1e3 * seconds:.2f} ms, by the model {1e3 * predicted:.2f} ms")
    worst = max(abs(row["predicted_to_measured"] - 1) for row in rows)
    return {"cores": cores, "worst_error": worst, "rows": rows}


def _slowest(costs: list[BatchCosts]) -> BatchCosts:
    """The costs of the slowest learner, for which the others wait."""
    return max(costs, key=lambda cost: cost.total)


def batch_costs(fabric: Fabric, size: int, plan: SPOScalingPlan) -> dict[str, float]:
    """The fields of ``BatchCosts`` for batches of ``size``, without exchanges. What an update does beside its
    forward passes and the optimizer's step counts as ``backward``."""
    agent, replay = _learner(Replicator(LocalSGD(period=_NEVER_UPDATES), fabric), size, plan)
    sample = replay.sample(size, 0.4)
    outcome = agent.learn(Batch(sample))
    assert outcome.priorities is not None
    errors = outcome.priorities

    def forward() -> None:
        with torch.no_grad():
            agent.target(sample.next_observation)
            agent.net(sample.next_observation)
        agent.net(sample.observation)

    learn_seconds = _median_seconds(lambda: agent.learn(Batch(sample)))
    forward_seconds = _median_seconds(forward)
    update = _median_seconds(agent.replica.update)
    return {
        "sample": _median_seconds(lambda: replay.sample(size, 0.4)),
        "forward": forward_seconds,
        "backward": max(0.0, learn_seconds - forward_seconds - update),
        "update": update,
        "priority": _median_seconds(lambda: replay.update(sample.keys, errors)),
    }


def _median_seconds(call: Callable[[], Any], turns: int = 60) -> float:
    for _ in range(5):
        call()
    times = []
    for _ in range(turns):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def mean_seconds(fabric: Fabric, plan: SPOScalingPlan) -> float:
    """Seconds of one mean of the parameters over all learners."""
    agent, _ = _learner(Replicator(LocalSGD(), fabric), 32, plan)
    channel = fabric.channel("mean", agent.replica.params.detach())
    vector = agent.replica.params.detach().clone()
    return _median_seconds(lambda: channel.mean_(vector))


def work(fabric: Fabric, size: int, period: int, plan: SPOScalingPlan) -> list[float]:
    """Seconds per update of one learner, for each block of the longest period."""
    agent, replay = _learner(Replicator(LocalSGD(period=period), fabric), size, plan)
    block = max(plan.periods)
    times = []
    for number in range(plan.turns // block + 1):
        began = time.perf_counter()
        for _ in range(block):
            sample = replay.sample(size, 0.4)
            outcome = agent.learn(Batch(sample))
            if outcome.priorities is not None:
                replay.update(sample.keys, outcome.priorities)
        if number:
            times.append((time.perf_counter() - began) / block)
    return times


def _learner(replicator: Replicator, size: int, plan: SPOScalingPlan) -> tuple[DQNAgent, RowReplay]:
    config = DQN(batch=size, hidden=plan.hidden, selector="agreed", target_every=1_000)
    agent = config.build(Context(_SPEC, replicator.replicate, seed=0))
    replay = cast(RowReplay, open_replay(_CONFIG, _SPEC, simulators=1, steps=1, discount=0.99, seed=0))
    count, generator = _CONFIG.capacity, torch.Generator().manual_seed(0)
    values = {
        "observation": torch.randn(count, 17, generator=generator),
        "next_observation": torch.randn(count, 17, generator=generator),
        "action": torch.randint(6, (count,), generator=generator),
        "reward": torch.randn(count, generator=generator),
        "discount": torch.full((count,), 0.99),
    }
    replay.insert(values, count, torch.rand(count, generator=generator))
    return agent, replay
