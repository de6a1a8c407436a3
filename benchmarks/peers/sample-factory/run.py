"""Sample Factory's Atari example on Pong (see README.md); prints one JSON line with its speed."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil

# a line of its log every few seconds: "Fps is (10 sec: 812.3, ...). Total num frames: 8192. Throughput ..."
REPORT = re.compile(r"Total num frames: (\d+)")
WARM_UP_REPORTS = 3
DEADLINE_SECONDS = 500.0

SETTINGS = {
    "env": "atari_pong",
    "algo": "APPO",
    "async_rl": "True",
    "device": "cpu",
    "num_workers": "2",
    "num_envs_per_worker": "8",
    "num_epochs": "4",
    "summaries_use_frameskip": "False",  # so that it counts env steps, not emulator frames
    "decorrelate_envs_on_one_worker": "False",
    "experiment": "bench",
    "train_for_seconds": "600",
}


def cpu_seconds(root: psutil.Process) -> float:
    total = 0.0
    for process in [root, *root.children(recursive=True)]:
        try:
            total += sum(process.cpu_times()[:4])
        except psutil.NoSuchProcess:
            continue
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cpu-seconds", type=float, default=60.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(Path(__file__).parent / "train.py"), f"--train_dir={folder}"]
        command += [f"--{key}={value}" for key, value in SETTINGS.items()]
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        # it may hang after a failure in a child: then the pipe ends when the tree is killed
        watchdog = threading.Timer(DEADLINE_SECONDS, kill, (process,))
        watchdog.start()
        try:
            print(json.dumps(measure(process, options.cpu_seconds)))
        finally:
            watchdog.cancel()
            kill(process)


def kill(process: subprocess.Popen[str]) -> None:
    tree = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    for member in [*tree, process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    process.wait()


def measure(process: subprocess.Popen[str], wanted_cpu_seconds: float) -> dict[str, object]:
    root, reports = psutil.Process(process.pid), 0
    steps, cpu, wall = 0, 0.0, 0.0
    last: list[str] = []
    for line in process.stdout or ():
        last = [*last[-20:], line]
        found = REPORT.search(line)
        if found is None:
            continue
        reports += 1
        now = (int(found.group(1)), cpu_seconds(root), time.monotonic())
        if reports == WARM_UP_REPORTS:
            steps, cpu, wall = now
        elif reports > WARM_UP_REPORTS and now[1] - cpu > wanted_cpu_seconds:
            return {
                "trainer": "Sample Factory 2.1.1, asynchronous PPO; each sample is used 4 times",
                "simulators": 16,
                "env_steps": now[0] - steps,
                "cpu_seconds": round(now[1] - cpu, 3),
                "wall_seconds": round(now[2] - wall, 3),
            }
    raise SystemExit("it ended before it was measured:\n" + "".join(last))


if __name__ == "__main__":
    main()
