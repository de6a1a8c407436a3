"""Cost of one ``strategy.step`` over a plain ``replica.update()``, in copies of the vector."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from murmurate.bench import _commands, _roles
from murmurate.bench._racer import temporary_folder
from murmurate.bench._result import Log, median, spread
from murmurate.bench._roles import rmsprop
from murmurate.fabric.interface import Fabric
from murmurate.ranges import PositiveInt, PositiveSeconds
from murmurate.replica.vector import Replica
from murmurate.replicator.replicator import Replicator
from murmurate.strategies import strategy

NAME = "strategy-cost"
SUMMARY = "cost of one strategy step over a plain update, in copies of a vector of 1.7 million numbers"

PARAMETERS = 1_687_206  # the net of Mnih et al. 2015 with Pong's 6 actions
_STRATEGIES = ("gala", "all-reduce", "local-sgd", "hogwild")
_WARM_UP_TURNS = 10


@dataclasses.dataclass(frozen=True)
class StrategyCostPlan:
    """In each turn, every member makes a copy, an update and a step of the strategy.

    turns: number of turns that are timed. members: the numbers of members that are measured. parameters:
    number of parameters of the vector. waiting_cpu_seconds: CPU seconds of the run with 4 GALA learners in
    which waiting is measured.
    """

    turns: PositiveInt = 150
    members: tuple[PositiveInt, ...] = (2, 4)
    parameters: PositiveInt = PARAMETERS
    waiting_cpu_seconds: PositiveSeconds = 30.0


QUICK, FULL = StrategyCostPlan(), StrategyCostPlan(turns=1000, waiting_cpu_seconds=90.0)


def measure(plan: StrategyCostPlan, log: Log) -> dict[str, Any]:
    """Costs are CPU time: a step that waits for others sleeps, and waiting is measured separately."""
    rows: dict[str, Any] = {}
    for members in plan.members:
        for name in _STRATEGIES:
            log(f"{name}, {members} members")
            answers = _roles.run_together(members, work, name, plan.parameters, plan.turns)
            rows.setdefault(name, {})[f"{members}_members"] = figures(answers)
    log("waiting of 4 GALA learners in a real run")
    gala = [row["copies_when_heard"] for row in rows["gala"].values()]
    return {
        "parameters": plan.parameters,
        "fabric": "processes",
        "gala_copies": max((copies["median"] for copies in gala if copies), default=None),
        "strategies": rows,
        **waiting(plan.waiting_cpu_seconds),
    }


class ParametersOnly(nn.Module):
    """A module of ``count`` parameters."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(count))


def work(fabric: Fabric, name: str, parameters: int, turns: int) -> dict[str, Any]:
    """What one member measures: CPU milliseconds of the same update with and without the strategy, and of a
    copy.

    Both replicas hold the same numbers and see the same gradient; they differ in their ``exchange``.
    """
    plain = Replica("plain", ParametersOnly(parameters), rmsprop)
    shared = Replicator(strategy(name)(), fabric).replicate("shared", ParametersOnly(parameters), rmsprop)
    generator = torch.Generator().manual_seed(fabric.rank)
    gradient = torch.randn(parameters, generator=generator) * 1e-3
    source, target = torch.rand(parameters, generator=generator), torch.empty(parameters)
    actions: dict[str, Callable[[], Any]] = {
        "copy": lambda: target.copy_(source),
        "update": plain.update,
        "step": lambda: shared.exchange(shared),
    }
    times: dict[str, list[float]] = defaultdict(list)
    heard: list[bool] = []
    with torch.no_grad():
        for turn in range(turns + _WARM_UP_TURNS):
            # again in each turn, because all-reduce overwrites the gradient with the mean
            shared.grad.copy_(gradient)
            plain.grad.copy_(gradient)
            for action in actions if turn % 2 else reversed(actions):
                start = time.process_time()
                result = actions[action]()
                spent = time.process_time() - start
                if turn >= _WARM_UP_TURNS:
                    times[action].append(spent * 1e3)
                    if action == "step":
                        heard.append(result.heard > 1)
    return {"times": dict(times), "heard": heard}


def figures(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """Over the members: medians of copy, update and step, and the step's excess over an update, in copies.

    The excess is computed turn by turn, so that a slow moment of the machine enters both sides. Its mean over
    all steps, and its median over the steps that received a peer's values (of members that received any),
    are for strategies that exchange only now and then.
    """
    excess = [[s - u for s, u in zip(a["times"]["step"], a["times"]["update"], strict=True)] for a in answers]
    when_heard = [
        [e for e, heard in zip(of_member, answer["heard"], strict=True) if heard]
        for of_member, answer in zip(excess, answers, strict=True)
    ]
    copy = [median(a["times"]["copy"]) for a in answers]
    copies_when_heard = [median(e) / c for e, c in zip(when_heard, copy, strict=True) if e]
    medians = {
        f"{name}_milliseconds": median([t for a in answers for t in a["times"][name]])
        for name in ("copy", "update", "step")
    }
    return {
        "copies": spread([median(e) / c for e, c in zip(excess, copy, strict=True)]),
        "copies_mean": spread([statistics.fmean(e) / c for e, c in zip(excess, copy, strict=True)]),
        "copies_when_heard": spread(copies_when_heard) if copies_when_heard else None,
        **medians,
        "share_of_steps_that_heard_others": statistics.fmean(h for a in answers for h in a["heard"]),
    }


def waiting(cpu_seconds: float) -> dict[str, Any]:
    """Share of their time that 4 GALA learners wait, in a real run: Pong, or CartPole without ale-py."""
    world = _commands.installed_world()
    with temporary_folder() as folder:
        options = ("--replicas", "4", "--simulators", "4")
        racer = _commands.murmurate_train("waiting", f"{world}-gala", folder, *options)
        try:
            racer.start(warm_up_cpu_seconds=4.0)
            before = {row["replica"]: row for row in racer.rows()}
            racer.window(cpu_seconds)
            after = {row["replica"]: row for row in racer.rows()}
        finally:
            racer.stop()
    shares = [
        (after[rank]["waiting_seconds"] - before[rank]["waiting_seconds"])
        / (after[rank]["time_seconds"] - before[rank]["time_seconds"])
        for rank in before
    ]
    return {
        "gala_waiting_share": max(shares),
        "gala_waiting": {
            "run": f"{world}-gala, 4 replicas of 4 simulators",
            "share_by_replica": shares,
            "staleness_max": max(row["staleness_max"] for row in after.values()),
        },
    }
