"""Processes that run a module: forked from the fork server where there is one, else new interpreters."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from typing import Any

import psutil
import pytest

from murmurate.fabric.processes import module_process
from murmurate.fabric.processes.fork_server import fork_server
from murmurate.fabric.processes.module_process import Inherited, ModuleProcess, start_module

MODULE = "fabric.module_that_answers"


def started(code: int | None) -> tuple[ModuleProcess, dict[str, Any]]:
    read, write = os.pipe()
    process = start_module(MODULE, (write,))
    assert process.stdin is not None
    process.stdin.write(pickle.dumps((Inherited(write), code)))
    process.stdin.flush()
    os.close(write)
    with open(read, "rb") as pipe:
        return process, pickle.load(pipe)


def closed(process: ModuleProcess) -> None:
    assert process.stdin is not None
    process.stdin.close()


@pytest.fixture(params=["forked", "interpreter"])
def forked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if request.param == "interpreter":
        monkeypatch.setattr(module_process, "usable_fork_server", lambda: None)
        tests = os.path.dirname(os.path.dirname(__file__))
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([tests, os.environ.get("PYTHONPATH", "")]))
    else:
        fork_server().Process(target=int).start()
    return bool(request.param == "forked")


def test_it_inherits_descriptors_environment_and_output(
    forked: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SEEN", "here")
    process, seen = started(3)
    assert seen == {"environment": "here", "forked": forked, "pid": process.pid}
    assert process.wait() == 3
    assert process.poll() == 3
    closed(process)
    assert "it was here" in capfd.readouterr().err


def test_it_is_killed_or_ends_when_its_stdin_is_closed(forked: bool) -> None:
    process, _ = started(None)
    assert process.poll() is None
    process.kill()
    assert process.wait() == -signal.SIGKILL
    closed(process)
    process, _ = started(None)
    closed(process)
    assert process.wait() == 0
    assert not psutil.pid_exists(process.pid)


_IN_A_WORKER = """
import os, signal, sys
from fabric.test_module_process import started
from murmurate.fabric.processes.process_handle import is_stopped
from murmurate.fabric.processes.spawn import run
from waiting import until

def no_fabric(*_):
    return None

def member(fabric):
    first, seen = started(None)
    server = os.getppid()
    os.kill(server, signal.SIGSTOP)
    until(lambda: is_stopped(server))
    second, later = started(0)
    os.kill(server, signal.SIGKILL)
    until(lambda: os.getppid() != server)
    assert first.poll() is None  # it outlives the fork server
    third, last = started(0)
    ends = second.wait(), third.wait()
    first.kill()
    return [x["forked"] for x in (seen, later, last)], ends

if __name__ == "__main__":
    print(run(1, [member], no_fabric, 60.0))
"""


def test_a_worker_forks_from_the_server_that_it_came_from(tmp_path: Any) -> None:
    """Stopped or killed, the fork server leaves the process that it forked, and interpreters replace it."""
    script = tmp_path / "script.py"
    script.write_text(_IN_A_WORKER)
    tests = os.path.dirname(os.path.dirname(__file__))
    done = subprocess.run(
        [sys.executable, str(script)],
        env=os.environ | {"PYTHONPATH": tests},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=200,
    )
    assert done.stdout.strip() == "[([True, False, False], (0, 0))]"
