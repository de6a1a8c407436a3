"""Processes of a script: members that are suspended, Ctrl-C and SIGTERM, and a main that is not found."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from murmurate.errors import RunFailed
from murmurate.fabric.processes.process_handle import is_stopped
from murmurate.launch import script_local
from murmurate.launch.script import run
from murmurate.strategies.parameter_server import ParameterServer
from sessions import session
from waiting import DEADLINE_SECONDS, until

HERE = Path(__file__).parents[1]


def wrapped(loop):
    return loop.wrap_optimizer(torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.1))


def suspend_centre(loop, folder):
    """On rank 0: suspend the centre, which has written its pid there."""
    file = folder / "pid"
    if loop.is_centre:
        (folder / "written").write_text(str(os.getpid()))
        (folder / "written").rename(file)
    elif loop.rank == 0:
        until(file.exists, "the pid of the centre")
        pid = int(file.read_text())
        os.kill(pid, signal.SIGSTOP)
        until(lambda: is_stopped(pid), "the centre to be suspended")


def steps_without_end(folder, loop):
    optimizer = wrapped(loop)
    suspend_centre(loop, folder)
    for _ in range(10**9):
        optimizer.step()


def finishes(folder, loop):
    wrapped(loop)
    suspend_centre(loop, folder)
    if loop.rank == 0:
        loop.finish(DEADLINE_SECONDS)


def returns(folder, loop):
    wrapped(loop)
    suspend_centre(loop, folder)


@pytest.mark.parametrize(
    ("main", "words"),
    [
        (steps_without_end, "which kept the centre, is dead"),
        (finishes, "which kept the centre, is dead.*updates that it had not applied"),
        (returns, "the centre of parameter-server died before it had ended"),
    ],
)
def test_a_centre_that_stays_suspended_ends_the_run(main, words, tmp_path, capfd, monkeypatch):
    """Only the launcher's process has a short deadline: a busy machine may be late with the replicas' own."""
    strategy, collect = ParameterServer(deadline_seconds=0.1), script_local._collect

    def impatient(settings, workers):
        return collect(dataclasses.replace(settings, deadline_seconds=1.0), workers)

    monkeypatch.setattr(script_local, "_collect", impatient)
    with pytest.raises(RunFailed, match=f"(?s){words}"):
        run(
            functools.partial(main, tmp_path),
            replicas=2,
            strategy=strategy,
            deadline_seconds=DEADLINE_SECONDS,
        )
    assert "murmurate: the centre died (it was suspended)" in capfd.readouterr().err


def one_fails_beside_one_that_is_suspended(folder, loop):
    if loop.rank:
        (folder / str(os.getpid())).touch()
        os.kill(os.getpid(), signal.SIGSTOP)
    until(lambda: any(is_stopped(int(file.name)) for file in folder.iterdir()), "the other to be suspended")
    raise LookupError("no such image")


def test_a_failure_names_members_that_are_suspended(tmp_path):
    with pytest.raises(RunFailed, match=r"no such image Suspended: replica 1\."):
        run(functools.partial(one_fails_beside_one_that_is_suspended, tmp_path), replicas=2)


# -- Ctrl-C and SIGTERM -----------------------------------------------------------------------------


def saves_when_interrupted(folder, waits, loop):
    optimizer = wrapped(loop)
    try:
        for _ in range(10**9):
            optimizer.step()
            (folder / f"up {loop.rank}").touch()
    except KeyboardInterrupt:
        (folder / f"heard {loop.rank}").touch()
        until((folder / "sent").exists, "all signals to be sent, before it saves")
        if loop.finish(DEADLINE_SECONDS):  # both end, and their centre too
            (folder / f"saved {loop.rank}").touch()
        while waits:
            signal.pause()
        raise
    finally:
        (folder / f"ended {loop.rank}").touch()


_SCRIPT = """
import functools, sys
from pathlib import Path
import murmurate
from launch.test_script_local import saves_when_interrupted
from murmurate.launch import script_local
from murmurate.training import interrupts
from waiting import DEADLINE_SECONDS

