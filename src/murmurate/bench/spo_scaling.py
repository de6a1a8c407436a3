"""Seconds per update of SPO with 1, 2 and 4 learners, measured, and predicted by Zhang's model from measured
parts of an update (Zhang 2022, Fig. 5.14 for TD3 and Fig. 5.15 for DQN with images)."""

from __future__ import annotations

import dataclasses
import math
import random
import statistics
import time
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, cast

import torch

from murmurate.agents._deterministic import DeterministicAgent
from murmurate.agents.dqn import DQN, DQNAgent
from murmurate.agents.td3 import TD3
from murmurate.bench import _roles
from murmurate.bench._result import Log, ratios, spread
from murmurate.errors import Refusal
from murmurate.fabric.interface import Fabric
from murmurate.mapping.scaling import BatchCosts, parallel_apex_seconds, scaling_factor, spo_seconds
from murmurate.native.cores import usable_cores
from murmurate.nets.batched_mlp import BatchedMLP
from murmurate.nets.passes import Passes
from murmurate.ranges import PositiveInt
from murmurate.replay.config import ReplayConfig, open_replay
from murmurate.replay.interface import Sample
from murmurate.replay.row_replay import RowReplay
from murmurate.replica.vector import Replica
from murmurate.replicator.learner import Context
from murmurate.replicator.replicator import Replicator
from murmurate.spec import Batch, EnvSpec
from murmurate.strategies.local_sgd import LocalSGD

NAME = "spo-scaling"
SUMMARY = "seconds per update of SPO with 1, 2, 4 learners, measured and by Zhang's eq. 5.1 to 5.6"

# agent -> what it observes and does, and least number of transitions in each learner's replay
_CASES = {
    "dqn": (EnvSpec("seventeen numbers", (17,), torch.float32, actions=6), 2**17),
    "dqn-images": (EnvSpec("images", (4, 84, 84), torch.uint8, actions=6), 2**11),
    "td3": (EnvSpec("seventeen numbers", (17,), torch.float32, 0, (6,), (-1.0,) * 6, (1.0,) * 6), 2**17),
}
_NO_MEAN = 10_000  # a period that is longer than any measurement

_Agent = DQNAgent | DeterministicAgent
_Forward = Callable[[Any, Sample], None]


@dataclasses.dataclass(frozen=True)
class SPOScalingPlan:
    """agent: what learns: dqn, whose net has two hidden layers; dqn-images, with the torso ``nature2015`` and
    two streams, for images of 4 x 84 x 84; or td3, whose nets have three hidden layers, as Zhang's of four
    layers have. batch: batch size B of all learners together; Zhang's are 2048, 4096 and 8192 for TD3, and
    256, 1024 and 4096 for images. hidden: width of each hidden layer, but for images; the smaller the batch
    and the wider the net, the more a mean costs beside an update. rounds: number of repetitions of
    everything. turns: number of updates of each period in a round, rounded up to whole periods.

    learners: values of L, the number of learners. periods: values of H, each timed with every L.
    """

    agent: Literal["dqn", "dqn-images", "td3"] = "dqn"
    batch: PositiveInt = 256
    hidden: PositiveInt = 1024
    learners: tuple[PositiveInt, ...] = (1, 2, 4)
    periods: tuple[PositiveInt, ...] = (1, 5, 10, 25)
    rounds: PositiveInt = 3
    turns: PositiveInt = 50


QUICK, FULL = SPOScalingPlan(), SPOScalingPlan(rounds=15)


def measure(plan: SPOScalingPlan, log: Log) -> dict[str, Any]:
    """Measured and predicted seconds per update for each number of learners and each period.

    Every round measures all parts and all cases, so that each prediction is compared with updates that ran
    seconds before or after its parts did, with as many learners on the same cores. Predictions, ratios and
    scaling factors are medians over the rounds. ``worst_error`` is the largest |median ratio - 1|.
    ``scaling_factor`` is relative to the number of learners, ``scaling_factor_of_cores`` to the smaller of
    learners and cores. ``parallel_apex_scaling_factor`` is that of data-parallel Ape-X by eq. 5.1, from the
    same parts; it does not count the moving of batches, which stay in one machine's memory here.

    Raises Refusal without one learner, and for numbers of learners that do not divide the batch.
    """
    if 1 not in plan.learners:
        raise Refusal(f"learners are {plan.learners}, and all are compared with one learner: add 1.")
    if uneven := [learners for learners in plan.learners if plan.batch % learners]:
        common = math.lcm(*plan.learners)
        raise Refusal(
            f"{uneven[0]} learners cannot share a batch of {plan.batch} equally. Use --batch "
            f"{math.ceil(plan.batch / common) * common}, or other --learners."
        )
    cores = usable_cores()
    cases = [(count, period) for count in plan.learners for period in _periods(plan, count)]
    rounds: list[dict[tuple[int, int], _Case]] = []
    for number in range(plan.rounds):
        measured: dict[tuple[int, int], _Case] = {}
        for learners in plan.learners:
            by_learner = _roles.run_together(learners, work, plan, number)
            measured |= {(learners, period): _case(by_learner, period) for period in _periods(plan, learners)}
        rounds.append(measured)
        shown = " ".join(f"{measured[case].predicted / measured[case].measured:.2f}" for case in cases)
        log(f"round {number + 1}: model / measured {shown}")
    rows = [_row(case, [measured[case] for measured in rounds], rounds, cores) for case in cases]
    worst = max(abs(row["predicted_to_measured"] - 1) for row in rows)
    return {"cores": cores, "worst_error": worst, "rows": rows}


