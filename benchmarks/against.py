"""Compares the speed of this checkout with the speed of another one, on the same jobs in turn.

    git worktree add ../before REVISION
    (cd ../before && python3 -m venv .venv && .venv/bin/pip install -c constraints.txt -e '.[atari,topics]')
    python benchmarks/against.py ../before [--rounds N] [--only NAME ...] [--json FILE]

Each job runs in both checkouts, round after round, in windows of CPU seconds (training) or calls (replay,
topics, strategies). It prints for each job the ratio of this checkout's speed to the other one's: the median
over the rounds, and their range. More than 1 is faster here. ``--json FILE`` also writes them, with date,
revisions and hardware, as a result: ``--json benchmarks/results/$(date +%F)-against.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from murmurate.bench import topics
from murmurate.bench._racer import Racer, stopped_at_the_end
from murmurate.bench._result import header, median, spread
from murmurate.bench._server import Server

HERE = Path(__file__).resolve().parents[1]
WINDOW_CPU_SECONDS = 6.0
_WITHOUT_END = ("--env-steps", "1000000000", "--minutes", "60", "--stop-at-return", "None")
_DQN = ("--simulators", "8", "--replay.capacity", "20000", "--replay.learning-starts", "1000")
TRAININGS = {
    "pong-a2c": ("pong-a2c",),
    "pong-gala": ("pong-gala", "--replicas", "2"),
    "pong-dqn": ("pong-dqn", *_DQN),
    "cartpole-dqn": ("cartpole-dqn",),
}
CALLS = {  # (task, capacity, batch): calls per round
    ("sample_reused", 2**20, 256): 3000,
    ("update", 2**20, 256): 3000,
    ("rows_reused", 2**20, 256): 2000,
    ("atari_reused", 2**14, 256): 100,
}
_COST = (
    "import json; from murmurate.bench import strategy_cost as s;"
    "run = getattr(s._roles, 'run_together', None) or s._roles.together;"  # the name in earlier checkouts
    "answers = run(2, s.work, 'gala', s.PARAMETERS, 200);"
    "print(json.dumps(s.figures(answers)['copies']['median']))"
)
# modules of murmurate.bench: the name, and the name in earlier checkouts
_REPLAY_SERVER, _TOPICS_SERVER = ("_replay_server", "_replay_own"), ("_topics_server", "_topics_own")


def python(checkout: Path, *arguments: str) -> list[str]:
    """A command of the checkout's own Python: an editable install goes before every other path."""
    program = sys.executable if checkout == HERE else str(checkout / ".venv/bin/python")
    return ["env", "OMP_NUM_THREADS=1", program, *arguments]


def server_command(checkout: Path, module: str, earlier_name: str) -> list[str]:
    has_module = (checkout / f"src/murmurate/bench/{module}.py").is_file()
    return python(checkout, "-m", f"murmurate.bench.{module if has_module else earlier_name}")


def check(checkout: Path) -> None:
    """Exit if the checkout's Python imports another checkout's code, or no compiled kernels."""
    look = "import murmurate, murmurate.native as n; print(murmurate.__file__, bool(n.kernels), sep='\\n')"
    command = python(checkout, "-c", look)
    found = subprocess.run(command, capture_output=True, text=True, cwd=os.sep)
    if found.stdout.splitlines() != [str(checkout / "src/murmurate/__init__.py"), "True"]:
        sys.exit(
            f"{command[2]} does not import {checkout} with compiled kernels (--help says how to install "
            f"it): {found.stdout or found.stderr}"
        )


