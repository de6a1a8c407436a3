"""Does drawing batches ahead (the relaxed loop, Zhang, section 4.3.1) make updates faster?"""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

from murmurate.bench import _commands
from murmurate.bench._racer import Window, stopped_at_the_end, windows_in_turn
from murmurate.bench._result import Log, spread

NAME = "relaxed-loop"
SUMMARY = "updates per second of DQN with batches drawn D updates ahead, over those of the strict loop"

STRICT = 0
# so that all are learning when the windows begin
_EARLY = ("--replay.capacity", "20000", "--replay.learning-starts", "1000")


@dataclasses.dataclass(frozen=True)
class Plan:
    """Interleaved rounds of one window for each D, world after world."""

    worlds: tuple[str, ...] = ("cartpole", "pong")
    depths: tuple[int, ...] = (STRICT, 1, 50)
    rounds: int = 5
    window_cpu_seconds: float = 4.0


FULL = Plan(depths=(STRICT, 1, 10, 50, 200), rounds=10)


def measure(full: bool, log: Log, plan: Plan | None = None) -> dict[str, Any]:
    """``<world>-dqn`` as users run it. Updates follow env steps, so ratios of one are those of the other; a
    ratio is to the strict loop's window of the same round."""
    plan = plan or (FULL if full else Plan())
    worlds = {}
    for world in plan.worlds:
        with tempfile.TemporaryDirectory(prefix="murmurate-bench-") as folder:
            field = {
                label(depth): _commands.ours(
                    f"{world}-{depth}", f"{world}-dqn", Path(folder), *_EARLY, "--replay.ahead", str(depth)
                )
                for depth in plan.depths
            }
            with stopped_at_the_end(field):
                worlds[world] = figures(
                    windows_in_turn(field, plan.rounds, plan.window_cpu_seconds, log, warm_up_cpu_seconds=8.0)
                )
    return {"worlds": worlds, "plan": dataclasses.asdict(plan)}


def label(depth: int) -> str:
    return f"D={depth}"


def figures(windows: dict[str, list[Window]]) -> dict[str, Any]:
    """Of each D; ``label(STRICT)`` must be among them."""
    strict = windows[label(STRICT)]
    return {
        name: {
            "env_steps_per_second": spread([w.per_second for w in done]),
            "env_steps_per_cpu_second": spread([w.per_cpu_second for w in done]),
            "to_the_strict_loop": spread(
                [w.per_second / s.per_second for w, s in zip(done, strict, strict=True)]
            ),
            "to_the_strict_loop_per_cpu_second": spread(
                [w.per_cpu_second / s.per_cpu_second for w, s in zip(done, strict, strict=True)]
            ),
        }
        for name, done in windows.items()
    }
