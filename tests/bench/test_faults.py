"""What the straggler and chaos benches do to their members, and how their figures are made."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from murmurate.bench import chaos, straggler
from murmurate.errors import RunFailed


def test_blocked_is_over_the_quick_ones_and_cpu_time_over_all_members() -> None:
    def answer(blocked: float, updates: float, cpu: float) -> dict[str, float]:
        return {"blocked_seconds": blocked, "wall_seconds": 10.0, "cpu_seconds": cpu, "updates": updates}

    found = straggler.figures([answer(6, 100, 4), answer(8, 100, 2), answer(0, 50, 1), answer(9, 0, 3)], 3)
    assert found["blocked_share"] == pytest.approx(0.7)
    assert found["updates_per_cpu_second"] == pytest.approx(25.0)
    assert found["updates_of_the_quick_per_second"] == pytest.approx(10.0)
    assert found["updates_of_the_slow_per_second"] == pytest.approx(5.0)


@pytest.mark.slow
def test_all_wait_for_a_straggler_in_rounds_and_nobody_does_under_gala() -> None:
    plan = straggler.StragglerPlan(seconds=0.5, replicas=2, width=64, strategies=("gala", "all-reduce"))
    rows = straggler.measure(plan, lambda line: None)["strategies"]
    assert rows["gala"]["blocked_share"]["median"] < 0.2
    assert rows["all-reduce"]["blocked_share"]["median"] > 0.3
    assert all(row["updates_per_cpu_second"]["median"] > 0 for row in rows.values())


def test_faults_come_in_turn_and_a_stopped_one_is_woken(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    sent: list[tuple[int, signal.Signals]] = []
    monkeypatch.setattr(chaos.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(chaos.os, "kill", lambda pid, number: sent.append((pid, number)))
    begun = [0.0]
    trial: Any = SimpleNamespace(seconds=lambda: begun[0], pids=lambda: {0: 1000})
    injector = chaos.Injector(chaos.ChaosPlan(every_seconds=20.0, stopped_seconds=10.0))
    for _ in range(300):
        begun[0] = max(0.0, now[0] - 130.0)  # nobody learns before that
        injector.act(trial)
        now[0] += 0.2
    assert [number for _, number in sent] == [signal.SIGKILL]
    for _ in range(400):
        injector.act(trial)
        now[0] += 0.2
    kinds = [number for _, number in sent]
    assert kinds[:4] == [signal.SIGKILL, signal.SIGSTOP, signal.SIGCONT, signal.SIGKILL]
    assert [fault["fault"] for fault in injector.done[:3]] == ["SIGKILL", "SIGSTOP", "SIGKILL"]


def test_each_stopped_one_is_woken_though_others_are_stopped_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, sent = [100.0], []
    monkeypatch.setattr(chaos.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(chaos.os, "kill", lambda pid, number: sent.append((now[0], pid, number)))
    trial: Any = SimpleNamespace(seconds=lambda: 1.0, pids=lambda: {0: 1000 + len(sent)})
    injector = chaos.Injector(chaos.ChaosPlan(every_seconds=10.0, stopped_seconds=50.0))
    for _ in range(200):
        injector.act(trial)
        now[0] += 1.0
    stopped = {pid: at for at, pid, number in sent if number == signal.SIGSTOP}
    woken = {pid: at for at, pid, number in sent if number == signal.SIGCONT}
    assert woken == {pid: at + 50.0 for pid, at in stopped.items() if at + 50.0 < now[0]}
    assert len(woken) > 3


def test_a_fault_waits_while_the_processes_are_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    now, pids = [100.0], dict[int, int]()
    monkeypatch.setattr(chaos.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(chaos.os, "kill", lambda pid, number: None)
    trial: Any = SimpleNamespace(seconds=lambda: 1.0, pids=lambda: pids)
    injector = chaos.Injector(chaos.ChaosPlan(every_seconds=10.0))
    for now[0] in (100.0, 110.0):
        injector.act(trial)
    assert not injector.done
    pids[3] = 1003
    now[0] = 110.2
    injector.act(trial)
    assert injector.done == [{"fault": "SIGKILL", "replica": 3}]


def test_a_failed_run_is_told_of_though_its_processes_still_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remain = "os.fork() or (signal.alarm(60), signal.pause())"
    script = f"import os, signal, sys; {remain}; sys.exit('no ' + 'x' * 100_000 + ' memory')"
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -c "{script}"\n')
    python.chmod(0o755)
    monkeypatch.setattr(chaos.sys, "executable", str(python))
    trial = chaos.Trial("gala", chaos.ChaosPlan(), tmp_path / "run")
    with pytest.raises(RunFailed, match=r"exit code 1: x+ memory"):
        trial.run(lambda trial: None)
    assert not trial._session()
