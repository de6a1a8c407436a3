"""Signals that arrive when a command has ended, and its process is about to."""

from __future__ import annotations

import subprocess
import sys

import pytest

_PROGRAM = """
import atexit, os, signal, sys
from murmurate.__main__ import main

def interrupt():
    os.kill(os.getpid(), signal.{name})

sys.argv = ["murmurate", "secret"]
if {late}:
    atexit.register(interrupt)  # after the exit callbacks of the command
code = main()
if not {late}:
    atexit.register(interrupt)  # before them
assert "torch" not in sys.modules, "to print a secret would take two seconds"
sys.exit(code)
"""


@pytest.mark.parametrize(("name", "late"), [("SIGINT", False), ("SIGTERM", True)])
def test_a_signal_after_the_end_changes_neither_exit_code_nor_output(name: str, late: bool) -> None:
    program = _PROGRAM.format(name=name, late=late)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.split()) == 1
