"""A replay service beside a learner's own replay, and whether killed processes lose or double anything."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from murmurate.bench import _roles, replay_shared
from murmurate.bench._result import Log, median, ratios, spreads
from murmurate.bench._service_counts import ServicePlan, serve_and_count
from murmurate.errors import Refusal
from murmurate.ranges import PositiveInt

NAME = "replay-service"
SUMMARY = (
    "draws per CPU second from a replay service and from a learner's own replay; samples per insert; what "
    "kills of actors and samplers lose; --full: 32 actors, 8 samplers, 2 learners"
)


@dataclasses.dataclass(frozen=True)
class ReplayServicePlan(ServicePlan):
    """repetitions: number of repetitions of both measurements, in turn."""

    repetitions: PositiveInt = 1


QUICK = ReplayServicePlan()
FULL = ReplayServicePlan(
    actors=32, samplers=8, seconds=30.0, kills=10, repetitions=3, capacity=2**24, filled=2**16
)
_KILL_SECONDS = 10.0  # allowed for a killed process to be started again, and for the draws meanwhile
_SERVICE = ("learner", "samplers", "shards")


def measure(plan: ReplayServicePlan, log: Log) -> dict[str, Any]:
    """CPU seconds of the service are those of its learners' loops, shards and samplers; the CPU seconds of
    actors, which also step their simulators, are given separately. A learner's own replay inserts steps that
    were generated beforehand. Raises Refusal for processes that the learners cannot share equally."""
    for name in ("actors", "samplers", "shards"):
        number = getattr(plan, name)
        if number % plan.learners:
            raise Refusal(
                f"--{name} is {number}, and {plan.learners} learners share them equally. Use --{name} "
                f"{math.ceil(number / plan.learners) * plan.learners}."
            )
    own_plan = replay_shared.SharedReplayPlan(
        seconds=plan.seconds,
        filled=plan.filled // plan.learners,
        batch=plan.batch,
        simulators=plan.simulators,
        samples_per_insert=plan.samples_per_insert,
        capacity=plan.capacity // plan.learners,
        actors=plan.actors // plan.learners,
    )
    own_rates, service_rates, counts = [], [], []
    for number in range(plan.repetitions):
        log(f"own replay, {number + 1} of {plan.repetitions}")
        (alone,) = _roles.run_together(1, replay_shared.work, 1, False, own_plan, seconds=plan.seconds)
        own_rates.append(alone["draws"] / alone["cpu_seconds"])
        log(f"replay service, {number + 1} of {plan.repetitions}")
        seconds = plan.seconds + _KILL_SECONDS * 2 * plan.kills
        answers = _roles.run_together(plan.learners, serve_and_count, plan, seconds=seconds)
        totals = {key: sum(answer[key] for answer in answers) for key in answers[0]}
        cpu = sum(totals[f"cpu_seconds_{kind}"] for kind in _SERVICE)
        service_rates.append(totals["draws"] / cpu)
        counts.append(_counts(totals))
        log(f"{service_rates[-1]:,.0f} draws per CPU second, alone {own_rates[-1]:,.0f}; {counts[-1]}")
    return {
        "draws_per_cpu_second": spreads(
            [{"service": s, "own": o} for s, o in zip(service_rates, own_rates, strict=True)]
        ),
        "share_of_own": median(ratios(service_rates, own_rates)),
        "samples_per_insert_asked": plan.samples_per_insert,
        "samples_per_insert_held": spreads(counts)["samples_per_insert_held"],
        **{key: sum(count[key] for count in counts) for key in counts[0] if key != "samples_per_insert_held"},
    }


def _counts(totals: dict[str, float]) -> dict[str, float]:
    lost_draws = totals["drawn"] - totals["handed"] - totals["waiting_draws"]
    return {
        "samples_per_insert_held": totals["drawn"] / (totals["inserted"] - totals["starts"]),
        "kills": totals["kills"],
        "lost_inserts": totals["lost_inserts"] + max(0.0, totals["acknowledged"] - totals["stored"]),
        "doubled_inserts": totals["doubled_inserts"] + max(0.0, totals["stored"] - totals["acknowledged"]),
        "lost_draws": max(0.0, lost_draws),
        "doubled_draws": max(0.0, -lost_draws),
        **{f"cpu_seconds_{kind}": totals[f"cpu_seconds_{kind}"] for kind in (*_SERVICE, "actors")},
    }