class _Case(NamedTuple):
    """Seconds per update in one round."""

    measured: float
    predicted: float
    costs: BatchCosts
    average: float


def _periods(plan: SPOScalingPlan, learners: int) -> tuple[int, ...]:
    """One learner averages nothing, so that its period makes no difference."""
    return plan.periods if learners > 1 else plan.periods[:1]


def _case(by_learner: list[dict[str, Any]], period: int) -> _Case:
    """The case of the slowest learner, as the others wait for it."""
    costs = max((BatchCosts(**learner["parts"]) for learner in by_learner), key=lambda cost: cost.total)
    average = max(learner["mean"] for learner in by_learner)
    measured = max(learner["updates"][period] for learner in by_learner)
    return _Case(measured, spo_seconds(costs, average, period), costs, average)


def _row(
    case: tuple[int, int], its_rounds: list[_Case], rounds: list[dict[tuple[int, int], _Case]], cores: int
) -> dict[str, Any]:
    learners, period = case
    alone = [measured[min(measured)] for measured in rounds]  # of one learner

    def factor(seconds: list[float], count: int) -> float:
        pairs = zip(alone, seconds, strict=True)
        return statistics.median(scaling_factor(one.measured, together, count) for one, together in pairs)

    measured = [one.measured for one in its_rounds]
    predicted = [one.predicted for one in its_rounds]
    parallel_apex = [
        parallel_apex_seconds(one.costs, shared.costs, shared.average)
        for one, shared in zip(alone, its_rounds, strict=True)
    ]
    return {
        "learners": learners,
        "period": period,
        "update_seconds": spread(measured),
        "predicted_seconds": statistics.median(predicted),
        "predicted_to_measured": statistics.median(ratios(predicted, measured)),
        "scaling_factor": factor(measured, learners),
        "scaling_factor_of_cores": factor(measured, min(learners, cores)),
        "predicted_scaling_factor": factor(predicted, learners),
        "parallel_apex_scaling_factor": factor(parallel_apex, learners),
        "parts": {
            part.name: statistics.median(getattr(one.costs, part.name) for one in its_rounds)
            for part in dataclasses.fields(BatchCosts)
        },
        "average_seconds": statistics.median(one.average for one in its_rounds),
    }


def work(fabric: Fabric, plan: SPOScalingPlan, seed: int) -> dict[str, Any]:
    """What one learner measures in a round, in seconds: the ``parts`` of an update, a ``mean`` of the
    parameters, and ``updates`` by period. seed: of the order of the periods, as whatever slows down the
    machine for some seconds must not hit the same period in every round."""
    size = plan.batch // fabric.size
    alone, replay = _learner(fabric, _NO_MEAN, size, plan)
    together = {period: _learner(fabric, period, size, plan) for period in _periods(plan, fabric.size)}
    ready = fabric.channel("ready", torch.zeros(1))
    vectors = {name: replica.params.detach().clone() for name, replica in alone.replicas.items()}
    channels = {name: fabric.channel(f"mean of {name}", vector) for name, vector in vectors.items()}

    def average() -> None:
        for name, vector in vectors.items():
            channels[name].mean_(vector)

    ready.mean_(torch.zeros(1))
    half = math.ceil(plan.turns / 2)
    forward = _FORWARDS[plan.agent]
    parts = _parts(alone, forward, replay, size, half)
    ready.mean_(torch.zeros(1))
    mean = _mean_seconds(average, plan.turns) if fabric.size > 1 else 0.0
    updates = {}
    for period in random.Random(seed).sample(list(together), len(together)):
        ready.mean_(torch.zeros(1))
        turns = math.ceil(plan.turns / period) * period
        updates[period] = _mean_seconds(lambda: _update(*together[period], size), turns)  # noqa: B023
    ready.mean_(torch.zeros(1))
    again = _parts(alone, forward, replay, size, half)  # also after it, as the machine may change
    return {
        "parts": {name: (parts[name] + again[name]) / 2 for name in parts},
        "mean": mean,
        "updates": updates,
    }