if __name__ == "__main__":
    # a busy machine may take longer over what a signal asks for
    script_local._SAVING_SECONDS = interrupts.REPEATED_WITHIN_SECONDS = DEADLINE_SECONDS
    main = functools.partial(saves_when_interrupted, Path(sys.argv[1]), sys.argv[2] == "waits")
    murmurate.run(main, replicas=2, strategy=sys.argv[3])
"""


def _hear_hangups():
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup has it ignored, also where it runs these tests


@contextlib.contextmanager
def started(folder, waits, strategy):
    """A script of two replicas, both of which have made a step."""
    script = folder / "own.py"
    script.write_text(_SCRIPT)
    with session(
        [sys.executable, script, folder, waits, strategy],
        env=os.environ | {"PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        preexec_fn=_hear_hangups,
    ) as process:
        until(lambda: files(folder, "up") == ["up 0", "up 1"], "both to make a step")
        yield process


def files(folder, word):
    return sorted(file.name for file in folder.glob(f"{word} *"))


@pytest.mark.parametrize(
    ("number", "times", "code"),
    [
        (signal.SIGINT, 1, -signal.SIGINT),  # as a terminal does
        (signal.SIGHUP, 2, 143),  # as a shell and the kernel do when a terminal is closed; workers block it
        (signal.SIGTERM, 1, 143),  # as a scheduler does
    ],
)
def test_a_signal_interrupts_each_replica_which_may_save(number, times, code, tmp_path):
    with started(tmp_path, "raises", "parameter-server") as process:
        members = psutil.Process(process.pid).children(recursive=True)
        for _ in range(times):
            os.killpg(process.pid, number)
            until(lambda: files(tmp_path, "heard") == ["heard 0", "heard 1"], "both to hear it")
        (tmp_path / "sent").touch()
        said = process.communicate()[1]
        assert not psutil.wait_procs(members, timeout=DEADLINE_SECONDS)[1], "no process is left"
    assert process.returncode == code, said
    assert files(tmp_path, "saved") == ["saved 0", "saved 1"], said
    assert {"ended 0", "ended 1"} <= set(files(tmp_path, "ended"))  # and perhaps the centre


def test_a_second_signal_ends_replicas_that_have_not_ended(tmp_path):
    with started(tmp_path, "waits", "all-reduce") as process:
        members = psutil.Process(process.pid).children(recursive=True)
        os.killpg(process.pid, signal.SIGINT)
        (tmp_path / "sent").touch()
        until(lambda: files(tmp_path, "saved") == ["saved 0", "saved 1"], "the first signal to be heard")
        os.killpg(process.pid, signal.SIGINT)
        process.communicate()
        assert not psutil.wait_procs(members, timeout=DEADLINE_SECONDS)[1], "no process is left"
    assert process.returncode == -signal.SIGINT
    assert files(tmp_path, "ended") == []


class SignalledWhileItIsDropped:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)


def is_interrupted(loop):
    optimizer = wrapped(loop)
    try:
        SignalledWhileItIsDropped()
        for _ in range(10**9):
            optimizer.step()
    except KeyboardInterrupt:
        return "interrupted"


def test_an_interrupt_that_python_drops_is_raised_again():
    assert run(is_interrupted, replicas=2, strategy="parameter-server") == ["interrupted"] * 2


def test_a_main_below_the_guard_is_refused_with_the_remedy(tmp_path):
    script = tmp_path / "guarded.py"
    script.write_text(
        "import murmurate\n\nif __name__ == '__main__':\n    def main(loop):\n        pass\n\n"
        "    murmurate.run(main, replicas=1)\n"
    )
    ended = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert "Refusal: a process cannot import what it is to run" in ended.stderr
    assert "Let it be at module level" in ended.stderr


def test_a_program_on_standard_input_may_run_what_others_can_import() -> None:
    program = """
import operator
import murmurate

def main(loop):
    pass

try:
    murmurate.run(main, replicas=2)
except murmurate.Refusal as refusal:
    print(refusal)
print(murmurate.run(operator.attrgetter("rank"), replicas=2))
"""
    done = subprocess.run([sys.executable], input=program, capture_output=True, text=True, timeout=60)
    refusal, ranks = done.stdout.splitlines()
    assert "read from standard input, and other processes cannot import it from there" in refusal, done.stderr
    assert ranks == "[0, 1]"
