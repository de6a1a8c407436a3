"""Speed of learning from batches drawn ahead (the relaxed loop, Zhang 2022, section 4.3.1), over that from
batches drawn when needed (the strict loop)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from murmurate.bench import _commands
from murmurate.bench._racer import Racer, ThroughputPlan, Windows, race, rates_by_cpu, rates_by_wall
from murmurate.bench._result import Log, ratios, spread
from murmurate.errors import Refusal
from murmurate.ranges import NonNegativeInt

NAME = "relaxed-loop"
SUMMARY = "updates per second of DQN with batches drawn D updates ahead, over those of the strict loop"

STRICT = 0
# so that all are learning when the windows begin
_EARLY = ("--replay.capacity", "20000", "--replay.learning-starts", "1000")


@dataclasses.dataclass(frozen=True)
class RelaxedLoopPlan(ThroughputPlan):
    """The racers are the values of D, world after world.

    worlds: the worlds that are played. depths: values of D.
    """

    worlds: tuple[str, ...] = ("cartpole", "pong")
    depths: tuple[NonNegativeInt, ...] = (STRICT, 1, 50)


QUICK = RelaxedLoopPlan(window_cpu_seconds=4.0, warm_up_cpu_seconds=8.0)
FULL = dataclasses.replace(QUICK, depths=(STRICT, 1, 10, 50, 200), rounds=10)


def measure(plan: RelaxedLoopPlan, log: Log) -> dict[str, Any]:
    """``<world>-dqn`` as users run it; updates are proportional to env steps, so ratios of both are the
    same."""
    if STRICT not in plan.depths:
        raise Refusal(f"depths are {plan.depths}, and all are compared with {STRICT}: add it.")
    worlds = {}
    for world in plan.worlds:
        worlds[world] = figures(race(functools.partial(_racers, world, plan.depths), plan, log))
    return {"worlds": worlds}


def _racers(world: str, depths: Sequence[int], where: Path) -> dict[str, Racer]:
    return {
        f"D={depth}": _commands.murmurate_train(
            f"{world}-{depth}", f"{world}-dqn", where, *_EARLY, "--replay.ahead", str(depth)
        )
        for depth in depths
    }


def figures(windows: Windows) -> dict[str, Any]:
    """The figures of each D; ratios are to the strict loop's window in the same round."""
    by_wall, by_cpu, strict = rates_by_wall(windows), rates_by_cpu(windows), f"D={STRICT}"
    return {
        name: {
            "env_steps_per_second": spread(by_wall[name]),
            "env_steps_per_cpu_second": spread(by_cpu[name]),
            "to_the_strict_loop": spread(ratios(by_wall[name], by_wall[strict])),
            "to_the_strict_loop_per_cpu_second": spread(ratios(by_cpu[name], by_cpu[strict])),
        }
        for name in windows
    }
