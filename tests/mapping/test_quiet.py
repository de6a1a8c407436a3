"""Runs that are started for a measurement."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile

import psutil
import pytest

from sessions import session
from waiting import DEADLINE_SECONDS, until

pytestmark = pytest.mark.timeout(900)

PROGRAM = """
import dataclasses
import tempfile
from pathlib import Path

from murmurate.mapping.check import measured
from murmurate.mapping.pilot import measure, pilot_run, steady
from murmurate.mapping.quiet import started
from murmurate.recipes import recipe

if __name__ == "__main__":
    # leaves a fork server that runs, and signal handlers that were restored
    with tempfile.TemporaryDirectory() as folder:
        started(dataclasses.replace(steady(recipe("cartpole-a2c")), updates=1), Path(folder))
    print("started", flush=True)
    input()  # until the processes that there are have been counted
    {}
    print("not reached", flush=True)
"""
OF_A_RUN, OF_A_PILOT = (
    PROGRAM.format(call)
    for call in ('measured(recipe("cartpole-a2c"), 60.0)', 'measure(pilot_run(recipe("cartpole-a2c")), 15.0)')
)


@pytest.mark.parametrize(
    ("program", "number"),
    [
        (OF_A_RUN, signal.SIGINT),
        pytest.param(OF_A_RUN, signal.SIGTERM, marks=pytest.mark.slow),
        (OF_A_PILOT, signal.SIGINT),
    ],
)
def test_a_signal_stops_the_measurement_and_not_only_its_run(program: str, number: signal.Signals) -> None:
    with (
        tempfile.TemporaryDirectory(prefix="murmur") as folder,  # short, as paths of sockets are limited
        session(
            [sys.executable, "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "TMPDIR": folder},
        ) as process,
    ):

        def left() -> list[str]:
            return [name for name in os.listdir(folder) if name.startswith("murmurate")]

        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        # the learner of the first run may still be ending
        before = set(psutil.Process(process.pid).children(recursive=True))
        process.stdin.write("\n")
        process.stdin.flush()
        until(left, "a folder to write to")
        until(lambda: set(psutil.Process(process.pid).children(recursive=True)) - before, "a learner")
        descendants = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(number)
        out, _ = process.communicate(timeout=DEADLINE_SECONDS)
        assert process.returncode == -number
        assert "not reached" not in out
        assert not psutil.wait_procs(descendants, timeout=DEADLINE_SECONDS)[1], "no process is left"
        if number == signal.SIGINT:  # SIGTERM ends a script at once; the command line handles it
            until(lambda: not left(), "the folder to be removed")
