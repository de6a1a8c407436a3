"""Runs that are started for a measurement."""

from __future__ import annotations

import signal
import subprocess
import sys

import psutil
import pytest

from waiting import until

PROGRAM = """
from murmurate.mapping.check import measured
from murmurate.recipes import recipe

if __name__ == "__main__":
    measured(recipe("cartpole-a2c"), 2.0)
    print("measured", flush=True)
    measured(recipe("cartpole-a2c"), 60.0)
    print("not reached", flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_signal_stops_the_measurement_and_not_only_its_run(number: signal.Signals) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "measured\n"
    before = len(psutil.Process(process.pid).children(recursive=True))
    until(lambda: len(psutil.Process(process.pid).children(recursive=True)) > before, "a learner")
    descendants = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(number)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == -number
    assert "not reached" not in out
    assert not psutil.wait_procs(descendants, timeout=20)[1], "no process is left"