def trainings(other: Path, rounds: int, names: set[str]) -> Iterator[tuple[str, float]]:
    """Ratios of env steps per CPU second of ``murmurate train``, everything included."""
    for name, options in TRAININGS.items():
        if name not in names:
            continue
        with tempfile.TemporaryDirectory(prefix="against-") as folder:
            # whichever starts first may be 2 to 3% slower for as long as it lives
            for start in range(min(2, rounds)):
                racers = {}
                for label in in_turn(start):
                    checkout = {"here": HERE, "there": other}[label]
                    out = Path(folder) / f"{label}-{start}"
                    command = python(
                        checkout, "-m", "murmurate", "train", *options, *_WITHOUT_END, "--out", str(out)
                    )
                    racers[label] = Racer(
                        f"{name} {label}", command, out / "metrics.jsonl", key="total_env_steps"
                    )
                with stopped_at_the_end(racers):
                    for racer in racers.values():
                        racer.start(warm_up_cpu_seconds=10.0)
                    for number in range(start, rounds, 2):
                        rates = {}
                        for label in in_turn(number // 2):
                            rates[label] = racers[label].window(WINDOW_CPU_SECONDS).per_cpu_second
                        yield name, rates["here"] / rates["there"]


def in_turn(number: int) -> tuple[str, str]:
    return ("here", "there") if number % 2 else ("there", "here")


def replay(other: Path, rounds: int, names: set[str]) -> Iterator[tuple[str, float]]:
    """Ratios of calls per second of prioritized draws and updates."""
    with (
        Server.run(server_command(HERE, *_REPLAY_SERVER)) as here,
        Server.run(server_command(other, *_REPLAY_SERVER)) as there,
    ):
        servers = {"here": here, "there": there}
        for (task, capacity, batch), calls in CALLS.items():
            if f"replay {task}" not in names:
                continue
            request = {"task": task, "capacity": capacity, "batch": batch, "calls": calls, "cold": False}
            for number in range(2 * rounds):
                seconds = {label: float(servers[label].ask(request)["seconds"]) for label in in_turn(number)}
                yield f"replay {task}", seconds["there"] / seconds["here"]
            for server in servers.values():
                server.ask({"forget": True})


def documents(other: Path, rounds: int, names: set[str]) -> Iterator[tuple[str, float]]:
    """Ratios of documents per CPU second of DPSVI's learner."""
    if "topics" not in names:
        return
    corpus, _ = topics.generated(topics.QUICK)
    contender = topics.Contender("ours", "ours", {**topics._COMMON, "iterations": 20}, (2.0,))
    with (
        tempfile.TemporaryDirectory(prefix="against-") as folder,
        Server.run(server_command(HERE, *_TOPICS_SERVER)) as here,
        Server.run(server_command(other, *_TOPICS_SERVER)) as there,
    ):
        servers = {"here": here, "there": there}
        for number in range(rounds + 1):
            cpu = {}
            for label in in_turn(number):
                _, cpu[label], _ = topics.fit(servers[label], corpus, contender, number, Path(folder))[-1]
            if number:  # not the first round, in which code is loaded
                yield "topics", cpu["there"] / cpu["here"]


def copies(other: Path, rounds: int, names: set[str]) -> Iterator[tuple[str, float]]:
    """Ratios of the cost of a step of GALA over an update, in copies of the vector, with two members."""
    if "gala copies" not in names:
        return
    for number in range(rounds):
        cost = {}
        for label in in_turn(number):
            command = python({"here": HERE, "there": other}[label], "-c", _COST)
            answer = subprocess.run(command, check=True, capture_output=True, text=True, cwd=os.sep).stdout
            cost[label] = float(json.loads(answer.splitlines()[-1]))
        yield "gala copies", cost["there"] / cost["here"]


def revision(checkout: Path) -> str:
    """The commit of a checkout, with "-dirty" where files differ from it; "unknown" outside of git."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    found = subprocess.run(command, capture_output=True, text=True, cwd=checkout)
    return found.stdout.strip() or "unknown"


def result(ratios: dict[str, list[float]], other: Path, rounds: int, names: list[str]) -> dict[str, Any]:
    """The ratios as the results of benchmarks are stored. names: the jobs asked for."""
    only = [] if names == JOBS else ["--only", *names]
    words = ["python", "benchmarks/against.py", "OTHER", "--rounds", str(rounds), *only]
    return {
        **header("against", full=False),
        "command": shlex.join(words),
        "revision": revision(HERE),
        "other_revision": revision(other),
        "ratios": {name: spread(found) for name, found in ratios.items()},
    }


JOBS = [*TRAININGS, *(f"replay {task}" for task, _, _ in CALLS), "topics", "gala copies"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("other", type=Path, help="the other checkout")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", nargs="+", choices=JOBS, default=JOBS)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result to this file")
    options = parser.parse_args()
    if options.json is not None and not options.json.parent.is_dir():
        parser.error(f"--json: there is no folder {options.json.parent}. Make it, or name another.")
    other, names = options.other.resolve(), set(options.only)
    for checkout in (HERE, other):
        check(checkout)
    ratios: dict[str, list[float]] = {}
    for part in (trainings, replay, documents, copies):
        for name, ratio in part(other, options.rounds, names):
            ratios.setdefault(name, []).append(ratio)
            print(f"{name}: {ratio:.3f}", file=sys.stderr, flush=True)
    for name, found in ratios.items():
        print(f"{name:24} {median(found):.3f}   ({min(found):.3f} to {max(found):.3f}, {len(found)} rounds)")
    if options.json is not None:
        options.json.write_text(json.dumps(result(ratios, other, options.rounds, options.only)) + "\n")


if __name__ == "__main__":
    main()
