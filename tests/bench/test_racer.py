"""Racers: whose CPU seconds are counted, when they run, and that none is left."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from murmurate.bench import _racer
from murmurate.bench._racer import ProgressFile, Racer, RaceWindow, ThroughputPlan, race
from murmurate.errors import RunFailed
from waiting import until

# appends {"env_steps": n} every 50 ms; a child burns the CPU while the parent only writes
_PARENT_WITH_BUSY_CHILD = """
import json, os, sys, time
if os.fork() == 0:
    while os.getppid() != 1:
        sum(range(2000))
    os._exit(0)
steps = 0
with open(sys.argv[1], "a", buffering=1) as file:
    while True:
        file.write('{"kind": "event"}\\n')
        steps += 7
        file.write(json.dumps({"replica": steps % 2, "env_steps": steps}) + "\\n")
        time.sleep(0.05)
"""


def racer(folder: Path, code: str, key: str = "env_steps") -> Racer:
    progress = folder / "one" / "progress.jsonl"
    return Racer("one", [sys.executable, "-c", code, str(progress)], progress, key=key)


@pytest.fixture
def busy(tmp_path: Path):
    one = racer(tmp_path, _PARENT_WITH_BUSY_CHILD)
    yield one
    one.stop()


def test_a_childs_cpu_seconds_count_and_steps_are_those_between_two_lines(busy: Racer) -> None:
    busy.start(warm_up_cpu_seconds=0.1)
    window = busy.window(0.3)
    # the parent alone would not burn that much within its share of the deadline
    assert window.cpu_seconds >= 0.3
    assert window.env_steps > 0
    assert window.env_steps % 7 == 0
    assert window.wall_seconds >= 0.3 * 0.9
    assert window.per_cpu_second == pytest.approx(window.env_steps / window.cpu_seconds)


def test_outside_its_windows_a_racer_stands_still(busy: Racer) -> None:
    busy.start(warm_up_cpu_seconds=0.05)
    members = [psutil.Process(p.pid) for p in busy._processes]
    assert len(members) == 2

    def still() -> bool:
        return all(m.status() == psutil.STATUS_STOPPED for m in members)

    until(still, "both stand still")
    assert busy.window(0.05).env_steps > 0
    until(still, "both stand still again")


def test_stop_leaves_no_process_even_of_a_racer_that_is_stopped(busy: Racer) -> None:
    busy.start(warm_up_cpu_seconds=0.05)
    members = list(busy._processes)
    busy.stop()
    _, alive = psutil.wait_procs(members, timeout=30)
    assert [p for p in alive if p.status() != psutil.STATUS_ZOMBIE] == []


def test_temporary_files_of_a_killed_racer_are_in_the_folder_of_the_race(tmp_path: Path) -> None:
    code = f"import tempfile; tempfile.mkdtemp(prefix='left-')\n{_PARENT_WITH_BUSY_CHILD}"
    one = racer(tmp_path, code)
    try:
        one.start(warm_up_cpu_seconds=0.05)
    finally:
        one.stop()
    assert len(list(tmp_path.glob("left-*"))) == 1


def test_rows_are_the_newest_of_each_replica(tmp_path: Path) -> None:
    one = racer(tmp_path, "")
    one.progress.parent.mkdir(parents=True)
    one.progress.write_text(
        '{"replica": 1, "env_steps": 5}\n{"replica": 0, "env_steps": 6}\n{"kind": "event"}\n'
        '{"replica": 1, "env_steps": 9}\n'
    )
    assert one.rows() == [{"replica": 0, "env_steps": 6}, {"replica": 1, "env_steps": 9}]


def test_a_racer_that_ends_is_reported_with_its_last_words(tmp_path: Path) -> None:
    one = racer(tmp_path, "raise SystemExit('no joystick here')")
    with pytest.raises(RunFailed, match="no joystick here"):
        one.start()
    one.stop()


_WITH_A_SERVER = """
import os, sys, time
end, other = os.pipe()
if os.fork() == 0:
    os.setsid()
    os.close(other)
    os.read(end, 1)  # returns when the other process has ended
    stop = time.process_time() + 0.2
    while time.process_time() < stop:
        pass
    os.rename(sys.argv[1], sys.argv[1] + ".renamed")
    os._exit(0)
steps = 0
with open(sys.argv[1], "a", buffering=1) as file:
    while True:
        steps += 1
        file.write('{"env_steps": %d}\\n' % steps)