def _parts(agent: _Agent, forward: _Forward, replay: RowReplay, size: int, turns: int) -> dict[str, float]:
    """The fields of ``BatchCosts``: means, which sum up to the time of an update also where processes share
    cores. What an update does beside its forward passes and the optimizers' steps counts as ``backward``."""
    seconds = dict.fromkeys(("sample", "learn", "priority", "forward", "update"), 0.0)
    for turn in range(-3, turns):
        times = [time.perf_counter()]
        sample = replay.sample(size, 0.4)
        times.append(time.perf_counter())
        outcome = agent.learn(Batch(sample))
        times.append(time.perf_counter())
        assert outcome.priorities is not None
        replay.update(sample.keys, outcome.priorities)
        times.append(time.perf_counter())
        forward(agent, sample)
        times.append(time.perf_counter())
        for replica in agent.replicas.values():
            replica.update()
        times.append(time.perf_counter())
        if turn >= 0:
            for name, began, ended in zip(seconds, times, times[1:], strict=False):
                seconds[name] += (ended - began) / turns
    learn = seconds.pop("learn")
    return {**seconds, "backward": max(0.0, learn - seconds["forward"] - seconds["update"])}


def _forward_of_dqn(agent: DQNAgent, sample: Sample) -> None:
    """The forward passes of an update."""
    with torch.no_grad():
        agent.target(sample.next_observation)
        agent.net(sample.next_observation)
    agent.net(sample.observation)


def _forward_of_td3(agent: DeterministicAgent, sample: Sample) -> None:
    """The forward passes of an update."""
    target_policy, target_critics = (target.net for target in agent.targets)
    critics = Passes(cast(BatchedMLP, agent.critics))
    with torch.no_grad():
        next_action = target_policy(sample.next_observation)[0].tanh()
        target_critics(torch.cat([sample.next_observation, next_action], 1))
        inputs = torch.cat([sample.observation, sample.action], 1)
        critics.forward(inputs.expand(2, *inputs.shape))
        action = agent.policy.net(sample.observation)[0].tanh()
        first_critic = slice(0, 1)
        critics.forward(torch.cat([sample.observation, action], 1)[None], first_critic)


_FORWARDS: dict[str, _Forward] = {
    "dqn": _forward_of_dqn,
    "dqn-images": _forward_of_dqn,
    "td3": _forward_of_td3,
}


def _update(agent: _Agent, replay: RowReplay, size: int) -> None:
    sample = replay.sample(size, 0.4)
    outcome = agent.learn(Batch(sample))
    assert outcome.priorities is not None
    replay.update(sample.keys, outcome.priorities)


def _mean_seconds(call: Callable[[], Any], turns: int) -> float:
    for _ in range(3):
        call()
    began = time.perf_counter()
    for _ in range(turns):
        call()
    return (time.perf_counter() - began) / turns


def _config(plan: SPOScalingPlan, batch: int) -> DQN | TD3:
    """TD3's policy is updated once for each update of the critics, as in SPO-TD3, but in turn with them."""
    if plan.agent == "td3":
        return TD3(batch=batch, hidden=(plan.hidden,) * 3, policy_delay=1, target_every=1_000, polyak=1.0)
    config = DQN(batch=batch, hidden=plan.hidden, selector="agreed", target_every=1_000)
    if plan.agent == "dqn-images":
        return dataclasses.replace(config, torso="nature2015", dueling=True)
    return config


def _learner(fabric: Fabric, period: int, size: int, plan: SPOScalingPlan) -> tuple[_Agent, RowReplay]:
    replicator = Replicator(LocalSGD(period=period), fabric)

    def replicate(name: str, *arguments: Any, **options: Any) -> Replica:
        return replicator.replicate(f"{name}, H={period}", *arguments, **options)

    spec, least = _CASES[plan.agent]
    count = max(least, size)
    agent = _config(plan, size).build(Context(spec, replicate, seed=0))
    config = ReplayConfig(capacity=count, learning_starts=0)
    replay = cast(RowReplay, open_replay(config, spec, simulators=1, steps=1, discount=0.99, seed=0))
    generator = torch.Generator().manual_seed(0)
    values = {
        "observation": _observations(spec, count, generator),
        "next_observation": _observations(spec, count, generator),
        "action": _actions(spec, count, generator),
        "reward": torch.randn(count, generator=generator),
        "discount": torch.full((count,), 0.99),
    }
    replay.insert(values, count, torch.rand(count, generator=generator))
    return agent, replay


def _observations(spec: EnvSpec, count: int, generator: torch.Generator) -> torch.Tensor:
    shape = (count, *spec.observation_shape)
    if spec.images:
        return torch.randint(256, shape, dtype=torch.uint8, generator=generator)
    return torch.randn(shape, generator=generator)


def _actions(spec: EnvSpec, count: int, generator: torch.Generator) -> torch.Tensor:
    if spec.actions:
        return torch.randint(spec.actions, (count,), generator=generator)
    return 2 * torch.rand(count, *spec.action_shape, generator=generator) - 1
