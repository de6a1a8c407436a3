"""One table: the same A2C under every strategy with 1 to 8 replicas; CartPole for return, Pong for speed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from murmurate.bench._cache import cached_run
from murmurate.bench._result import Log, mean, spread
from murmurate.ranges import PositiveInt, Seconds
from murmurate.record import groups
from murmurate.record.runs import RecordedRun
from murmurate.strategies import strategies

NAME = "every-strategy"
SUMMARY = "return, speed, waiting, staleness and bytes of every strategy; --full: 1 to 8 replicas, an hour"


@dataclasses.dataclass(frozen=True)
class EveryStrategyPlan:
    """where: the folder that keeps the runs; a finished run is not run again on the same
    processor with the same versions.

    replicas: the numbers of replicas that are measured. seeds: number of seeds (0, 1, ...).
    cartpole_env_steps: number of env steps of each run on CartPole. pong_seconds: duration of each run on
    Pong; 0: no such runs.
    """

    replicas: tuple[PositiveInt, ...] = (2,)
    seeds: PositiveInt = 1
    cartpole_env_steps: PositiveInt = 50_000
    pong_seconds: Seconds = 10.0
    where: str = "runs/every-strategy"


QUICK = EveryStrategyPlan()
FULL = EveryStrategyPlan(replicas=(1, 2, 4, 8), seeds=3, cartpole_env_steps=200_000, pong_seconds=30.0)


def measure(plan: EveryStrategyPlan, log: Log) -> dict[str, Any]:
    """A row for each strategy and number of replicas; spreads are over the seeds.

    Replicas share this machine's cores: with more replicas than cores, the speed is that of the machine, and
    waiting includes waiting for a core.
    """
    rows: list[dict[str, Any]] = []
    for name, replicas in pairs(plan):
        cartpole = [_cartpole(plan, name, replicas, seed, log) for seed in range(plan.seeds)]
        rows.append(_row(name, replicas, cartpole, _pong(plan, name, replicas, log)))
    return {"rows": rows}


def pairs(plan: EveryStrategyPlan) -> Iterator[tuple[str, int]]:
    """(strategy, replicas); solo has one replica only."""
    for name in strategies():
        yield from ((name, replicas) for replicas in plan.replicas if name != "solo" or replicas == 1)


def _row(name: str, replicas: int, cartpole: list[RecordedRun], pong: RecordedRun | None) -> dict[str, Any]:
    def over_seeds(fact: str) -> dict[str, Any] | None:
        values = [run.fact(fact) for run in cartpole]
        return None if any(value is None for value in values) else spread(values)

    waiting_shares = [share for run in cartpole if (share := groups.waiting_share(run)) is not None]
    row: dict[str, Any] = {
        "strategy": name,
        "replicas": replicas,
        "cartpole_eval_return": over_seeds("eval_return_mean"),
        "cartpole_waiting_share": mean(waiting_shares),
        "cartpole_staleness_max": over_seeds("staleness_max"),
        "cartpole_disagreement_final": over_seeds("disagreement_final"),
        "cartpole_bytes": over_seeds("bytes_exchanged"),
    }
    if pong is not None:
        row |= {
            "pong_env_steps_per_second": groups.env_steps_per_second(pong),
            "pong_waiting_share": groups.waiting_share(pong),
            "pong_staleness_max": pong.fact("staleness_max"),
            "pong_bytes_per_update": groups.bytes_per_update(pong),
        }
    return row


def _cartpole(plan: EveryStrategyPlan, name: str, replicas: int, seed: int, log: Log) -> RecordedRun:
    steps = ("--env-steps", str(plan.cartpole_env_steps), "--seed", str(seed))
    # only the final figures are used
    few_records = ("--checkpoint-every-env-steps", "1000000000", "--record-every-seconds", "0.5")
    return _run(plan, "cartpole", name, replicas, seed, (*steps, *few_records), log)


def _pong(plan: EveryStrategyPlan, name: str, replicas: int, log: Log) -> RecordedRun | None:
    if not plan.pong_seconds:
        return None
    ends = ("--env-steps", "none", "--minutes", str(plan.pong_seconds / 60), "--eval-episodes", "1")
    return _run(plan, "pong", name, replicas, 0, ends, log)


def _run(
    plan: EveryStrategyPlan,
    world: str,
    name: str,
    replicas: int,
    seed: int,
    options: tuple[str, ...],
    log: Log,
) -> RecordedRun:
    length = f"{plan.cartpole_env_steps}" if world == "cartpole" else f"{plan.pong_seconds:g}s"
    folder = Path(plan.where) / f"{world}-{name}-{replicas}-{seed}-to-{length}"
    words = ("--strategy", name, "--replicas", str(replicas), *options)
    return cached_run(folder, f"{world}-a2c", words, log)