"""


def test_stop_waits_for_processes_that_end_with_the_others(tmp_path: Path) -> None:
    one = racer(tmp_path, _WITH_A_SERVER)
    try:
        one.start(warm_up_cpu_seconds=0.05)
    finally:
        one.stop()
    assert one.progress.with_name("progress.jsonl.renamed").exists()


_LEAVES_A_CHILD = """
import os, signal, sys
ready, written = os.pipe()
if os.fork() == 0:
    with open(sys.argv[1], "w") as file:
        file.write(str(os.getpid()))
    os.rename(sys.argv[1], sys.argv[1] + ".pid")
    os.write(written, b"x")
    signal.pause()
os.read(ready, 1)
"""


def test_what_a_racer_that_ended_has_started_is_ended_too(tmp_path: Path) -> None:
    one = racer(tmp_path, _LEAVES_A_CHILD)
    with pytest.raises(RunFailed, match="ended unexpectedly"):
        one.start()
    child = psutil.Process(int(one.progress.with_name("progress.jsonl.pid").read_text()))
    one.stop()
    until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)


def test_half_a_line_waits_for_its_other_half(tmp_path: Path) -> None:
    one = racer(tmp_path, "")
    one.progress.parent.mkdir(parents=True)
    one.progress.write_text('{"env_steps": 5}\n{"env_st')
    assert one._newest_row() == {"env_steps": 5}
    with open(one.progress, "a") as file:
        file.write('eps": 6}\n')
    assert one._newest_row() == {"env_steps": 6}
    assert one._newest_row() is None


def test_a_program_that_is_a_racer_says_how_far_it_is_until_the_bench_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "one" / "progress.jsonl"
    file = ProgressFile(path)
    monkeypatch.setattr(_racer, "_WRITE_EVERY_SECONDS", 1000.0)
    assert file.write(3)
    monkeypatch.setattr(_racer, "_WRITE_EVERY_SECONDS", 0.0)
    assert file.write(5)
    monkeypatch.setattr(os, "getppid", lambda: 1)
    assert not file.write(7)
    assert path.read_text() == '{"env_steps": 5}\n{"env_steps": 7}\n'


def test_rates() -> None:
    window = RaceWindow(env_steps=600, cpu_seconds=3.0, wall_seconds=2.0)
    assert (window.per_cpu_second, window.per_second) == (200.0, 300.0)


class _Runner:
    """A racer that only notes its turns."""

    def __init__(self, label: str, turns: list[str]) -> None:
        self.label, self._turns = label, turns

    def start(self, warm_up_cpu_seconds: float) -> None:
        pass

    def window(self, cpu_seconds: float) -> RaceWindow:
        self._turns.append(self.label)
        return RaceWindow(len(self._turns), 1.0, 1.0)

    def stop(self) -> None:
        pass


def test_the_first_of_a_round_is_the_last_of_the_next_one() -> None:
    turns: list[str] = []
    racers: Any = {label: _Runner(label, turns) for label in ("ours", "peer", "limit")}
    windows = race(lambda where: racers, ThroughputPlan(rounds=3), lambda line: None)
    assert turns == ["ours", "peer", "limit", "limit", "peer", "ours", "ours", "peer", "limit"]
    assert [window.env_steps for window in windows["ours"]] == [1, 6, 7]
    assert [window.env_steps for window in windows["limit"]] == [3, 4, 9]


_BENCH_OF_SLEEPERS = """
import sys
from murmurate.bench._racer import Racer
from murmurate.cli.main import main

start = Racer.start

def start_sleeper(racer, *given, **named):
    racer.command = [sys.executable, "-c", "import time; time.sleep(3600)", "racer"]
    start(racer, *given, **named)

Racer.start = start_sleeper
sys.exit(main(["bench", "relaxed-loop", "--json"]))
"""


def _is_racer(words: list[str]) -> bool:
    return words[-1:] == ["racer"] and not words[0].endswith("setpriv")


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGTERM, 128 + signal.SIGTERM),
        pytest.param(
            *(signal.SIGKILL, -signal.SIGKILL),
            marks=pytest.mark.skipif(
                not shutil.which("setpriv"),
                reason="there is no setpriv (of util-linux) here",
            ),
        ),
    ],
)
def test_a_bench_that_is_ended_ends_its_racers(number: int, code: int, tmp_path: Path) -> None:
    """One that is stopped is hung up on by the kernel; it is the one that runs that would go on."""
    bench = psutil.Popen(
        [sys.executable, "-c", _BENCH_OF_SLEEPERS],
        env=os.environ | {"TMPDIR": str(tmp_path)},  # a killed one removes nothing
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        racers: list[psutil.Process] = []
        # setpriv has become the racer, so that the racer is killed with the bench
        until(lambda: racers.extend(p for p in bench.children() if _is_racer(p.cmdline())) or racers)
        bench.send_signal(number)
        assert bench.wait() == code
        until(lambda: not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in racers))
    finally:
        for process in [*bench.children(recursive=True), bench] if bench.is_running() else []:
            process.kill()
