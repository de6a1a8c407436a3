"""The local launcher from inside the process that launches: what is awkward to reach from a command line."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from faults.commands import read_lines
from murmurate.cli.main import main
from murmurate.errors import RunFailed
from murmurate.launch import local, shutdown
from murmurate.recipes import recipe
from murmurate.training import checkpoint
from murmurate.training.run import Run
from short_runs import altered, train
from waiting import until

pytestmark = pytest.mark.timeout(900)


def _long(strategy: str = "gala") -> Run:
    from murmurate.strategies import strategies

    return altered(
        recipe("cartpole-gala"),
        strategy=strategies()[strategy](),
        replicas=2,
        env_steps=10**9,
        stop_at_return=None,
        record_every_seconds=0.05,
        checkpoint_every_env_steps=2_000,
        eval_episodes=1,
    )


def _meanwhile(act: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    return thread


def _freeze_one_and_interrupt(folder: Path, wait_for_silence: bool = False, also: int | None = None) -> None:
    """``wait_for_silence``: until the others, in the middle of a round without it, record nothing more."""
    until(lambda: (folder / "checkpoints/last/state.json").exists(), "a checkpoint")
    roles = {r["index"]: r["pid"] for r in read_lines(folder / "roles.jsonl")}
    os.kill(roles[1], signal.SIGSTOP)
    if also is not None:
        os.kill(roles[also], signal.SIGSTOP)
    if wait_for_silence:
        metrics = folder / "metrics.jsonl"
        until(lambda: time.time() - metrics.stat().st_mtime > 1.0, "silence")
    os.kill(os.getpid(), signal.SIGINT)


def test_a_replica_that_does_not_stop_is_killed_and_the_others_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutdown, "STOP_DEADLINE_SECONDS", 1.0)
    folder = tmp_path / "run"
    _meanwhile(lambda: _freeze_one_and_interrupt(folder))
    finish = train(_long(), folder)
    assert (finish.code, finish.summary["exit"]) == (130, "interrupted")
    assert finish.summary["dead_replicas"] == [1]
    assert [e["event"] for e in finish.summary["events"] if e.get("member") == 1] == ["killed", "died"]
    logs = [(folder / f"logs/replica-{rank}.log").read_text() for rank in (0, 1)]
    for rank, end in enumerate(("finished", "died")):
        assert f"rank {rank} begins: process " in logs[rank]
        assert f"rank {rank} ended ({end})" in logs[rank]
    last = folder / "checkpoints" / "last"
    assert checkpoint.damage(last) is None
    # the final one: nothing the survivor learned is missing
    records = [r for r in read_lines(folder / "metrics.jsonl") if r["replica"] == 0 and "kind" not in r]
    part = checkpoint.read_part(last, 0)
    assert part["updates"] == records[-1]["updates"]
    assert 1 not in checkpoint.parts(last)
    lines = read_lines(folder / "metrics.jsonl")
    of_dead = [r["bytes_exchanged"] for r in lines if r["replica"] == 1 and "kind" not in r]
    assert (
        finish.summary["bytes_exchanged"] == part["bytes_exchanged"] + of_dead[-1] > part["bytes_exchanged"]
    )


@pytest.mark.slow
def test_one_that_holds_up_a_round_is_excluded_and_the_others_stop_and_save(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    _meanwhile(lambda: _freeze_one_and_interrupt(folder, wait_for_silence=True))
    finish = train(_long("all-reduce"), folder)
    assert (finish.code, finish.summary["exit"]) == (130, "interrupted")
    told = [e["event"] for e in finish.summary["events"] if e.get("member") == 1]
    assert told == ["silent", "excluded", "died"], "there is nothing left to come back for"
    assert finish.summary["dead_replicas"] == [1]
    assert checkpoint.parts(folder / "checkpoints" / "last") == [0]


def test_when_no_member_stops_the_run_fails_and_the_last_checkpoint_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutdown, "STOP_DEADLINE_SECONDS", 1.0)
    folder = tmp_path / "run"
    _meanwhile(lambda: _freeze_one_and_interrupt(folder, also=0))
    finish = train(_long("all-reduce"), folder)
    assert finish.code == 1
    assert "no replica stopped within 1 s, and all were killed" in finish.summary["exit"]
    assert checkpoint.damage(checkpoint.newest(folder / "checkpoints")) is None


@pytest.mark.slow
def test_a_stopped_centre_does_not_hold_up_replicas_that_have_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutdown, "STOP_DEADLINE_SECONDS", 1.0)
    folder = tmp_path / "run"

    def stop_the_centre() -> None:
        until(lambda: (folder / "checkpoints/last/state.json").exists(), "a checkpoint")
        centre = [r["pid"] for r in read_lines(folder / "roles.jsonl") if r["role"] == "center"]
        os.kill(centre[0], signal.SIGSTOP)

    _meanwhile(stop_the_centre)
    # nothing but the replica's own count ends it
    run = dataclasses.replace(_long("parameter-server"), replicas=1, env_steps=None, updates=3_000)
    finish = train(run, folder)
    assert finish.code == 1
    assert "the centre died" in finish.summary["exit"]
    ended = [e["member"] for e in finish.summary["events"] if e["event"] in ("killed", "excluded")]
    assert ended == [1], "at the deadline of silence, or of the end"
    assert checkpoint.damage(folder / "checkpoints" / "last") is None


@pytest.mark.parametrize(("restarts", "words"), [(0, r"in the run folder\.$"), (3, "only while another")])
def test_when_all_have_died_it_says_why_no_restart_could_help(restarts: int, words: str) -> None:
    run = dataclasses.replace(_long(), replicas=1, restarts=restarts)
    with pytest.raises(RunFailed, match=words):
        local._finish(cast(Any, SimpleNamespace(run=run, dead={0: "SIGKILL"})))


def test_a_second_process_cannot_train_in_the_same_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    codes: list[int] = []

    def resume_then_interrupt() -> None:
        try:
            until(lambda: (folder / "checkpoints/last/state.json").exists(), "a checkpoint")
            codes.append(main(["resume", str(folder)]))
        finally:
            os.kill(os.getpid(), signal.SIGINT)

    _meanwhile(resume_then_interrupt)
    finish = train(_long(), folder)
    assert codes == [2]
    assert "another process is training in" in capsys.readouterr().err
    assert (finish.code, finish.summary["dead_replicas"]) == (130, [])
    assert json.loads((folder / "summary.json").read_text())["exit"] == "interrupted"
    # and once it is over, somebody may
    assert main(["resume", str(folder), "--env-steps", str(finish.summary["env_steps"] + 1)]) == 0
