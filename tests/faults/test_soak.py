"""Many runs in one process, and one long run that is hurt again and again."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from faults.commands import Command, training
from murmurate.cli.main import main
from waiting import until

_RUNS = """
import os, sys, threading, psutil
from murmurate.cli.main import main

RECIPES = (
    ["cartpole-gala", "--replicas", "2", "--updates", "20"],
    ["cartpole-a2c", "--replicas", "2", "--updates", "20", "--launcher", "inline"],
    ["cartpole-dqn", "--updates", "20", "--replay.learning-starts", "100", "--replay.capacity", "1000"],
    ["cartpole-apex-dqn", "--updates", "5", "--replay.learning-starts", "100", "--replay.capacity", "1000"],
)
if __name__ == "__main__":
    process = psutil.Process()
    for k in range(int(sys.argv[1])):
        out = ["--eval-episodes", "1", "--stop-at-return", "none", "--out", f"{sys.argv[2]}/{k}"]
        code = main(["train", *RECIPES[k % len(RECIPES)], *out])
        print("RUN", code, process.memory_info().rss, process.num_fds(), threading.active_count(), flush=True)
"""


@pytest.mark.parametrize(
    "runs",
    [
        8,
        pytest.param(100, marks=[pytest.mark.slow, pytest.mark.timeout(3600)]),
    ],
)
def test_run_after_run_memory_descriptors_and_threads_stay(runs: int, tmp_path: Path) -> None:
    script = tmp_path / "runs.py"
    script.write_text(_RUNS)
    done = subprocess.run(
        [sys.executable, script, str(runs), tmp_path], stdout=subprocess.PIPE, text=True, check=True
    )
    seen = [tuple(map(int, line.split()[1:])) for line in done.stdout.splitlines() if line.startswith("RUN")]
    codes, memory, descriptors, threads = zip(*seen, strict=True)
    assert set(codes) == {0}
    assert len(codes) == runs
    # each of the four kinds of run has been made once
    assert max(descriptors[4:]) <= max(descriptors[:4])
    assert max(threads[4:]) <= max(threads[:4])
    assert memory[-1] - max(memory[:4]) < 32 * 2**20, [size // 2**20 for size in memory]


_HOURS = float(os.environ.get("MURMURATE_SOAK_HOURS", "2"))
_FAULT_SECONDS = 20.0


@pytest.mark.slow
@pytest.mark.timeout(_HOURS * 3600 + 1800)
def test_a_long_run_that_is_hurt_every_20_seconds_ends_by_itself_and_plays_as_well(tmp_path: Path) -> None:
    """MURMURATE_SOAK_HOURS: its length."""
    rng = random.Random(time.time_ns())
    options = ["--strategy", "push-sum", "--replicas", 4, "--restarts", 10**6, "--minutes", _HOURS * 60]
    # cartpole is learned within half a minute: only time ends this run, and a constant rate is not too high
    options += ["--stop-at-return", "none", "--env-steps", 10**12, "--agent.learning-rate", 1e-3]
    options += ["--checkpoint-every-env-steps", 200_000]
    with training(tmp_path / "run", "cartpole-a2c", *options) as command:
        command.learning(4)
        hurt = 0
        while not is_over(command):
            until(lambda: is_over(command) or is_whole(command), "all replicas to be back", every=0.5)
            if not is_over(command):
                victim, number = (
                    rng.randrange(4),
                    rng.choice([signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM]),
                )
                os.kill(command.pids()[victim], number)
                hurt += 1
            after = time.monotonic() + _FAULT_SECONDS
            # each look reads all records, of which there are many after two hours
            until(lambda after=after: is_over(command) or time.monotonic() > after, every=1.0)
        assert command.wait() == 0, command.said()
        command.leaves_nothing()
        assert hurt >= _HOURS * 3600 / _FAULT_SECONDS / 4
        assert command.summary()["exit"] == "finished"
    assert main(["eval", str(tmp_path / "run"), "--episodes", "20"]) == 0
    evaluation = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert evaluation["eval_return_mean"] > 400


def is_over(command: Command) -> bool:
    return command.process.poll() is not None or bool(command.events("stopping"))


def is_whole(command: Command) -> bool:
    """Whether each replica that was hurt is back. One that is hurt while it joins dies twice and joins once."""
    events = [(e["time_seconds"], k, e["member"]) for k in ("died", "joined") for e in command.events(k)]
    newest = {member: kind for _, kind, member in sorted(events)}
    return "died" not in newest.values()
