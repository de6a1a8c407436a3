"""Ctrl-C and SIGTERM, to the launcher or to the whole group, as terminals and schedulers send them."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import subprocess
import sys
import termios
from pathlib import Path

import psutil
import pytest

from faults.commands import Written, training
from murmurate.training import checkpoint, interrupts
from murmurate.training.interrupts import SecondInterrupt, signals, signals_restored
from waiting import DEADLINE_SECONDS, until

pytestmark = pytest.mark.timeout(900)
_LONG = ("--replicas", 2, "--env-steps", 10**9, "--record-every-seconds", 0.05)


@pytest.mark.parametrize(
    ("number", "to_the_group", "code"),
    [
        (signal.SIGINT, True, 130),
        pytest.param(signal.SIGTERM, True, 143, marks=pytest.mark.slow),
        (signal.SIGTERM, False, 143),
    ],
)
def test_once_saves_and_stops(number: signal.Signals, to_the_group: bool, code: int, tmp_path: Path) -> None:
    with training(tmp_path / "run", "cartpole-gala", *_LONG) as command:
        command.learning(2)
        assert not command.has_checkpoint()
        command.kill_group(number) if to_the_group else os.kill(command.process.pid, number)
        assert command.wait() == code, command.said()
        command.leaves_nothing()
        summary, last = command.summary(), command.folder / "checkpoints" / "last"
        assert summary["exit"] == "interrupted"
        assert summary["dead_replicas"] == []
        assert checkpoint.damage(last) is None
        assert checkpoint.parts(last) == [0, 1]
        # nothing that was learned is missing from what was saved
        assert checkpoint.read_manifest(last)["env_steps"] == summary["env_steps"] > 0
        assert number.name in command.said()
        assert "Traceback" not in command.said()


def test_a_replay_in_a_process_of_its_own_outlives_sigterm_to_all_and_is_saved(tmp_path: Path) -> None:
    """As Slurm sends it."""
    options = (
        "--replay.learning-starts",
        200,
        "--agent.batch",
        16,
        "--actors",
        1,
        "--record-every-seconds",
        0.05,
    )
    with training(tmp_path / "run", "cartpole-service-dqn", *options) as command:
        command.learning(1)
        command.kill_group(signal.SIGTERM)
        assert command.wait() == 143, command.said()
        command.leaves_nothing()
        last = command.folder / "checkpoints" / "last"
        assert checkpoint.damage(last) is None
        assert checkpoint.read_manifest(last)["env_steps"] == command.summary()["env_steps"] > 0


def _in_a_terminal() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup has it ignored, also where it runs these tests


def test_a_closed_terminal_saves_and_stops(tmp_path: Path) -> None:
    """The kernel sends SIGHUP to every process of the group, and what is printed from then on fails."""
    terminal, inside = pty.openpty()
    words = ["train", "cartpole-gala", *_LONG, "--out", tmp_path / "run"]
    process = subprocess.Popen(
        [sys.executable, "-m", "murmurate", *map(str, words)],
        stdin=inside,
        stdout=inside,
        stderr=inside,
        start_new_session=True,
        preexec_fn=_in_a_terminal,
    )
    try:
        os.close(inside)
        run = Written(tmp_path / "run")
        until(lambda: len(run.records(0)) > 2 and len(run.records(1)) > 2, "both replicas to learn")
        pids = run.pids()
        os.close(terminal)
        assert process.wait(DEADLINE_SECONDS) == 143
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert run.summary()["exit"] == "interrupted"
    assert run.summary()["dead_replicas"] == []
    assert checkpoint.damage(run.folder / "checkpoints" / "last") is None
    assert run.manifest()["env_steps"] == run.summary()["env_steps"] > 0
    until(lambda: not any(map(psutil.pid_exists, pids.values())), "its roles to be gone")


def test_a_scheduler_may_send_sigterm_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    class Run:
        interrupted, signal = False, 0
        stops = 0

        def stop(self, why: str) -> None:
            self.stops += 1

    run, before = Run(), signal.getsignal(signal.SIGTERM)
    with signals_restored(), signals(run):
        for _ in range(2):
            signal.raise_signal(signal.SIGTERM)
        assert (run.stops, run.interrupted) == (1, True)
        with pytest.raises(SecondInterrupt):
            signal.raise_signal(signal.SIGINT)
        monkeypatch.setattr(interrupts, "REPEATED_WITHIN_SECONDS", 0.0)
        with pytest.raises(SecondInterrupt):
            signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before


def test_twice_stops_at_once_even_when_a_replica_does_not_answer(tmp_path: Path) -> None:
    with training(tmp_path / "run", "cartpole-gala", *_LONG) as command:
        command.learning(2)
        os.kill(command.pids()[1], signal.SIGSTOP)  # it will not save, and the launcher would wait for it
        command.kill_group(signal.SIGINT)
        until(lambda: command.events("stopping"), "the first Ctrl-C to be heard")
        command.kill_group(signal.SIGINT)
        # were the deadline for stopping waited for instead, it would be a failure with exit code 1
        assert command.wait() == 130, command.said()
        command.leaves_nothing()
        assert command.summary()["exit"] == "interrupted"
        assert "Traceback" not in command.said()


def test_sigterm_to_one_role_alone_ends_it_and_to_all_does_not() -> None:
    program = (
        "import os, signal, types\n"
        "from murmurate.fabric.processes.run_state import RunState\n"
        "from murmurate.launch import role\n"
        "due = []\n"
        "class Timer:\n"
        "    def __init__(self, seconds, function): self.start = lambda: due.append(function)\n"
        "role.threading = types.SimpleNamespace(Timer=Timer)\n"
        "def told(all_of_them):\n"
        "    run_state = RunState(2); run_state.open()\n"
        "    signal.signal(signal.SIGTERM, lambda *_: role.leave_unless_stopping(run_state))\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    if all_of_them: run_state.request_stop()\n"
        "    [function() for function in due]\n"
        "    os._exit(7)\n"
        "for all_of_them in (True, False):\n"
        "    child = os.fork()\n"
        "    if child == 0: told(all_of_them)\n"
        "    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.split() == ["7", "143"], done.stderr  # to all: it went on
