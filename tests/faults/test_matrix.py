"""Every part of a run is killed, frozen or told to end, at every stage: it goes on, or ends as documented.

Each pair of victim, signal, stage and strategy is tried at least once (``-m slow``), a few by default, and
the whole product with MURMURATE_MATRIX=whole in the environment.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from faults.commands import Command, trained, training
from faults.test_value_roles import actors
from murmurate.cli.main import main
from murmurate.fabric.processes.process_handle import is_stopped
from waiting import until

pytestmark = pytest.mark.timeout(600)

REPLICAS = 3
STRATEGIES = ("all-reduce", "local-sgd", "gala", "push-sum", "parameter-server", "dpsgd", "hogwild")
CENTRE = ("parameter-server", "dpsgd")
RANKS = {"first": [0], "middle": [1], "all but one": [0, 1], "all": [0, 1, 2], "centre": [REPLICAS]}
VICTIMS = ("launcher", "fork server", *RANKS, "actor")
SIGNALS = (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM, signal.SIGINT)
STAGES = ("start-up", "training", "checkpoint", "evaluation", "resume")
GOES_ON = 0
Case = tuple[str, signal.Signals, str, str]
_ENDLESS = ("--env-steps", 10**9, "--checkpoint-every-env-steps", 5_000, "--record-every-seconds", 0.1)
_REPLAY = ("--replay.learning-starts", 500, "--replay.capacity", 5_000, "--agent.batch", 16)


def outcome(victim: str, number: signal.Signals) -> int:
    """The documented exit code, or GOES_ON."""
    if victim == "launcher":
        codes = {signal.SIGKILL: -9, signal.SIGSTOP: GOES_ON, signal.SIGTERM: 143, signal.SIGINT: 130}
        return codes[number]
    if number == signal.SIGINT or victim not in ("all", "centre"):
        return GOES_ON  # the launcher alone answers Ctrl-C
    return 1


def possible(case: Case) -> bool:
    victim, _, stage, strategy = case
    if victim == "centre" and strategy not in CENTRE:
        return False
    if victim == "actor":  # of a learner alone
        return strategy == STRATEGIES[0] and stage in ("training", "checkpoint")
    return stage != "evaluation" or victim in ("launcher", "fork server")


def pairwise(cases: Sequence[Case], seed: int = 0) -> list[Case]:
    """Cases in which each pair of values of two factors occurs, if it occurs in any."""
    rng = random.Random(seed)
    left = {pair for case in cases for pair in _pairs(case)}
    chosen = []
    while left:
        best = max(rng.sample(cases, min(len(cases), 200)), key=lambda case: len(left & set(_pairs(case))))
        if news := left & set(_pairs(best)):
            chosen.append(best)
            left -= news
    return chosen


def _pairs(case: Case) -> list[tuple[tuple[int, object], ...]]:
    return list(itertools.combinations(enumerate(case), 2))


ALL = [case for case in itertools.product(VICTIMS, SIGNALS, STAGES, STRATEGIES) if possible(case)]
DEFAULT: list[Case] = [
    ("fork server", signal.SIGKILL, "training", "gala"),
    ("all but one", signal.SIGSTOP, "start-up", "all-reduce"),
]
SLOW = ALL if os.environ.get("MURMURATE_MATRIX") == "whole" else pairwise(ALL)


def cases() -> list[object]:
    named = {case: f"{case[0]} {case[1].name} {case[2]} {case[3]}" for case in ALL}
    slow = [case for case in SLOW if case not in DEFAULT]
    return [
        *(pytest.param(case, id=named[case]) for case in DEFAULT),
        *(pytest.param(case, id=named[case], marks=pytest.mark.slow) for case in slow),
    ]


@pytest.mark.parametrize("case", cases())
def test_it_goes_on_or_ends_as_documented_leaves_nothing_and_resumes(
    case: Case, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """``--junitxml FILE`` also writes the seconds from the signal to a new checkpoint or the end."""
    victim, number, stage, strategy = case
    with at_stage(tmp_path / "run", stage, strategy, victim == "actor") as command:
        saved = len(command.events("checkpoint"))
        for pid in pids(command, victim):
            os.kill(pid, number)
        hurt, code = time.monotonic(), outcome(victim, number)
        if code == GOES_ON and victim == "launcher":
            until(lambda: command.process.poll() is None and is_stopped(command.process.pid))
            os.kill(command.process.pid, signal.SIGCONT)
        if code == GOES_ON and stage == "evaluation":
            assert command.wait() == 0, command.said()
        elif code == GOES_ON:
            until(
                lambda: len(command.events("checkpoint")) > saved + 1 or command.process.poll() is not None,
                f"two checkpoints after it; it said: {command.said()}",
            )
            assert command.process.poll() is None, f"it ended: {command.said()}"
            record_property("seconds", time.monotonic() - hurt)
            os.kill(command.process.pid, signal.SIGINT)
            assert command.wait() == 130, command.said()
        else:
            assert command.wait() == code, command.said()
            record_property("seconds", time.monotonic() - hurt)
        assert "Traceback" not in command.said()
        command.leaves_nothing() if number != signal.SIGKILL else command.leaves_no_process()
        steps = command.manifest()["env_steps"] if command.has_checkpoint() else None
    resumed = main(["resume", str(tmp_path / "run"), "--env-steps", str((steps or 0) + 500)])
    assert resumed == (2 if steps is None else 0), "without a checkpoint it is refused"


@contextmanager
def at_stage(folder: Path, stage: str, strategy: str, with_actors: bool) -> Iterator[Command]:
    """A run that has just come to the stage."""
    options = [*_ENDLESS, "--strategy", strategy, "--replicas", REPLICAS]
    recipe = "cartpole-a2c"
    if with_actors:
        recipe, options = "cartpole-apex-dqn", [*_ENDLESS, *_REPLAY]
    if stage == "evaluation":
        options += ["--env-steps", 3_000, "--eval-episodes", 300]
    if stage == "resume":
        trained(folder, recipe, *options, "--env-steps", 3_000)
        (folder / "roles.jsonl").unlink()
        with Command(folder, "resume", folder, "--env-steps", 10**9) as command:
            command.pids()
            yield command
        return
    with training(folder, recipe, *options) as command:
        if stage == "start-up":
            command.pids()
        elif stage == "training":
            command.learning(1 if with_actors else REPLICAS)
        elif stage == "checkpoint":
            staged = folder / "checkpoints"
            until(lambda: any(staged.glob(".staging-*")) or command.has_checkpoint(), every=0.001)
        else:
            until(lambda: len(command.events("finished")) == REPLICAS, "the end of training")
        yield command


def pids(command: Command, victim: str) -> list[int]:
    if victim == "launcher":
        return [command.process.pid]
    if victim == "actor":
        return [until(lambda: actors(command).get(0), "an actor")]
    roles = command.pids()
    if victim == "fork server":
        return [server for server in map(parent, roles.values()) if server][:1] or [forkserver(command)]
    return [roles[rank] for rank in RANKS[victim]]


def parent(pid: int) -> int | None:
    try:
        return psutil.Process(pid).ppid()
    except psutil.NoSuchProcess:
        return None


def forkserver(command: Command) -> int:
    """Where all workers have ended: the launcher's child with the same command line."""
    launcher = psutil.Process(command.process.pid)
    (server,) = [child.pid for child in launcher.children() if child.cmdline() == launcher.cmdline()]
    return server


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_with_a_frozen_replica_nine_of_ten_checkpoints_succeed(strategy: str, tmp_path: Path) -> None:
    with at_stage(tmp_path / "run", "training", strategy, with_actors=False) as command:
        before = len(command.events("checkpoint"))
        os.kill(command.pids()[1], signal.SIGSTOP)
        until(lambda: len(command.events("checkpoint")) >= before + 20, "twenty checkpoints")
        skipped = len(command.events("checkpoint skipped")) + len(command.events("warning"))
        assert skipped <= 2
        os.kill(command.process.pid, signal.SIGINT)
        assert command.wait() == 130
