"""Runs that are started for a measurement."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile

import psutil
import pytest

from waiting import until

PROGRAM = """
import contextlib

from murmurate.errors import RunFailed
from murmurate.mapping.check import measured
from murmurate.mapping.pilot import measure, pilot_run
from murmurate.recipes import recipe

if __name__ == "__main__":
    with contextlib.suppress(RunFailed):  # a busy machine may be too slow for this measurement
        measured(recipe("cartpole-a2c"), 2.0)
    print("measured", flush=True)
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
    folder = tempfile.mkdtemp(prefix="murmur")  # short, as paths of sockets are limited
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": folder},
    )

    def left() -> list[str]:
        return [name for name in os.listdir(folder) if name.startswith("murmurate")]

    assert process.stdout is not None
    assert process.stdout.readline() == "measured\n"
    before = len(psutil.Process(process.pid).children(recursive=True))
    until(lambda: len(psutil.Process(process.pid).children(recursive=True)) > before, "a learner")
    until(left, "a folder to write to")
    descendants = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(number)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == -number
    assert "not reached" not in out
    assert not psutil.wait_procs(descendants, timeout=20)[1], "no process is left"
    if number == signal.SIGINT:  # SIGTERM ends a script at once; the command line handles it
        until(lambda: not left(), "the folder to be removed")
    shutil.rmtree(folder)
